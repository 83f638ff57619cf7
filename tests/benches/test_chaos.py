"""The parts of chaos by themselves: the plan, the judgement, the picture, links' shapes; and (slow)
a whole run.
"""

from __future__ import annotations

import json
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pytest

from benches import byte_patterns
from benches.byte_patterns import ATTEMPTS
from benches.chaos import __main__ as program, cast, drivers, engine, run
from benches.chaos.bench_process import STRIPES
from benches.chaos.results import Answer, Call, Results, Seat
from tensorhub.testing.auditor import audit
from tensorhub.testing.history import read
from tests.recorder import record_children
from tests.runtime.data_rig import slowness
from tests.testing.test_slice import first_seed

pytestmark = pytest.mark.heavy

# --------------------------------------------------------------------------------------------------
# the plan


# --------------------------------------------------------------------------------------------------
# the words


def test_each_word_is_checked_and_few_change_from_version_to_version() -> None:
    old, new = byte_patterns.make(4096), byte_patterns.make(4096)
    for memory, version in ((old, 64), (new, 65)):
        byte_patterns.write(memory, number(version, 5), 1, STRIPES)
        assert byte_patterns.contents(memory, 1, STRIPES) == {number(version, 5)}
    for part, tensor in new.items():
        [changed] = np.nonzero(tensor != old[part])
        assert len(changed) * STRIPES == 2 * len(tensor)
        for place in changed:
            tensor[place], old[part][place] = old[part][place], tensor[place]
            assert len(byte_patterns.contents(new, 1, STRIPES)) > 1
            tensor[place], old[part][place] = old[part][place], tensor[place]


# --------------------------------------------------------------------------------------------------
# the results


def number(version: int, attempt: int = 0) -> int:
    return version * ATTEMPTS + attempt


class Story:
    """Calls of two groups, and what was found."""

    def __init__(self) -> None:
        self.results = Results()
        self.trainers, self.readers = (
            [Seat(group, rank) for rank in range(2)] for group in ("trainer", "reader")
        )
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


def test_g3_latest_never_goes_back(story: Story) -> None:
    story.publish(2)
    story.update(story.begin(story.readers[0], "update"), 1)
    assert story.found() == ["visibility"]


def test_g4_ranks_agree(story: Story) -> None:
    story.publish(2)
    calls = [story.begin(seat, "update") for seat in story.readers]
    answers: list[Answer | None] = [story.update(calls[0], 2), None]
    story.results.paired(calls, answers, story.now)  # the other one died
    answers[1] = story.end(
        calls[1], outcome="OperationTimeout", memory="in_doubt", state="in_doubt", holds=None
    )
    story.results.paired(calls, answers, story.now)  # or does not know
    assert story.found() == []
    answers[1] = story.end(
        calls[1], outcome="GroupAborted", memory="intact", state="empty", holds=None, contents=[0]
    )
    story.results.paired(calls, answers, story.now)
    answers[1] = story.update(story.begin(story.readers[1], "update"), 2, [number(1)])
    story.results.paired(calls, answers, story.now)
    assert story.found() == ["group atomicity", "content", "group atomicity"]


def test_an_archived_number_is_what_was_published_under_it(story: Story) -> None:
    story.publish(2)
    call = story.results.begun(story.readers[0], "fetch", story.now, 1)
    story.update(call, 1)  # which is not the latest one
    story.results.stored(1, 0, {number(1)}, story.now)
    assert story.found() == []
    story.update(call, 2)
    for contents in ({number(1)}, {number(1), number(2)}, {number(2), -1}, {number(2, 5)}, set()):
        story.results.stored(2, 1, contents, story.now)
    assert story.found() == ["content"] + ["archive"] * 5


def test_memory_is_as_the_error_says(story: Story) -> None:
    seat = story.readers[0]
    story.update(story.begin(seat, "update"), 1)
    failed: dict[str, Any] = {"outcome": "GroupAborted", "holds": None}
    story.end(
        story.begin(seat, "update"), **failed, memory="intact", state="ready", contents=[number(1)]
    )
    story.end(story.begin(seat, "update"), **failed, memory="torn", state="torn")
    story.end(story.begin(seat, "update"), **failed, memory="intact", state="torn")  # as before
    assert story.found() == []
    story.update(story.begin(seat, "update"), 1)
    story.end(
        story.begin(seat, "update"),
        **failed,
        memory="intact",
        state="empty",
        contents=[number(1), -1],
    )
    story.end(story.begin(seat, "update"), **failed, memory="in_doubt", state="in_doubt")
    # by what was in doubt
    story.end(story.begin(seat, "update"), **failed, memory="intact", state="torn")
    story.update(story.begin(seat, "update"), 1)
    story.end(story.begin(seat, "update"), **failed, memory="intact", state="torn")
    story.end(story.begin(seat, "update"), **failed, memory="torn", state="ready")
    assert story.found() == ["memory"] * 3


# --------------------------------------------------------------------------------------------------
# the plot


# --------------------------------------------------------------------------------------------------
# its processes


# --------------------------------------------------------------------------------------------------
# whole runs


@pytest.mark.timeout(1800)
@pytest.mark.skipif(not find_spec("obstore"), reason="the extra archive is not installed")
@pytest.mark.skipif(not find_spec("zstandard"), reason="the extra delta is not installed")
def test_a_slice_of_chaos(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nine seconds of it, other ones for each commit; with etcd, if it is installed. What follows
    has the time that it takes.
    """
    for module, names in (
        (program, ("GRACE_S",)),
        (run, ("LIVENESS_S", "SETTLE_S", "END_S")),
        (cast, ("MARGIN_S",)),
        (drivers, ("START_S",)),
    ):
        for name in names:
            monkeypatch.setattr(module, name, getattr(module, name) * slowness())
    figures, picture = tmp_path / "figures.json", tmp_path / "plot.svg"
    record_children(monkeypatch, tmp_path / "history")
    written = ["--json", str(figures), "--plot", str(picture)]
    written += ["--ha", "etcd" if Path(engine.ETCD).exists() else "lock"]
    assert program.main(["--minutes", "0.15", "--seed", str(first_seed()), *written]) == 0
    found = json.loads(figures.read_text())
    assert found["violations"] == []
    judged = audit(read(tmp_path / "history"))
    assert judged["update: ok"] > 0 < judged["tensors compared"]
    assert found["bytes checked"] > 0 < found["newest version"]
    assert found["bytes saved by deltas"] > 0
    assert found["versions in the archive"]
    assert found["terms of coordinators"]
    assert found["fetches of archived versions"] > 0
    ElementTree.fromstring(picture.read_text())
