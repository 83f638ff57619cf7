"""`tensorhub status`: its tables, and what it says when it cannot ask."""

import io
import json

import pytest
from rich.console import Console

from tensorhub.cli.status import render
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
from tests.cli.processes import line_with, run, started

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


def text_of(*models: ModelInfo) -> str:
    console = Console(file=io.StringIO(), width=160)
    console.print(render(models))
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def test_tables_show_every_fact_and_take_no_name_for_markup() -> None:
    text = text_of(MODEL)
    for (
        fact
    ) in "actor|mark 7|retains 2|available|90.0|group-1|filling|spot|3/12|[bold]w2|site-a|rack-b|host-c|tcp h:1".split("|"):
        assert fact in text


def test_what_is_not_there_has_no_table() -> None:
    assert text_of() == "no model is registered\n"
    empty = ModelInfo("new", 0, None, 0, (), (), (), ())
    assert text_of(empty).strip() == "new: lineage 0, nothing published yet, retains 0"


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
        with started("status", "--address", address, "--watch", "--interval-s", "0.1", "--json") as watching:
            assert [line_with("", watching.stdout) for _ in range(3)] == ["[]\n"] * 3
