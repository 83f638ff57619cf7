"""`tensorhub plan`: what it prints, and what it refuses."""

from __future__ import annotations

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

import tensorhub
from tensorhub import sync
from tests.cli.processes import run, run_here

pytestmark = pytest.mark.usefixtures("prepared_with_torch")
LAYOUT = """
import torch
import tensorhub

def halves(rank, world_size):
    each = 8 // world_size
    mine = slice(rank * each, (rank + 1) * each)
    return {"part": torch.empty(16, each, device="meta")}, {"part": tensorhub.source("w")[:, mine]}

def left_out(rank, world_size):
    return {"part": torch.empty(16, 3, device="meta")}, {"part": tensorhub.source("w")[:, 3 * rank : 3 * rank + 3]}

def transposed(rank, world_size):
    return {"w": torch.empty(8, 16, device="meta").T}

def broken(rank, world_size):
    raise KeyError("no such config")

constant = 3
"""


@pytest.fixture
def published(address: str) -> Iterator[str]:
    """A version of two ranks, each with half of the rows."""
    with sync.connect(address, name="trainer") as hub:
        made = []
        for rank in range(2):
            sources = {"rows": tensorhub.source("w", shape=(16, 8))[8 * rank : 8 * (rank + 1)]}
            made.append(
                hub.register(
                    "m",
                    {"rows": torch.zeros(8, 8)},
                    group="t",
                    rank=rank,
                    world_size=2,
                    sources=sources,
                )
            )
        with ThreadPoolExecutor() as threads:  # both ranks, at once
            list(threads.map(lambda each: each.publish(1), made))
        yield address


@pytest.fixture
def layout(tmp_path: Path) -> Path:
    path = tmp_path / "layout.py"
    path.write_text(LAYOUT)
    return path


def test_each_rank_of_a_layout_in_a_file_as_a_table_and_as_json(
    published: str, layout: Path
) -> None:
    ask = ("plan", "m", "--reader", f"{layout}:halves", "--world-size", "2", "--address", published)
    done = run(*ask)
    assert (done.returncode, done.stderr) == (0, "")
    lines = [" ".join(line.split()) for line in done.stdout.splitlines()]
    assert lines[0] == "m version 1, rank 0 of 2: 256 B in 2 chunks, 2 cells, 16 runs"
    assert lines[1] == "deltas: none (other layout)"
    assert lines[3:6] == [
        "of rank held by chunks cells runs a run bytes of the shard",
        "0 trainer 1 1 8 16 B 128 B 50.0 %",
        "1 trainer 1 1 8 16 B 128 B 50.0 %",
    ]
    assert lines[6].startswith("m version 1, rank 1 of 2: ")
    (only,) = json.loads(run(*ask, "--rank", "1", "--json").stdout)
    assert (only["rank"], only["nbytes"], only["excess_nbytes"], only["cells"], only["runs"]) == (
        1,
        256,
        0,
        2,
        16,
    )
    assert [(each["ranks"], each["workers"], each["nbytes"]) for each in only["sources"]] == [
        ([0], ["trainer"], 128),
        ([1], ["trainer"], 128),
    ]


def test_a_layout_may_import_what_is_beside_it(published: str, layout: Path) -> None:
    (layout.parent / "engine.py").write_text("from layout import halves\n")
    ask = (
        "plan",
        "m",
        "--reader",
        f"{layout.parent / 'engine.py'}:halves",
        "--world-size",
        "2",
        "--address",
        published,
    )
    done = run(*ask)
    assert (done.returncode, done.stderr) == (0, "")


def test_bytes_that_no_rank_reads_are_told(published: str, layout: Path) -> None:
    ask = (
        "plan",
        "m",
        "--reader",
        f"{layout}:left_out",
        "--world-size",
        "2",
        "--address",
        published,
    )
    done = run(*ask)
    assert (done.returncode, done.stdout) == (1, "")
    assert "of tensor 'w', [0:16, 6:8] (128 bytes) is read by no rank of the group" in done.stderr
    assert run(*ask, "--partial").returncode == run(*ask, "--rank", "0").returncode == 0


def test_the_whole_model_and_some_names_of_it(published: str) -> None:
    (whole,) = json.loads(run("plan", "m", "--json", "--address", published).stdout)
    assert (whole["nbytes"], whole["runs"], whole["deltas"]) == (512, 2, "other layout")
    done = run("plan", "m", "--names", "x", "--address", published)
    assert done.returncode == 1
    assert "no tensor is called 'x'" in done.stderr


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (("--world-size", "2"), "give --reader, too"),
        (("--partial",), "give --reader, too"),
        (("--reader", "{}:halves", "--rank", "2", "--world-size", "2"), "ranks are 0 to 1"),
        (("--reader", "{}:halves", "--names", "w"), "--names chooses of the whole model"),
        (("--reader", "{}"), "give FILE.py:FUNCTION"),
        (("--reader", "{}:gone"), "AttributeError"),
        (("--reader", "{}:constant"), "is no function"),
        (("--reader", "no_such_module:f"), "ModuleNotFoundError"),
        (("--version", "newest"), "--version"),
    ],
)
def test_what_is_refused_before_anything_is_asked(
    layout: Path, arguments: tuple[str, ...], text: str
) -> None:
    given = [each.format(layout) for each in arguments]
    done = run_here("plan", "m", *given, "--address", "tcp://127.0.0.1:1")
    assert (done.returncode, done.stdout) == (2, "")
    assert text in done.stderr


def test_what_the_users_own_function_raises_is_told(published: str, layout: Path) -> None:
    done = run("plan", "m", "--reader", f"{layout}:broken", "--address", published)
    assert (done.returncode, done.stdout) == (2, "")
    assert "rank 0: KeyError: 'no such config'" in done.stderr
    done = run("plan", "m", "--reader", f"{layout}:transposed", "--address", published)
    assert (done.returncode, done.stdout) == (2, "")
    assert "it is not contiguous" in done.stderr
