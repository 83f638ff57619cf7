"""The parts of chaos by themselves: the plan, the judgement, the picture, links' shapes; and (slow) a whole run."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pytest

from benches import byte_patterns
from benches.chaos import __main__ as program, namespaces, plan
from benches.chaos.results import ATTEMPTS, Answer, Call, Results, Seat
from benches.child_processes import ROOT, children
from tests.cli.processes import alive, eventually
from tests.testing.test_slice import first_seed

PARTIES = ["coordinator", "a", "b"]

# ---------------------------------------------------------------------------------------------------------- the plan


def test_a_plan_is_its_seeds() -> None:
    drawn = plan.draw(1, 600, PARTIES)
    assert drawn == plan.draw(1, 600, PARTIES) != plan.draw(2, 600, PARTIES)
    assert [fault.at_s for fault in drawn] == sorted(fault.at_s for fault in drawn)
    assert 0 < drawn[0].at_s <= drawn[-1].at_s < 600
    assert {fault.process for fault in drawn} == set(PARTIES)
    assert {fault.kind for fault in drawn} == set(plan.KINDS)
    assert {fault.kind for fault in drawn if fault.process == "coordinator"} == set(plan.PROCESS_KINDS)


# --------------------------------------------------------------------------------------------------------- the words


def test_a_word_that_is_not_the_contents_is_found() -> None:
    memory = byte_patterns.make(4096)
    byte_patterns.write(memory, 7, rank=1)
    assert byte_patterns.contents(memory, rank=1) == {7}
    assert byte_patterns.contents(memory, rank=0) == {-1}
    memory["b"][100] += np.uint64(1)
    assert byte_patterns.contents(memory, rank=1) == {7, -1}
    byte_patterns.write({"a": memory["a"], "b": memory["b"][:100]}, 8, rank=1)
    assert byte_patterns.contents(memory, rank=1) == {7, 8, -1}


# -------------------------------------------------------------------------------------------------------- the results


def number(version: int, attempt: int = 0) -> int:
    return version * ATTEMPTS + attempt


class Story:
    """Calls of two groups, and what was found."""

    def __init__(self) -> None:
        self.results = Results()
        self.trainers, self.readers = ([Seat(group, rank) for rank in range(2)] for group in ("trainer", "reader"))
        self.now = 0.0

    def begin(self, seat: Seat, what: str, version: int | None = None, attempt: int = 0) -> Call:
        self.now += 1
        content = None if version is None else number(version, attempt)
        return self.results.begun(seat, what, self.now, version, content)

    def end(self, call: Call, **answer: Any) -> Answer:
        self.now += 1
        told: Answer = {"outcome": "ok", "text": "...", "state": "ready", "checked": 8} | answer
        self.results.ended(call, told, self.now)
        return told

    def publish(self, version: int, attempt: int = 0) -> None:
        for call in [self.begin(seat, "mutate", version, attempt) for seat in self.trainers]:
            self.end(call, holds=version, contents=[number(version, attempt)])

    def update(self, call: Call, version: int, contents: list[int] | None = None) -> Answer:
        found = [number(version)] if contents is None else contents
        return self.end(call, version=version, changed=True, holds=version, contents=found)

    def found(self) -> list[str]:
        return [text.partition(":")[0] for _, text in self.results.violations]


@pytest.fixture
def story() -> Story:
    made = Story()
    made.publish(1)
    return made


def test_a_run_without_a_fault_is_clean(story: Story) -> None:
    call = story.begin(story.readers[0], "update")
    story.publish(2)
    story.update(call, 1)  # it asked before 2 was out
    story.update(story.begin(story.readers[0], "update"), 2)
    assert story.found() == []
    assert (story.results.visible, story.results.commits, story.results.bytes_checked) == (2, 2, 48)


def test_g1_bytes_of_another_version_of_several_or_of_nobody(story: Story) -> None:
    story.publish(2)
    for contents in ([number(1)], [number(1), number(2)], [number(2), -1], [number(2, 5)]):
        story.update(story.begin(story.readers[0], "update"), 2, contents)
    assert story.found() == ["content"] * 4


def test_g1_a_number_has_one_content(story: Story) -> None:
    """The first try ended in doubt; then the second returned, and the first is read."""
    for seat in story.trainers:
        doubtful = story.begin(seat, "mutate", 2, attempt=1)
        story.end(doubtful, outcome="OperationTimeout", memory="in_doubt", state="in_doubt", holds=None)
    story.publish(2, attempt=2)
    story.update(story.begin(story.readers[0], "update"), 2, [number(2, 1)])
    assert story.found() == ["content"]


def test_g3_latest_never_goes_back(story: Story) -> None:
    story.publish(2)
    story.update(story.begin(story.readers[0], "update"), 1)
    assert story.found() == ["visibility"]


def test_g3_but_for_a_rollback(story: Story) -> None:
    story.publish(2)
    call = story.begin(story.readers[0], "update")
    story.results.rolling_back(1, story.now)
    story.results.rolled_back(1, story.now)
    story.update(call, 1)
    story.publish(2, attempt=1)
    late = story.begin(story.readers[0], "update")
    story.update(late, 2, [number(2, 1)])
    assert story.found() == []
    story.update(story.begin(story.readers[0], "update"), 2)  # that of the old lineage
    assert story.found() == ["content"]


def test_g4_ranks_agree(story: Story) -> None:
    story.publish(2)
    calls = [story.begin(seat, "update") for seat in story.readers]
    answers: list[Answer | None] = [story.update(calls[0], 2), None]
    story.results.paired(calls, answers, story.now)  # the other one died
    answers[1] = story.end(calls[1], outcome="OperationTimeout", memory="in_doubt", state="in_doubt", holds=None)
    story.results.paired(calls, answers, story.now)  # or does not know
    assert story.found() == []
    answers[1] = story.end(calls[1], outcome="GroupAborted", memory="intact", state="empty", holds=None, contents=[0])
    story.results.paired(calls, answers, story.now)
    answers[1] = story.update(story.begin(story.readers[1], "update"), 2, [number(1)])
    story.results.paired(calls, answers, story.now)
    assert story.found() == ["group atomicity", "content", "group atomicity"]


def test_g10_errors_are_typed(story: Story) -> None:
    story.end(story.begin(story.readers[0], "update"), outcome="untyped", text="KeyError()", state="empty", holds=None)
    assert story.found() == ["bounds"]


def test_memory_is_as_the_error_says(story: Story) -> None:
    seat = story.readers[0]
    story.update(story.begin(seat, "update"), 1)
    failed: dict[str, Any] = {"outcome": "GroupAborted", "holds": None}
    story.end(story.begin(seat, "update"), **failed, memory="intact", state="ready", contents=[number(1)])
    story.end(story.begin(seat, "update"), **failed, memory="torn", state="torn")
    story.end(story.begin(seat, "update"), **failed, memory="intact", state="torn")  # as before
    assert story.found() == []
    story.update(story.begin(seat, "update"), 1)
    story.end(story.begin(seat, "update"), **failed, memory="intact", state="empty", contents=[number(1), -1])
    story.end(story.begin(seat, "update"), **failed, memory="in_doubt", state="in_doubt")
    story.end(story.begin(seat, "update"), **failed, memory="intact", state="torn")  # by what was in doubt
    story.update(story.begin(seat, "update"), 1)
    story.end(story.begin(seat, "update"), **failed, memory="intact", state="torn")
    story.end(story.begin(seat, "update"), **failed, memory="torn", state="ready")
    assert story.found() == ["memory"] * 3


def test_a_body_may_have_written_what_is_intact(story: Story) -> None:
    call = story.begin(story.trainers[0], "mutate", 2)
    story.end(call, outcome="GroupAborted", memory="intact", state="empty", holds=None, contents=[number(2)])
    assert story.found() == []


def test_unpublish_is_refused_for_retention_only(story: Story) -> None:
    refused: dict[str, Any] = {"outcome": "RetentionError", "memory": "intact", "holds": 1, "contents": [number(1)]}
    story.results.retain.add(1)  # asked for, and perhaps through
    story.end(story.begin(story.trainers[0], "mutate", 2), **refused)
    assert story.found() == []
    story.results.retain = {0}
    story.end(story.begin(story.trainers[0], "mutate", 2), **refused)
    assert story.found() == ["mutability"]


# ----------------------------------------------------------------------------------------------------------- the plot


# -------------------------------------------------------------------------------------------------------- its processes


# -------------------------------------------------------------------------------------------------------- whole runs


@pytest.mark.timeout(300)
def test_a_slice_of_chaos(tmp_path: Path) -> None:
    """Nine seconds of it, other ones for each commit."""
    figures, picture = tmp_path / "figures.json", tmp_path / "plot.svg"
    written = ["--json", str(figures), "--plot", str(picture)]
    assert program.main(["--minutes", "0.15", "--seed", str(first_seed()), *written]) == 0
    found = json.loads(figures.read_text())
    assert found["violations"] == []
    assert found["bytes checked"] > 0 < found["newest version"]
    ElementTree.fromstring(picture.read_text())


@pytest.mark.slow
@pytest.mark.root
@pytest.mark.timeout(300)
@pytest.mark.skipif(namespaces.why_not() is not None, reason=str(namespaces.why_not()))
def test_chaos_between_network_namespaces() -> None:
    assert program.main(["--minutes", "0.4", "--seed", "4", "--namespaces"]) == 0
    left = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=True).stdout
    assert f"{namespaces.SPACE}{os.getpid()}-" not in left


@pytest.mark.slow
def test_nobody_outlives_a_run_that_is_killed(tmp_path: Path) -> None:
    """Not even who was stopped."""
    path = os.pathsep.join([str(ROOT), *filter(None, sys.path)])
    environment = os.environ | {"PYTHONPATH": path, "TMPDIR": str(tmp_path)}  # where its folder is left
    command = [sys.executable, "-m", "benches.chaos", "--minutes", "5", "--seed", "1"]
    runner = subprocess.Popen(command, stdout=subprocess.DEVNULL, env=environment, cwd=ROOT, start_new_session=True)
    try:
        assert eventually(lambda: sum(map(_is_up, children(runner.pid))) >= 7)
        processes = children(runner.pid)
        os.kill(processes[0], signal.SIGSTOP)
    finally:
        runner.kill()
        runner.wait()
    try:
        assert eventually(lambda: not alive(processes))
    finally:
        for process in alive(processes):
            os.kill(process, signal.SIGKILL)


def _is_up(pid: int) -> bool:
    """Whether that is a process of the run, and not what becomes one."""
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):
        command = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
        return command[1:3] == [b"-m", b"benches.chaos.bench_process"]
    return False
