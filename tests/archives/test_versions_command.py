"""`tensorhub versions`: what the coordinator and the archive know, side by side."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import pytest
from rich.console import Console

from tensorhub import sync
from tensorhub.archives.catalogue import Key
from tensorhub.archives.store import Store
from tensorhub.archives.writing import Archive
from tensorhub.cli import common
from tensorhub.cli.versions import KINDS, Copies, Row, Stored, looked_at, print_rows, rows_of
from tensorhub.types import ModelInfo, Options, ReplicaView
from tests.archives.models import apply, plain
from tests.archives.test_checkpoints import use
from tests.archives.test_versions import history
from tests.cli.processes import run_here
from tests.rig import CHUNK_BYTES, CHUNKS, tensors

MODEL = "actor"


def archived(store: Store, count: int = 7) -> Archive:
    """Versions 0, 4, ... are anchors."""
    archive = Archive(store, MODEL, "cluster", "host-1")
    history(archive, plain(Random(1)), Random(2), count)
    return archive


def said(*arguments: str, code: int = 0) -> dict[str, Any]:
    done = run_here("versions", MODEL, *arguments, "--json")
    assert (done.returncode, done.stderr) == (code, "")
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def lines(*arguments: str) -> list[list[str]]:
    done = run_here("versions", MODEL, *arguments)
    assert (done.returncode, done.stderr) == (0, "")
    return [line.split() for line in done.stdout.splitlines()]


# --------------------------------------------------------------------------------------------------
# the archive alone


def test_what_is_in_an_archive(
    store: Store, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    if store.url.startswith("s3://"):
        use(request.getfixturevalue("s3"), monkeypatch)
    versions = archived(store).catalogue.versions
    found = said("--at", store.url)
    assert (found["at"], found["known"], found["faults"]) == (store.url, 7, [])
    assert [each["version"] for each in found["versions"]] == [6, 5, 4, 3, 2, 1, 0]
    assert [each["archived"]["chain"] for each in found["versions"]] == [2, 1, 0, 3, 2, 1, 0]
    for each in found["versions"]:
        version = versions[Key(0, each["version"])]
        sizes = [
            stored.nbytes
            for stored in store.objects(MODEL)
            if stored.path.removeprefix(f"{MODEL}/") in version.own_objects
        ]
        assert each["archived"]["stored_bytes"] == sum(sizes)
        assert (each["nbytes"], each["state"], each["replicas"]) == (version.nbytes, None, {})


def test_as_lines(local: Store) -> None:
    archived(local, 3)
    assert lines("--at", local.url)[0] == ["version", "size", "archived", "stored"]
    assert [line[0] for line in lines("--at", local.url)[1:]] == ["2", "1", "0"]
    assert lines("--at", local.url)[1][3:5] == ["delta", "2"]
    *_, last, more = lines("--at", local.url, "--newest", "2")
    assert (last[0], " ".join(more)) == ("1", "and 1 older versions: --newest 3 shows all")


def test_objects_that_are_gone_or_changed(local: Store) -> None:
    archive = archived(local)
    there = archive.catalogue.versions
    frames, index = (there[Key(0, n)] for n in (2, 6))
    part = next(iter(index.parts))
    local.delete([archive.catalogue.at(frames.frames(0, 0)), f"{MODEL}/parts/{part}"])
    local.put(archive.catalogue.at(index.index), [b"?"])
    local.put(f"{MODEL}/versions/garbage", [b"?"])
    local.delete([archive.catalogue.at(there[Key(0, 4)].path)])
    found = said("--at", local.url, code=1)
    faults = found["faults"]
    assert (
        len(
            [
                each
                for each in faults
                if "is missing: another process has deleted it" in each and "based" not in each
            ]
        )
        == 2
    )
    for name in (frames.frames(0, 0), f"parts/{part}"):
        assert any(each.startswith(f"{local.url}/{MODEL}/{name} is missing") for each in faults)
    assert f"{local.url}/{MODEL}/{index.index} has 1 bytes, and not {index.index_bytes}" in str(
        faults
    )
    assert f"{local.url}/{MODEL}/versions/garbage is no manifest of a version" in str(faults)
    assert len([each for each in faults if "of which the manifest is missing" in each]) == 1
    assert [each["archived"]["chain"] for each in found["versions"]] == [None, None, 3, 2, 1, 0]
    done = run_here("versions", MODEL, "--at", local.url)
    assert done.returncode == 1
    assert "broken" in done.stdout
    assert [line.removeprefix("fault: ") for line in done.stderr.splitlines()] == faults


def test_an_archiver_that_goes_on_meanwhile_is_no_fault(
    local: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    archive, random = archived(local, 4), Random(3)
    listed = local.objects

    def objects(prefix: str, *most: int) -> Any:
        yield from listed(prefix, *most)
        if prefix == archive.catalogue.at(""):
            model = plain(random)
            archive.add_anchor(model.content(9), model.view)
            archive.anchor_again(Key(0, 3), apply)
            for key in (Key(0, 1), Key(0, 2)):
                version = archive.catalogue.versions[key]
                local.delete([archive.catalogue.at(version.path)])
                local.delete(map(archive.catalogue.at, version.own_objects))

    monkeypatch.setattr(local, "objects", objects)
    found, faults = looked_at(local, MODEL)
    assert faults == []
    assert [*found] == [Key(0, 0), Key(0, 3), Key(0, 9)]


def test_what_cannot_be_looked_at(local: Store, tmp_path: Path) -> None:
    for arguments, code, says in (
        ((), 2, "usage: no coordinator to talk to"),
        (("--at", "http://host"), 2, "usage: http://host is not where an archive can be"),
        (("--at", f"file://{tmp_path}/gone"), 1, "ArchiveUnavailable: file://"),
        (("--at", local.url), 1, f"VersionUnavailable: {local.url} has no version of 'actor'"),
        (("--address", "tcp://127.0.0.1:1"), 1, "CoordinatorUnavailable: "),
    ):
        done = run_here("versions", MODEL, *arguments)
        assert (done.returncode, done.stdout) == (code, "")
        assert done.stderr.startswith(f"error: {says}")


# --------------------------------------------------------------------------------------------------
# the cluster


@pytest.fixture
def cluster() -> Any:
    options = Options(chunk_bytes=CHUNK_BYTES, host_memory_bytes=2**22)
    with (
        sync.serve(token="") as coordinator,
        sync.connect(coordinator.address, name="trainer", options=options) as hub,
        sync.connect(coordinator.address, name="rollout", options=options) as rollout,
    ):
        yield coordinator.address, hub, rollout


def test_what_the_coordinator_knows(cluster: Any) -> None:
    address, hub, rollout = cluster
    weights = hub.register(MODEL, tensors(1))
    weights.publish(1)
    rollout.register(MODEL, tensors()).replicate(1)
    hub.register(MODEL, tensors(2)).publish(2)
    hub.retain(MODEL, latest=1)
    newest, before = said("--address", address)["versions"]
    assert (newest["version"], newest["state"], newest["retained"]) == (2, "available", True)
    assert (before["retained"], before["nbytes"]) == (False, CHUNKS * CHUNK_BYTES)
    assert newest["replicas"]["device"] == {"copies": 1, "shards": 1}
    assert before["replicas"]["device"] == {"copies": 2, "shards": 2}
    assert before["replicas"]["archive"] == {"copies": 0, "shards": 0}
    size = common.format_bytes(CHUNKS * CHUNK_BYTES).split()
    header, *rows = lines("--address", address)
    assert header == ["version", "size", "live", "kept", "device", "host", "seed", "archive"]
    assert rows == [
        ["2", *size, "yes", "yes", "1", "-", "-", "-"],
        ["1", *size, "yes", "no", "2", "-", "-", "-"],
    ]
    done = run_here("versions", "other", "--address", address)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.startswith("error: VersionUnavailable: ")


def test_both_side_by_side(cluster: Any, local: Store) -> None:
    address, hub, _ = cluster
    archived(local, 3)
    both = "--address", address, "--at", local.url
    assert [each["state"] for each in said(*both)["versions"]] == [None] * 3
    hub.register(MODEL, tensors(1)).publish(7)
    newest, *others = lines(*both)[1:]
    assert newest[3:] == ["yes", "no", "1", "-", "-", "-", "-", "-"]
    assert [line[3:9] for line in others] == [["-"] * 6] * 3
    hub.register(MODEL, tensors(1), group="another").publish(8)
    assert said(*both)["known"] == 5


def test_another_clusters_archive(cluster: Any, local: Store) -> None:
    address, hub, _ = cluster
    archived(local, 3)
    hub.register(MODEL, tensors(1)).publish(1)
    found = said("--address", address, "--at", local.url, code=1)
    assert found["faults"] == [
        "version 1 in the archive has another content than in the cluster: it is of another cluster"
    ]


def test_a_whole_copy_is_there_when_every_shard_is(cluster: Any) -> None:
    _, hub, _ = cluster
    weights = hub.register(MODEL, tensors(1))
    weights.publish(1)
    info: ModelInfo = hub.describe(MODEL)
    (version,), (device,) = info.versions, info.replicas
    shard = device.shards[0]

    def copy(purpose: str, rank: int, state: str = "ready") -> ReplicaView:
        shards = (replace(shard, rank=rank),)
        return replace(device, medium="host", purpose=purpose, shards=shards, state=state)

    replicas = (
        *(copy("seed", 0), copy("seed", 1), copy("seed", 1), copy("archive", 1)),
        *(copy("retention", 0), copy("prefetch", 1), copy("retention", 1, "filling")),
        replace(device, shards=(shard, replace(shard, rank=1))),
        replace(device, state="draining"),
    )
    info = replace(info, versions=(replace(version, world_size=2),), replicas=replicas)
    (row,) = rows_of(info, {})
    assert row.replicas == {
        "device": Copies(1, 2),
        "host": Copies(1, 2),
        "seed": Copies(1, 3),
        "archive": Copies(0, 1),
    }


def test_at_80_columns(monkeypatch: pytest.MonkeyPatch) -> None:
    """One line for each version, and nothing is cut."""
    copies = dict.fromkeys(KINDS, Copies(1024, 16384)) | {"archive": Copies(0, 15)}
    rows = [
        Row(10**7 - 1 - n, n % 2, "c", 999_900_000_000, 16, state, True, copies, Stored(128, 10**8))
        for n, state in enumerate(("available", "staged", "unavailable"))
    ]
    console = Console(width=80, force_terminal=True, color_system=None)
    monkeypatch.setattr("tensorhub.cli.common.print_table", console.print)
    with console.capture() as text:
        print_rows(MODEL, rows, 32, in_cluster=True, in_archive=True)
    shown = [line.split() for line in text.get().splitlines()]
    end = ["yes", *["1024"] * 3, "15/16", "delta", "128", "100.0", "MB"]
    assert shown[1:] == [
        ["9999999", "0", "999.9", "GB", "yes", *end],
        ["9999998", "1", "999.9", "GB", "staged", *end],
        ["9999997", "0", "999.9", "GB", "no", *end],
    ]
