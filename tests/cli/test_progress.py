"""What long commands show while they run: bars on a terminal, lines elsewhere, and nothing to
programs.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from tensorhub.cli import progress
from tests.cli.processes import run_here
from tests.cli.terminals import on_terminal
from tests.cli.test_fetch_goes_on import CHUNK_BYTES, CHUNKS, tensors, trainer

NBYTES = CHUNKS * CHUNK_BYTES


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def test_where_there_is_no_terminal_there_is_a_line_every_five_seconds(
    capfd: pytest.CaptureFixture[str],
) -> None:
    clock = Clock()
    with progress.BytesBar(shown=True, clock=clock) as bar:
        for second in range(12):
            clock.now = 100.0 + second
            bar.tell("reading\x1b[2J\nm", second * 10**9, 20 * 10**9)
    assert capfd.readouterr().err.splitlines() == [
        r"reading\x1b[2J\nm: 5.0 GB of 20.0 GB (25 %), 1.0 GB/s, 15 s left",
        r"reading\x1b[2J\nm: 10.0 GB of 20.0 GB (50 %), 1.0 GB/s, 10 s left",
    ]


def test_each_thing_has_its_own_rate_and_what_stands_still_has_no_time_left(
    capfd: pytest.CaptureFixture[str],
) -> None:
    clock = Clock()
    with progress.BytesBar(shown=True, clock=clock) as bar:
        bar.tell("a", 0, 10)
        clock.now += 5
        bar.tell("b", 50, 100)  # what was there before is no news
        clock.now += 5
        bar.tell("b", 50, 100)
        clock.now += 5
        bar.tell("b", 60, 100)
    bar.tell("b", 70, 100)
    assert capfd.readouterr().err.splitlines() == [
        "b: 50 B of 100 B (50 %), 0 B/s",
        "b: 60 B of 100 B (60 %), 2 B/s, 20 s left",
    ]


def test_shards_that_are_read_at_once_are_shown_as_one(capfd: pytest.CaptureFixture[str]) -> None:
    clock = Clock()
    with progress.BytesBar(shown=True, clock=clock) as bar:
        tell = progress.seeding(bar)
        for done in (0, 30, 100):  # of two versions
            for shard in (0, 1):
                tell("m", shard, done, 100)
                clock.now += 5
        tell("m", 0, 10, 100)
        clock.now += 5
        tell("m", 1, 0, 100)
    lines = capfd.readouterr().err.splitlines()
    shown = [re.search(r": (\d+) B of (\d+) B", line) for line in lines]
    assert [each and tuple(map(int, each.groups())) for each in shown] == [
        *((0, 200), (30, 200), (60, 200), (130, 200), (200, 200)),
        (10, 200),  # of the next version
    ]


@pytest.mark.parametrize("given", [(), ("--quiet",), ("--json",)])
def test_lines_in_a_pipe_and_none_for_programs(
    address: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, given: tuple[str, ...]
) -> None:
    said = progress.line
    with trainer(address, tensors()) as (_, held):

        def line(title: str, done: int, total: int, bytes_per_s: float) -> str:
            held.go.set()
            return said(title, done, total, bytes_per_s)

        monkeypatch.setattr(progress, "LINE_S", 0.0)
        monkeypatch.setattr(progress, "line", line)
        if given:
            held.go.set()
        out = str(tmp_path / "out.safetensors")
        done = run_here("fetch", "m", "--out", out, "--address", address, *given)
    assert done.returncode == 0
    lines = re.findall(r"^fetching m: .* of 16\.8 MB \(.* %\), .*B/s.*$", done.stderr, re.MULTILINE)
    assert bool(lines) == (not given)
    assert bool(done.stderr) == (not given)


@pytest.mark.parametrize("given", [(), ("--quiet",), ("--json",)])
def test_fetch_on_a_terminal(address: str, tmp_path: Path, given: tuple[str, ...]) -> None:
    out = str(tmp_path / "out.safetensors")
    with trainer(address, tensors()) as (_, line):
        line.go.clear()
        with on_terminal(
            "fetch", "m", "--out", out, "--address", address, *given, streams=("stderr",)
        ) as terminal:
            if not given:
                at = terminal.until("fetching m")
                terminal.until("/16.8 MB", at)
                terminal.until("-:--:--", at)  # nothing comes, so it has no end
            line.go.set()
            assert terminal.wait() == 0
            assert terminal.process.stdout is not None
            assert terminal.process.stdout.read().startswith(b"{") == ("--json" in given)
            assert bool(terminal.written) == (not given)
    if not given:
        assert terminal.written.rpartition(b"fetching m")[2].count(b"\x1b[2K")  # the bar is gone
        longest = max(map(len, re.split(r"[\r\n]", terminal.text)))
        assert longest <= 82


def test_a_terminal_without_a_cursor_gets_no_escapes(address: str, tmp_path: Path) -> None:
    out = str(tmp_path / "out.safetensors")
    with (
        trainer(address, tensors()) as (_, line),
        on_terminal("fetch", "m", "--out", out, "--address", address, TERM="dumb") as terminal,
    ):
        line.go.set()
        assert terminal.wait() == 0
        assert b"\x1b" not in terminal.written
        assert "fetched m version 1" in terminal.text


def test_publish_on_a_terminal(address: str, tmp_path: Path) -> None:
    path = tmp_path / "[bold]m.safetensors"
    save_file({"w": torch.zeros(2**24)}, path)
    with on_terminal("publish", str(path), "-m", "m", "--address", address) as terminal:
        at = terminal.until("reading [bold]m.safetensors")
        terminal.until("67.1 MB", at)
        terminal.until("published m version 0", at)


@pytest.mark.parametrize(
    ("command", "titles"),
    [
        (("seed", "m", "--host-memory", "40MB"), ["reading m", "seeding m version 1"]),
        (
            ("archive", "--model", "m", "--host-memory", "60MB", "--to"),
            ["reading m", "archiving m version 1", "archived m version 1"],
        ),
    ],
    ids=["seed", "archive"],
)
def test_what_follows_a_model_shows_each_version(
    address: str, tmp_path: Path, command: tuple[str, ...], titles: list[str]
) -> None:
    to = []
    if command[-1] == "--to":
        pytest.importorskip("obstore", reason="the extra archive is not installed")
        to = [f"file://{tmp_path}/{number}" for number in range(2)]
    with trainer(address, tensors()) as (_, line):
        line.go.clear()
        with on_terminal(*command, *to[:1], "--address", address) as terminal:
            at = terminal.until(titles[0])
            terminal.until("/16.8 MB", at)
            line.go.set()
            for title in titles[1:]:
                at = terminal.until(title, at)
        options = ("--address", address, "--json")
        with on_terminal(*command, *to[1:], *options, streams=("stderr",)) as terminal:
            assert terminal.process.stdout is not None
            assert terminal.process.stdout.readline().startswith(b"{")
            assert titles[0] not in terminal.text
