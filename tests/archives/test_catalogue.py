"""Manifests, which are hostile when they are read; and the one writer."""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Callable, Iterable
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from random import Random
from typing import Any

import pytest
from hypothesis import given, strategies as st

from tensorhub.archives import catalogue as catalogues
from tensorhub.archives.catalogue import (
    CHAIN_MAX,
    MANIFEST_BYTES_MAX,
    Anchor,
    Key,
    Shard,
    Version,
    VersionCatalogue,
    decode,
    directory_of,
    leftovers,
)
from tensorhub.archives.claim import Claim
from tensorhub.archives.retention import Keep
from tensorhub.archives.store import Store
from tensorhub.archives.writing import Archive
from tensorhub.errors import IntegrityError, LeaseLost, StateError, VersionUnavailable
from tensorhub.model.manifest import CHUNKS_MAX
from tests.archives.models import plain

Open = Callable[[], Store]

IDS = st.text("0123456789abcdef", min_size=32, max_size=32)
SIZES = st.integers(0, 2**40)
KEYS = st.builds(Key, st.integers(0, 2**63 - 1), st.integers(0, 2**63 - 1))
NAMES = st.from_regex(r"[a-z][a-z0-9-]{0,20}", fullmatch=True)


@st.composite
def versions(draw: st.DrawFn) -> Version:
    after, base, key = sorted(draw(st.sets(KEYS, min_size=3, max_size=3)))
    digest = draw(st.sampled_from(["xxh3-64", "sha-256", "none"]))
    is_delta = draw(st.booleans())
    shards = []
    for _ in range(draw(st.integers(1, 4))):
        chunks = draw(st.integers(0, 2**20))
        frames = st.lists(st.integers(0, chunks), max_size=3)
        its = tuple(draw(frames)) if is_delta else ()
        shards.append(Shard(draw(IDS), chunks, its, 0 if is_delta else draw(SIZES)))
    try_ = f"{key}-{draw(IDS)[:16]}"
    files = {f"{name}.safetensors": draw(SIZES) for name in draw(st.sets(NAMES, max_size=3))}
    others = {f"{name}.json": draw(SIZES) for name in draw(st.sets(NAMES, max_size=3))}
    return Version(
        draw(st.text(st.characters(categories=["L", "N", "P", "S"]), min_size=1, max_size=40)),
        key,
        draw(IDS),
        draw(SIZES),
        digest,  # type: ignore[arg-type]
        draw(IDS),
        draw(NAMES),
        tuple(shards),
        f"data/{try_}",
        draw(IDS),
        draw(st.sampled_from([None, after])),
        base if is_delta else None,
        None if is_delta else Anchor(f"anchors/{try_}", files, others),
        draw(st.integers(0, 100)),
    )


@given(versions())
def test_manifests_are_read_as_they_were_written(version: Version) -> None:
    assert decode(version.encode()) == version


HOSTILE: list[Any] = [
    None,
    True,
    -1,
    0,
    1.5,
    2**63,
    10**400,
    "",
    "x",
    "..",
    "\ud800",
    [],
    {},
    [[]],
    [1],
    {"a": -1},
    "a" * 600,
]


def paths(value: Any, at: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    inner = (
        value.items()
        if isinstance(value, dict)
        else enumerate(value)
        if isinstance(value, list)
        else ()
    )
    return [at, *(path for name, each in inner for path in paths(each, (*at, name)))]


@given(versions(), st.data())
def test_any_change_is_refused_or_says_something_else(
    version: Version, data: st.DataObject
) -> None:
    said = json.loads(version.encode())
    path = data.draw(st.sampled_from([each for each in paths(said) if each]))
    *outer, last = path
    place = said
    for name in outer:
        place = place[name]
    match data.draw(st.sampled_from(["replace", "remove", "add"])):
        case "replace":
            place[last] = data.draw(st.sampled_from(HOSTILE))
        case "remove":
            del place[last]
        case _ if isinstance(place, dict):
            place["more"] = data.draw(st.sampled_from(HOSTILE))
        case _:
            place.append(data.draw(st.sampled_from(HOSTILE)))
    text = json.dumps(said).encode()
    try:
        found = decode(text)
    except ValueError:
        return
    assert decode(found.encode()) == found
    assert found.base is None or found.base < found.key


@given(st.binary(max_size=200))
def test_bytes_that_are_no_manifest(text: bytes) -> None:
    with pytest.raises(ValueError, match=r"."):
        decode(text)


@pytest.mark.parametrize(
    "text",
    [
        b"[" * 10**5,
        b'{"a":' * 10**5,
        b'{"format":1,"format":1}',
        b'{"format":NaN}',
        b" " * (MANIFEST_BYTES_MAX + 1),
        b'{"format":2}',
    ],
)
def test_deep_and_large_ones_are_refused(text: bytes) -> None:
    with pytest.raises(ValueError, match=r"deep|large|more|twice|number|format|JSON"):
        decode(text)


def test_tables_beyond_all_bounds_are_refused() -> None:
    huge = replace(anchor(1), shards=(Shard("0" * 32, CHUNKS_MAX), Shard("0" * 32, 1)))
    with pytest.raises(ValueError, match="its shards have more than"):
        decode(huge.encode())


def anchor(number: int, lineage: int = 0) -> Version:
    key = Key(lineage, number)
    try_, no_id = f"{key}-{'0' * 16}", "0" * 32
    whole, shards = Anchor(f"anchors/{try_}", {}, {}), (Shard(no_id, 1),)
    return Version(
        "actor",
        key,
        str(number),
        0,
        "none",
        no_id,
        "layout",
        shards,
        f"data/{try_}",
        no_id,
        anchor=whole,
    )


def delta(number: int, base: int) -> Version:
    return replace(anchor(number), base=Key(0, base), anchor=None)


def put(store: Store, *found: Version) -> VersionCatalogue:
    for each in found:
        store.put(f"actor/{each.path}", [each.encode()])
    return VersionCatalogue(store, "actor").load()


def test_the_highest_turn_counts(store: Store) -> None:
    newer = replace(anchor(2), turn=1)
    catalogue = put(store, anchor(1), delta(2, 1), newer, delta(3, 2))
    assert [*catalogue.versions] == [Key(0, 1), Key(0, 2), Key(0, 3)]
    assert catalogue.replaced == [delta(2, 1)]
    assert [each.key.number for each in catalogue.chain(Key(0, 3))] == [2, 3]
    store.delete([f"actor/{newer.path}"])
    assert [each.key.number for each in catalogue.load().chain(Key(0, 3))] == [1, 2, 3]
    assert catalogue.replaced == []


def test_chains_that_break(local: Store) -> None:
    catalogue = put(local, anchor(1), delta(3, 2))
    with pytest.raises(
        IntegrityError, match=r"version 0-3.*is based on 0-2, of which the manifest"
    ):
        catalogue.chain(Key(0, 3))
    with pytest.raises(VersionUnavailable, match="has no version 0-4 of 'actor'; it has 0-1, 0-3"):
        catalogue.chain(Key(0, 4))
    catalogue.versions |= {Key(0, n): delta(n, n - 1) for n in range(2, CHAIN_MAX + 3)}
    assert len(catalogue.chain(Key(0, CHAIN_MAX))) == CHAIN_MAX
    with pytest.raises(IntegrityError, match="too many"):
        catalogue.chain(Key(0, CHAIN_MAX + 1))


def test_a_manifest_that_is_none_is_named_and_stops_deletion(store: Store) -> None:
    bad = f"actor/{anchor(2).path}"
    store.put(bad, [b"{}"])
    store.put(f"actor/{anchor(4).path}", [anchor(5).encode()])  # of another version
    store.put("actor/versions/notes.txt", [b"mine"])
    catalogue = put(store, anchor(1))
    assert [*catalogue.versions] == [Key(0, 1)]
    assert len(catalogue.faults) == 3
    assert f"{store.url}/{bad} is no manifest of a version" in catalogue.faults[0]
    with pytest.raises(IntegrityError, match=r"nothing is deleted.*restore them, or delete them"):
        leftovers(catalogue)
    store.delete([bad])
    assert len(catalogue.load().faults) == 2


@given(st.text(min_size=1, max_size=512), st.text(min_size=1, max_size=512))
def test_models_have_places_of_their_own(one: str, other: str) -> None:
    try:
        places = [directory_of(each) for each in (one, other)]
    except UnicodeEncodeError:
        return
    assert (places[0] == places[1]) == (one == other)
    for place in places:
        assert len(place) < 200
        assert "/" not in place
        assert not place.startswith(".")


# --------------------------------------------------------------------------------------------------
# the one writer


def test_a_second_archiver_is_refused(open_store: Open) -> None:
    first = Archive(open_store(), "actor", "cluster", "host-1")
    with pytest.raises(
        StateError, match=r"is being written by 'host-1': end that.*take_over"
    ) as caught:
        Archive(open_store(), "actor", "cluster", "host-2")
    assert first.catalogue.store.url in str(caught.value)
    Archive(open_store(), "critic", "cluster", "host-2")
    first.claim.check()
    first.close()
    Archive(open_store(), "actor", "cluster", "host-2")


def test_an_archive_of_another_cluster_is_refused(local: Store) -> None:
    Archive(local, "actor", "cluster 1", "host-1").close()
    with pytest.raises(
        StateError, match=r"of another cluster \(cluster 1; this one is cluster 2\)"
    ):
        Archive(local, "actor", "cluster 2", "host-1")
    Archive(local, "actor", "cluster 2", "host-1", former="cluster 1")
    with pytest.raises(StateError, match="of another cluster"):
        Archive(local, "actor", "cluster 1", "host-1")


def test_a_writer_that_was_replaced_writes_no_more(open_store: Open) -> None:
    random = Random(1)
    model = plain(random)
    first = Archive(open_store(), "actor", "cluster", "host-1")
    first.add_anchor(model.content(1), model.view)
    second = Archive(open_store(), "actor", "cluster", "host-2", take_over=True)
    for call in (
        lambda: first.add_anchor(model.content(2), model.view),
        lambda: first.sweep(),
        lambda: first.close(),
    ):
        with pytest.raises(LeaseLost, match="was taken over by 'host-2'"):
            call()
    assert second.catalogue.load().versions.keys() == {Key(0, 1)}
    assert second.claim.writer.archive == first.claim.writer.archive


def test_a_writer_that_cannot_begin_leaves_the_archive_to_others(
    local: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    put(local, anchor(1))
    with monkeypatch.context() as patched:
        patched.setattr(catalogues, "VERSIONS_MAX", 0)
        with pytest.raises(IntegrityError, match="has more than 0 objects"):
            Archive(local, "actor", "cluster", "host-1")
    Archive(local, "actor", "cluster", "host-2")


def test_after_a_crash_the_same_owner_goes_on(local: Store) -> None:
    Archive(local, "actor", "cluster", "host-1")  # never closed
    again = Archive(local, "actor", "cluster", "host-1")
    again.close()
    Archive(local, "actor", "cluster", "host-1")
    assert len([*local.objects("actor/writers")]) == 2  # older ones are removed


def test_of_two_that_claim_at_once_one_is_refused(open_store: Open) -> None:
    start, outcomes = threading.Barrier(5), list[str]()

    def claim(which: int) -> None:
        catalogue = VersionCatalogue(open_store(), "actor")
        start.wait(60)
        try:
            Claim(catalogue, "cluster", f"host-{which}")
            outcomes.append("claimed")
        except StateError:
            outcomes.append("refused")

    threads = [threading.Thread(target=claim, args=(each,)) for each in range(5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(outcomes) == ["claimed", *["refused"] * 4]


def test_a_store_without_conditional_writes_is_refused(
    local: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    def replaces(path: str, data: bytes) -> bool:
        return local.put(path, [data]) > 0

    monkeypatch.setattr(local, "create", replaces)
    with pytest.raises(StateError, match="ignores If-None-Match"):
        Archive(local, "actor", "cluster", "host-1")


@pytest.mark.parametrize("text", [b"", b"{}", b"[]", b'{"archive": 1}', b"x" * 2**17])
def test_a_writer_that_is_none(text: bytes, local: Store) -> None:
    local.put("actor/writers/000000000007.json", [text])
    with pytest.raises(IntegrityError, match=r"000000000007.json"):
        Archive(local, "actor", "cluster", "host-1")


# --------------------------------------------------------------------------------------------------
# leftovers


def test_leftovers_are_found_by_the_servers_clock(local: Store, tmp_path: Path) -> None:
    model = plain(Random(1))
    archive = Archive(local, "actor", "cluster", "host-1")
    archive.add_anchor(model.content(1), model.view)
    used = {each.path for each in local.objects("actor")}
    old, young = ["actor/data/old", "actor/anchors/0-9-x/a", "actor/parts/x"], "actor/data/young"
    for path in (*old, young):
        local.put(path, [b"1"])
    staged = tmp_path / "archive/actor/data/frames#1"
    staged.write_bytes(b"1")
    for path in (*old, *used, "actor/data/frames#1"):
        place = tmp_path / "archive" / path
        hours = timedelta(hours=25).total_seconds()
        os.utime(place, (place.stat().st_atime - hours, place.stat().st_mtime - hours))
    assert sorted(archive.sweep()) == sorted([*old, "actor/data/frames#1"])
    assert {each.path for each in local.objects("actor")} == {*used, young}
    assert not staged.exists()
    assert archive.sweep(timedelta(0)) == [young]


def test_deletion_ends_where_another_process_takes_over(
    local: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = plain(Random(1))
    first = Archive(local, "actor", "cluster", "host-1")
    for number in (1, 2, 3):
        first.add_anchor(model.content(number), model.view)
    delete, deleted = local.delete, list[str]()

    def delete_and_lose(paths: Iterable[str]) -> None:
        some = [*paths]
        deleted.extend(some)
        delete(some)
        if len(deleted) == 1:
            Archive(Store(local.url), "actor", "cluster", "host-2", take_over=True)

    monkeypatch.setattr(local, "delete", delete_and_lose)
    with pytest.raises(LeaseLost, match="taken over by 'host-2'"):
        first.retain(Keep(1), lambda frame, target: None)
    assert len(deleted) == 1
    assert len(VersionCatalogue(Store(local.url), "actor").load().versions) == 2


def test_a_process_that_has_left_an_archive_writes_there_no_more(local: Store) -> None:
    archive = Archive(local, "actor", "cluster", "host-1")
    archive.close()
    with pytest.raises(LeaseLost):
        archive.claim.check()


def test_a_number_that_no_writer_has_is_named(local: Store) -> None:
    Archive(local, "actor", "cluster", "host-1").close()
    name = "actor/writers/999999999999.json"
    at, (path, *_) = "actor/writers/", sorted(each.path for each in local.objects("actor/writers"))
    assert path.startswith(at)
    local.create(name, local.read(path))
    with pytest.raises(IntegrityError, match=r"999999999999\.json"):
        Archive(local, "actor", "cluster", "host-1", take_over=True)
