"""The leak run: its arithmetic, and that it names what is leaked on purpose and nothing else."""

import json
import socket
from pathlib import Path

import pytest

from benches import leaks
from benches.leaks import growth, judge
from tensorhub.api.hub import Hub

_sockets: list[socket.socket] = []


def keeps_an_operation_and_a_socket(hub: Hub) -> None:
    """Called in the follower's process, once a cycle."""
    vars(hub._worker).setdefault("finished", []).append(object())
    _sockets.append(socket.socket())


@pytest.mark.slow
def test_it_names_what_leaks(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "figures.json"
    small = (
        "--cycles 32 --every 8 --fill 40 --deaths 0 --state without --without-fetch --json".split()
    )
    assert leaks.main([*small, str(path)], keeps_an_operation_and_a_socket) == 1
    rows = json.loads(path.read_text())["runs"]["without"]
    found = {(row["process"], row["kind"], row["name"]) for row in rows if not row["flat"]}
    assert found >= {
        ("follower", "books", "Worker.finished"),
        ("follower", "descriptors", "socket"),
    }
    named = {
        name
        for process, kind, name in found
        if process != "coordinator" and kind in ("books", "descriptors", "tasks")
    }
    # that one is bounded; a busy machine says more
    assert named - {"Repeats._said"} == {"Worker.finished", "socket"}
    assert not {kind for process, kind, _ in found if process == "coordinator"} & {
        "descriptors",
        "threads",
        "tasks",
    }
    assert "books: Worker.finished" in capsys.readouterr().out


def test_what_is_there_for_a_moment_is_no_leak_and_what_stays_is() -> None:
    cycles = range(100, 1000, 100)
    moments = [(cycle, 5 + cycle // 100 % 3) for cycle in cycles]
    assert judge("p", "objects", "Lane", moments).flat
    slow = [(cycle, value + cycle // 200) for cycle, value in moments]
    assert growth(slow) == 2 / 600
    assert not judge("p", "objects", "Lane", slow).flat
