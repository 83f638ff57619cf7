"""`tensorhub status`: its tables, and what it says when it cannot ask."""

import io
import json
import subprocess
from collections import Counter
from collections.abc import Callable
from dataclasses import replace

import pytest
from rich.console import Console

from tensorhub.cli.status import _tables, sheets
from tensorhub.types import (
    Endpoint,
    LeaseView,
    Location,
    ModelInfo,
    ReplicaView,
    ShardView,
    VersionView,
    WorkerView,
)
from tests.cli.processes import PROGRAM, line_with, run, started

MODEL = ModelInfo(
    "actor",
    lineage=0,
    mark=7,
    retain=2,
    versions=(VersionView(7, "c" * 32, "available", 90_000_000, 1, 0, True),),
    replicas=(ReplicaView("group-1", 7, "filling", "device", "use", "", True, (ShardView(0, "w1", "filling", 3, 12, 1),)),),
    leases=(LeaseView("l1", "w1", "[bold]w2", 7, 0, "active"),),
    workers=(WorkerView("w1", "i1", "live", Location("site-a", "rack-b", "host-c"), (Endpoint("tcp", "h:1"),)),),
)


LONG = "a-rollout-with-a-rather-long-name-on-node-0017-4711"
WIDE = replace(
    MODEL,
    replicas=(
        ReplicaView(
            f"{LONG}-ab12cd34", 7, "ready", "host", "prefetch", "", True, (ShardView(3, LONG, "doubtful", 1234, 1234, 17),)
        ),
    ),
    leases=(LeaseView("l1", LONG, LONG[::-1], 7, 0, "active"),),
    workers=(
        WorkerView(
            LONG,
            "i1",
            "suspect",
            Location("a-datacenter-in-the-north", "rack-0042", "node-0017.cluster.example"),
            (Endpoint("tcp", "tcp://127.0.0.1:41337"), Endpoint("shm", "unix:tensorhub-0123456789abcdef0123456789abcdef")),
        ),
    ),
)
HOSTILE = "a\x1b[2J\x9b31m\rb\u202e"


def terminal(*models: ModelInfo, width: int = 160) -> str:
    console = Console(file=io.StringIO(), width=width)
    console.print(_tables(models))
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def piped(*models: ModelInfo) -> str:
    return "\n".join(line for sheet in sheets(models) for line in sheet.lines())


@pytest.mark.parametrize("text", [terminal(MODEL), piped(MODEL)], ids=["terminal", "pipe"])
def test_tables_show_every_fact_and_take_no_name_for_markup(text: str) -> None:
    facts = "actor|mark 7|retains 2|available|90.0 MB|group-1|filling|spot|3/12|[bold]w2|site-a|rack-b|host-c|tcp h:1"
    for fact in facts.split("|"):
        assert fact in text


def test_at_80_columns_nothing_is_cut() -> None:
    text = terminal(WIDE, width=80)
    assert max(map(len, text.splitlines())) <= 80
    assert "…" not in text
    for fact in ("1234/1234", "17", "doubtful", "suspect", "7", "90.0 MB", "cccccccccccc", "retained", "readers", "chunks"):
        assert fact in text
    # What does not fit goes on below: each column, read downwards, has all of it.
    letters = Counter(text)
    for name in (LONG, f"{LONG}-ab12cd34", "node-0017.cluster.example", "unix:tensorhub-0123456789abcdef0123456789abcdef"):
        assert not Counter(name) - letters


def test_in_a_pipe_each_row_is_one_plain_line() -> None:
    text = piped(WIDE)
    assert text.isascii()
    rows = [line.split() for line in text.splitlines()]
    assert ["7", "doubtful", "3", "1234/1234", "17", "host", "prefetch", "spot", LONG, f"{LONG}-ab12cd34"] in rows
    assert ["version", "state", "rank", "chunks", "readers", "kind", "worker", "group"] in rows
    assert all(line == line.rstrip() for line in text.splitlines())


@pytest.mark.parametrize("show", [terminal, piped])
def test_no_name_is_a_command_to_the_terminal(show: Callable[..., str]) -> None:
    """They are refused where they arrive; whoever has got one in all the same writes nothing here either."""
    shard = ShardView(0, HOSTILE, HOSTILE, 3, 12, 1)
    text = show(
        ModelInfo(
            HOSTILE,
            0,
            7,
            2,
            (VersionView(7, HOSTILE, HOSTILE, 90, 1, 0, True),),
            (ReplicaView(HOSTILE, 7, HOSTILE, HOSTILE, HOSTILE, "", True, (shard,)),),
            (LeaseView("l1", HOSTILE, HOSTILE, 7, 0, HOSTILE),),
            (WorkerView(HOSTILE, "i1", HOSTILE, Location(HOSTILE, HOSTILE, HOSTILE), (Endpoint(HOSTILE, HOSTILE),)),),
        )
    )
    assert text.replace("\n", "").isprintable()
    assert "a\\x1b[2J\\x9b31m\\rb\\u202e" in text


def test_what_is_not_there_has_no_table() -> None:
    assert terminal() == "no model is registered\n"
    assert piped() == "no model is registered"
    empty = ModelInfo("new", 0, None, 0, (), (), (), ())
    assert terminal(empty).strip() == piped(empty) == "new: lineage 0, nothing published yet, retains 0"


@pytest.mark.parametrize(
    ("arguments", "code", "text"),
    [
        ((), 2, "give --address tcp://HOST:PORT or set TENSORHUB_ADDRESS"),
        (("--address", "here"), 2, "'here' is not a TensorHub address"),
    ],
)
def test_usage(arguments: tuple[str, ...], code: int, text: str) -> None:
    done = run("status", *arguments)
    assert (done.returncode, done.stdout) == (code, "")
    assert done.stderr.count("\n") == 1
    assert text in done.stderr


def test_nobody_there() -> None:
    pytest.importorskip("tensorhub.hub", exc_type=ImportError)
    done = run("status", "--address", "tcp://127.0.0.1:1")
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.startswith("error: CoordinatorUnavailable: ")
    assert done.stderr.count("\n") == 1


def test_an_empty_coordinator() -> None:
    pytest.importorskip("tensorhub.hub", exc_type=ImportError)
    with started("serve") as coordinator:
        address = line_with("tcp://", coordinator.stdout).strip()
        done = run("status", "--address", address, "--json")
        assert (done.returncode, json.loads(done.stdout), done.stderr) == (0, [], "")
        assert run("status", "--address", address).stdout == "no model is registered\n"
        with open("/dev/full", "w") as full:
            done = subprocess.run([*PROGRAM, "status", "--address", address], stdout=full, stderr=subprocess.PIPE, text=True)
        text = "error: output: stdout cannot be written: No space left on device\n"
        assert (done.returncode, done.stderr) == (1, text)
        with started("status", "--address", address, "--watch", "--interval-s", "0.1", "--json") as watching:
            assert [line_with("", watching.stdout) for _ in range(3)] == ["[]\n"] * 3
