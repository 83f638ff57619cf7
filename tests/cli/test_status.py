"""`tensorhub status`: its tables, and what it says when it cannot ask."""

import contextlib
import io
import json
import re
import subprocess
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy
import pytest
from rich.console import Console

from tensorhub import sync
from tensorhub.cli.common import print_table
from tensorhub.cli.sheets import tables
from tensorhub.cli.status import ask
from tensorhub.types import (
    CallsSummary,
    DeltaUse,
    Endpoint,
    LayoutSummary,
    LeaseView,
    Location,
    ModelInfo,
    ModelSummary,
    ReplicaView,
    ShardView,
    SilentWorker,
    VersionSummary,
    VersionView,
    WorkerView,
)
from tests.cli.processes import PROGRAM, line_with, run_here, started
from tests.rig import OPTIONS, cluster, tensors

MODEL = ModelInfo(
    "actor",
    lineage=0,
    mark=7,
    retain=2,
    versions=(VersionView(7, "c" * 32, "available", 90_000_000, 1, 0, True),),
    replicas=(
        ReplicaView(
            "group-1",
            7,
            "filling",
            "device",
            "use",
            "",
            True,
            (ShardView(0, "w1", "filling", 3, 12, 1),),
        ),
    ),
    leases=(LeaseView("l1", "w1", "[bold]w2", 7, 0, "active"),),
    workers=(
        WorkerView(
            "w1", "i1", "live", Location("site-a", "rack-b", "host-c"), (Endpoint("tcp", "h:1"),)
        ),
    ),
)


LONG = "a-rollout-with-a-rather-long-name-on-node-0017-4711"
WIDE = replace(
    MODEL,
    replicas=(
        ReplicaView(
            f"{LONG}-ab12cd34",
            7,
            "ready",
            "host",
            "prefetch",
            "",
            True,
            (ShardView(3, LONG, "doubtful", 1234, 1234, 17),),
        ),
    ),
    leases=(LeaseView("l1", LONG, LONG[::-1], 7, 0, "active"),),
    workers=(
        WorkerView(
            LONG,
            "i1",
            "suspect",
            Location("a-datacenter-in-the-north", "rack-0042", "node-0017.cluster.example"),
            (
                Endpoint("tcp", "tcp://127.0.0.1:41337"),
                Endpoint("shm", "unix:tensorhub-0123456789abcdef0123456789abcdef"),
            ),
        ),
    ),
)
HOSTILE = "a\x1b[2J\x9b31m\rb\u202e"


def is_counted(models: tuple[ModelInfo, ...]) -> bool:
    return all(model.summary is not None for model in models)


def terminal(*models: ModelInfo, width: int = 160) -> str:
    console = Console(file=io.StringIO(), width=width)
    console.print(tables(models, counted=is_counted(models)))
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def piped(*models: ModelInfo) -> str:
    with contextlib.redirect_stdout(io.StringIO()) as shown:
        print_table(tables(models, counted=is_counted(models)))
    return shown.getvalue().rstrip("\n")


@pytest.mark.parametrize("text", [terminal(MODEL), piped(MODEL)], ids=["terminal", "pipe"])
def test_tables_show_every_fact_and_take_no_name_for_markup(text: str) -> None:
    facts = (
        "actor|mark 7|retains 2|available|90.0 "
        "MB|group-1|filling|spot|3/12|[bold]w2|site-a|rack-b|host-c|tcp h:1"
    )
    for fact in facts.split("|"):
        assert fact in text


def test_at_80_columns_nothing_is_cut() -> None:
    text = terminal(WIDE, width=80)
    assert max(map(len, text.splitlines())) <= 80
    assert "…" not in text
    for fact in (
        "1234/1234",
        "17",
        "doubtful",
        "not heard",
        "7",
        "90.0 MB",
        "cccccccccccc",
        "retained",
        "readers",
        "chunks",
    ):
        assert fact in text
    # What does not fit goes on below: each column, read downwards, has all of it.
    letters = Counter(text)
    for name in (
        LONG,
        f"{LONG}-ab12cd34",
        "node-0017.cluster.example",
        "unix:tensorhub-0123456789abcdef0123456789abcdef",
    ):
        assert not Counter(name) - letters


def test_in_a_pipe_each_row_is_one_plain_line() -> None:
    text = piped(WIDE)
    assert text.isascii()
    rows = [line.split() for line in text.splitlines()]
    assert [
        "7",
        "doubtful",
        "3",
        "1234/1234",
        "17",
        "host",
        "prefetch",
        "spot",
        LONG,
        f"{LONG}-ab12cd34",
    ] in rows
    assert ["version", "state", "rank", "chunks", "readers", "kind", "worker", "group"] in rows
    assert all(line == line.rstrip() for line in text.splitlines())


def test_reads_say_whether_they_get_deltas_once_their_readers_have_told() -> None:
    assert "deltas" not in piped(MODEL)
    told = replace(MODEL.leases[0], deltas=DeltaUse.FAST_LINK)
    rows = [line.split() for line in piped(replace(MODEL, leases=(told,))).splitlines()]
    assert ["version", "state", "rank", "deltas", "reader", "reads", "from"] in rows
    assert ["7", "active", "0", "fast", "link", "w1", "[bold]w2"] in rows


@pytest.mark.parametrize("show", [terminal, piped])
def test_no_name_is_a_command_to_the_terminal(show: Callable[..., str]) -> None:
    """They are refused where they arrive; whoever has got one in all the same writes nothing here
    either.
    """
    shard = ShardView(0, HOSTILE, HOSTILE, 3, 12, 1)
    versions = (VersionView(7, HOSTILE, HOSTILE, 90, 1, 0, True, summary=NEWEST.summary),)
    replicas = (ReplicaView(HOSTILE, 7, HOSTILE, HOSTILE, HOSTILE, "", True, (shard,)),)
    leases = (LeaseView("l1", HOSTILE, HOSTILE, 7, 0, HOSTILE),)
    worker = WorkerView(
        HOSTILE, "i1", HOSTILE, Location(HOSTILE, HOSTILE, HOSTILE), (Endpoint(HOSTILE, HOSTILE),)
    )
    rows = ModelInfo(HOSTILE, 0, 7, 2, versions, replicas, leases, (worker,))
    calls, silent = (
        (CallsSummary(HOSTILE, HOSTILE, 1, 0.0, HOSTILE),),
        (SilentWorker(HOSTILE, HOSTILE, 0.0),),
    )
    for model in (rows, replace(rows, summary=replace(COUNTS, calls=calls, silent=silent))):
        text = show(model)
        assert text.replace("\n", "").isprintable()
        assert "a\\x1b[2J\\x9b31m\\rb\\u202e" in text


def test_what_is_not_there_has_no_table() -> None:
    assert terminal() == "no model is registered\n"
    assert piped() == "no model is registered"
    empty = ModelInfo("new", 0, None, 0, (), (), (), ())
    assert (
        terminal(empty).strip()
        == piped(empty)
        == "new: lineage 0, nothing published yet, retains 0"
    )


def test_a_coordinator_that_is_behind_is_said_to_be() -> None:
    for model in (ModelInfo("new", 0, None, 0, (), (), (), ()), COUNTED):
        assert "behind" not in piped(model)
        assert replace(model, coordinator_behind_s=2.46) == model  # it is nothing of the model
        assert "; the coordinator is 2.5 s behind: calls take longer" in piped(
            replace(model, coordinator_behind_s=2.46)
        )


NEWEST = VersionView(
    7,
    "c7",
    "available",
    90_000_000,
    8,
    0,
    True,
    summary=VersionSummary(100, 101, 27, 0, 0, 3, 0, 17),
)
OLDER = VersionView(
    6, "c6", "unavailable", 90_000_000, 8, 0, False, summary=VersionSummary(0, 0, 0, 0, 0, 0, 0, 0)
)
COUNTS = ModelSummary(
    workers=1024,
    suspect=40,
    groups=128,
    shards=2048,
    reads=17,
    versions_known=33,
    calls=(
        CallsSummary("update", "chunks", 5, 12.3, "[bold]group-9"),
        CallsSummary("leave", "readers", 1, 0.25, "w1"),
    ),
    silent=(SilentWorker("node-0017", "i17", 7.25),),
)
COUNTED = ModelInfo("actor", 0, 7, 2, (OLDER, NEWEST), (), (), (), COUNTS)


def of_version(view: VersionView, **counts: Any) -> VersionView:
    assert view.summary is not None
    return replace(view, summary=replace(view.summary, **counts))


@pytest.mark.parametrize(
    "text", [terminal(COUNTED, width=80), piped(COUNTED)], ids=["terminal", "pipe"]
)
def test_a_summary_shows_what_waits_who_is_not_heard_and_how_much_there_is(text: str) -> None:
    lines = [" ".join(line.split()) for line in text.splitlines()]
    assert "actor: lineage 0, mark 7, retains 2" in lines
    assert "workers 1,024, 40 of them not heard; groups 128; shards 2,048; reads 17" in lines
    # nothing is torn
    assert "version state retained copies ready filling doubtful readers" in lines
    assert "7 available yes 100 101 27 3 17" in lines
    assert "and 31 older versions" in lines
    assert "update chunks 5 12 s [bold]group-9" in lines
    assert "leave readers 1 0.2 s w1" in lines
    assert "node-0017 7.2 s" in lines
    assert "and 39 more" in lines
    assert max(map(len, text.splitlines())) <= 80


@pytest.mark.parametrize("show", [terminal, piped])
def test_a_version_that_lacks_shards_says_which_and_a_summary_how_many(
    show: Callable[..., str],
) -> None:
    view = replace(MODEL.versions[0], state="unavailable", world_size=20, missing=(0, 3))
    several = [view, replace(view, version=6, missing=tuple(range(16)))]
    several += [replace(view, version=5, missing=()), replace(view, version=4, world_size=2)]
    lines = [
        " ".join(line.split())
        for line in show(replace(MODEL, versions=tuple(several))).splitlines()
    ]
    assert "version state size shards missing as published retained content" in lines
    assert sum(line.startswith("7 unavailable 90.0 MB 20 0, 3 yes") for line in lines) == 1
    assert any(line.startswith("6 unavailable") and "14, 15, ..." in line for line in lines)
    assert any(line.startswith("5 unavailable 90.0 MB 20 - yes") for line in lines)
    assert any(line.startswith("4 unavailable 90.0 MB 2 all yes") for line in lines)
    assert "missing" not in show(MODEL)
    counted = replace(COUNTED, versions=(of_version(OLDER, missing=2), NEWEST))
    lines = [" ".join(line.split()) for line in show(counted).splitlines()]
    assert (
        "version state retained copies ready filling doubtful missing as published readers" in lines
    )
    assert "6 unavailable no 0 0 0 0 2 0" in lines


@pytest.mark.parametrize("show", [terminal, piped])
def test_a_summary_shows_the_layouts_of_a_version_that_has_several(
    show: Callable[..., str],
) -> None:
    layouts = (
        LayoutSummary("own/0123456789abcdef", True, 1, 1, 0, 4, 48, 48),
        LayoutSummary("own/fed", False, 9, 7, 1, 18, 90, 81),
    )
    counted = replace(COUNTED, versions=(of_version(NEWEST, layouts_known=4, layouts=layouts),))
    lines = [
        " ".join(line.split())
        for line in show(counted, **({"width": 80} if show is terminal else {})).splitlines()
    ]
    assert "version 7 by layout, and 2 others" in lines
    assert "layout replicas ready bridging shards chunks" in lines
    assert "published 1 1 0 4 48/48" in lines
    assert "own/fed 9 7 1 18 81/90" in lines
    assert "by layout" not in show(COUNTED)


@pytest.mark.parametrize("show", [terminal, piped])
def test_rows_show_layouts_and_who_bridges_where_there_are_several(
    show: Callable[..., str],
) -> None:
    (shard,) = MODEL.replicas[0].shards
    several = replace(
        MODEL,
        versions=(replace(MODEL.versions[0], layout_id="ranks/0123456789abcdef"),),
        replicas=(
            replace(MODEL.replicas[0], layout_id="own/0123456789abcdef", bridging=1, spot=False),
            replace(
                MODEL.replicas[0],
                group="trainer",
                layout_id="ranks/0123456789abcdef",
                shards=(replace(shard, worker="t"),),
            ),
        ),
        leases=(replace(MODEL.leases[0], across=True),),
    )
    lines = [" ".join(line.split()) for line in show(several).splitlines()]
    assert "version state rank chunks readers layout kind worker group" in lines
    assert "7 filling 0 3/12 1 own/01234567 bridging w1 group-1" in lines
    assert "7 filling 0 3/12 1 published spot t trainer" in lines
    assert "7 active 0 a part w1 [bold]w2" in lines
    assert "layout" not in show(MODEL)


async def test_a_terminal_shows_the_rows_of_a_small_cluster_and_counts_those_of_a_large_one() -> (
    None
):
    async with cluster("trainer", "reader") as c:
        weights = await c.hubs[0].register("m", tensors(1))
        await weights.publish(1)  # a version, a shard and a worker
        described, counted = (
            (await c.hubs[1].describe(), False),
            (await c.hubs[1].describe(limit=0), True),
        )
        for model in (None, "m"):
            for rows_max, shown in ((3, described), (2, counted), (None, described), (0, counted)):
                assert await ask(model, c.hubs[1], rows_max=rows_max) == shown


def test_what_is_asked_for_in_a_pipe() -> None:
    with (
        sync.serve(token="", options=OPTIONS) as coordinator,
        sync.connect(coordinator.address, token="", name="w") as hub,
    ):
        address = ("--address", coordinator.address)
        done = run_here("status", "--json", *address)
        assert (done.returncode, json.loads(done.stdout), done.stderr) == (0, [], "")
        assert run_here("status", *address).stdout == "no model is registered\n"
        hub.register("m", tensors(1)).publish(1)
        (model,) = json.loads(run_here("status", "--summary", "--json", *address).stdout)
        assert (model["summary"]["workers"], model["versions"][0]["summary"]["ready"]) == (1, 1)
        assert model["summary"]["calls"] == model["workers"] == []
        assert "workers 1; groups 1; shards 1; reads 0" in run_here("status", "-s", *address).stdout
        (model,) = json.loads(run_here("status", "m", "--json", *address).stdout)
        assert [worker["name"] for worker in model["workers"]] == ["w"]
        done = run_here("status", "n", *address)
        assert (done.returncode, done.stdout) == (1, "")
        assert done.stderr.startswith("error: VersionUnavailable: ")
        done = run_here("status", "--summary", "--details", *address)
        assert (done.returncode, done.stdout) == (2, "")
        assert "--summary counts everything" in done.stderr


def test_it_watches_on_after_a_coordinator_that_was_away() -> None:
    with started("serve") as coordinator:
        address = line_with("tcp://", coordinator.stdout).strip()
        with open("/dev/full", "w") as full:
            done = subprocess.run(
                [*PROGRAM, "status", "--address", address],
                stdout=full,
                stderr=subprocess.PIPE,
                text=True,
            )
        text = "error: output: stdout cannot be written: No space left on device\n"
        assert (done.returncode, done.stderr) == (1, text)
        watch = ("status", "--address", address, "--watch", "--interval-s", "0.1")
        with started(*watch) as watching:
            for _ in range(2):
                assert re.fullmatch(
                    r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d\n", line_with("", watching.stdout)
                )
                assert line_with("", watching.stdout) == "no model is registered\n"
        with started(*watch, "--json") as watching:
            assert line_with("", watching.stdout) == "[]\n"
            coordinator.kill()
            coordinator.wait()
            assert line_with("coordinator_unreachable", watching.stderr)
            with sync.serve(port=int(address.rpartition(":")[2])), sync.connect(address) as hub:
                hub.register("actor", {"w": numpy.zeros(1)})
                assert line_with('"actor"', watching.stdout)
                assert line_with("coordinator_found", watching.stderr)
