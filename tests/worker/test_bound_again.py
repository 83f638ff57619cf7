"""What a call by selector reads is gone, and the selector names another version: a rank lets go of
it, and calls again (`filling`).
"""

from __future__ import annotations

import pytest

from tensorhub.errors import GroupAborted, StateError
from tensorhub.messages import Abandon, ErrorInfo, Fill, Outcome, Start, Write
from tensorhub.types import HandleState, OpKind, VersionInfo
from tensorhub.worker.calls import (
    CallHook,
    Fence,
    FillCall,
    Finish,
    FreeStaging,
    OpenGeneration,
    ReopenGeneration,
    StartPull,
    StopPull,
)
from tensorhub.worker.states import Phase
from tests.worker.test_layouts import Reader

AGAIN = ErrorInfo.of(GroupAborted("what this call has read is gone; call again"))


def is_gone(reader: Reader) -> None:
    reader.do(
        reader.member.receive(Outcome(reader.key, 0, False, False, None, AGAIN, again=True), 0)
    )


def phase(reader: Reader) -> Phase:
    assert reader.member.running is not None
    return reader.member.running.phase


def calls(reader: Reader) -> list[Fill]:
    return reader.said(Fill)


def has_called_again(reader: Reader) -> bool:
    """Under the next key and another generation."""
    first, second = calls(reader)
    assert second.resume is None
    assert (second.key.sequence, second.former) == (first.key.sequence + 1, (first.key,))
    assert second.generation != first.generation
    return phase(reader) is Phase.ASKED


def test_a_pull_is_stopped_first_and_what_it_has_got_stays_in_the_memory() -> None:
    reader = Reader()
    reader.pulls()
    is_gone(reader)
    assert phase(reader) is Phase.STOPPING
    assert isinstance(reader.actions[-1], StopPull)
    assert len(calls(reader)) == 1
    reader.do(reader.member.pull_stopped(0))
    assert isinstance(reader.actions[-2], Fence)
    assert has_called_again(reader)
    assert reader.member.state is HandleState.TORN
    reader.start()
    reader.do(reader.member.receive(Write(reader.key, 0, ()), 0))
    opened, pull = reader.wants(OpenGeneration), reader.wants(StartPull)
    assert opened.generation == pull.generation == calls(reader)[1].generation
    assert not any(isinstance(action, Finish) for action in reader.actions)


def test_who_has_voted_or_is_ready_lets_go_at_once() -> None:
    voted = Reader()
    voted.votes(voted.pulls())
    is_gone(voted)
    assert has_called_again(voted)
    assert voted.member.state is HandleState.TORN
    ready = Reader()
    ready.begin()
    ready.answer()
    ready.plan()
    is_gone(ready)
    assert has_called_again(ready)
    assert ready.member.state is HandleState.EMPTY


def test_who_was_not_bound_yet_asks_for_what_is_newest() -> None:
    reader = Reader()
    reader.do(reader.member.begin(FillCall(OpKind.REPLICATE, "latest"), 60, 0))
    is_gone(reader)
    assert [call.resume for call in calls(reader)] == [None, None]


def test_a_late_word_of_the_former_operation_changes_nothing() -> None:
    reader = Reader()
    reader.pulls()
    former = reader.key
    is_gone(reader)
    reader.do(reader.member.pull_stopped(0))
    before = list(reader.actions)
    info = VersionInfo("m", 1, "content1", 0, 2)
    for late in (
        Write(former, 0, ()),
        Start(former, 0, info, "", True, ()),
        Outcome(former, 0, True, True, info, None),
    ):
        reader.do(reader.member.receive(late, 0))
    assert reader.actions == before
    assert phase(reader) is Phase.ASKED


def test_its_hook_is_waited_for_and_runs_once() -> None:
    reader = Reader()
    reader.do(reader.member.begin(FillCall(OpKind.REPLICATE, 1, hold=True), 60, 0))
    reader.start()
    reader.answer()
    reader.plan()
    assert phase(reader) is Phase.HOOK
    is_gone(reader)
    assert len(calls(reader)) == 1
    reader.do(reader.member.hook_returned(None, 0))
    assert has_called_again(reader)
    reader.start()
    assert phase(reader) is Phase.HELD
    assert sum(isinstance(action, CallHook) for action in reader.actions) == 1


def test_an_update_that_still_fences_opens_what_it_holds_again() -> None:
    reader = holding()
    reader.begin(OpKind.UPDATE, number=2)
    reader.do(reader.member.receive(Write(reader.key, 0, ()), 0))
    fence = reader.wants(Fence)
    is_gone(reader)
    assert phase(reader) is Phase.FENCING
    reader.do(reader.member.fenced(fence.generation, 0))
    assert (phase(reader), reader.member.version) == (Phase.ASKED, 1)
    assert reader.wants(ReopenGeneration).generation != fence.generation


def test_who_is_cancelled_while_it_still_fences_calls_no_more() -> None:
    reader, error = holding(), StateError("cancelled")
    reader.begin(OpKind.UPDATE, number=2)
    reader.do(reader.member.receive(Write(reader.key, 0, ()), 0))
    fence, said = reader.wants(Fence), len(calls(reader))
    is_gone(reader)
    reader.do(reader.member.cancel(error, 0))
    reader.do(reader.member.fenced(fence.generation, 0))
    assert reader.wants(Finish).error is error
    assert (len(calls(reader)), reader.member.version) == (said, 1)
    assert reader.wants(ReopenGeneration).generation != fence.generation


def test_a_call_that_is_cancelled_while_its_pull_stops_is_not_repeated() -> None:
    reader, error = Reader(), StateError("cancelled")
    reader.pulls()
    is_gone(reader)
    reader.do(reader.member.cancel(error, 0))
    reader.do(reader.member.pull_stopped(0))
    assert reader.wants(Finish).error is error
    assert len(calls(reader)) == 1


def test_who_does_not_know_yet_what_it_reads_asks_for_what_is_newest() -> None:
    reader = Reader()
    reader.begin()
    assert phase(reader) is Phase.MANIFEST
    is_gone(reader)
    assert phase(reader) is Phase.ASKED
    assert [call.resume for call in calls(reader)] == [None, None]


def test_who_had_given_up_before_anything_was_written_ends_at_once() -> None:
    reader, error = Reader(), StateError("cancelled")
    reader.begin()
    key = reader.key
    reader.do(reader.member.cancel(error, 0))
    assert phase(reader) is Phase.ABANDONING
    is_gone(reader)
    assert reader.said(Abandon)[-1].key.sequence == key.sequence + 1
    assert reader.wants(Finish).error is error


def test_what_is_committed_is_not_let_go_of() -> None:
    reader = holding()
    reader.begin(OpKind.UPDATE, number=2, staged=True)
    reader.do(reader.member.receive(Write(reader.key, 0, ()), 0))
    reader.do(reader.member.room_ended(None, 0))
    reader.do(reader.member.pull_done(0))
    key, info, said = reader.key, VersionInfo("m", 2, "content2", 2048 * 16, 2), len(calls(reader))
    reader.do(reader.member.receive(Outcome(key, 0, True, True, info, None), 0))
    assert phase(reader) is Phase.APPLYING
    is_gone(reader)
    assert (phase(reader), len(calls(reader))) == (Phase.APPLYING, said)


def test_what_is_staged_is_freed_and_what_is_held_stays() -> None:
    for has_voted in (False, True):
        reader = holding()
        reader.begin(OpKind.UPDATE, number=2, staged=True)
        reader.do(reader.member.receive(Write(reader.key, 0, ()), 0))
        reader.do(reader.member.room_ended(None, 0))
        if has_voted:
            reader.do(reader.member.pull_done(0))
        is_gone(reader)
        if not has_voted:
            reader.do(reader.member.pull_stopped(0))
        assert sum(isinstance(action, FreeStaging) for action in reader.actions) == 1
        assert (phase(reader), reader.member.version) == (Phase.ASKED, 1)
        assert reader.member._memory.staged is None


def holding() -> Reader:
    """It has version 1."""
    reader = Reader()
    reader.votes(reader.pulls())
    info = VersionInfo("m", 1, "content1", 2048 * 16, 2)
    reader.do(reader.member.receive(Outcome(reader.key, 0, True, True, info, None), 0))
    return reader


@pytest.mark.parametrize("when", ["before", "meanwhile"])
def test_who_is_cancelled_ends_the_next_operation_too(when: str) -> None:
    """Else the others would wait there for a call that does not come."""
    reader, error = Reader(), StateError("cancelled")
    reader.pulls()
    key = reader.key
    if when == "before":
        reader.do(reader.member.cancel(error, 0))
        is_gone(reader)
    else:
        is_gone(reader)
        reader.do(reader.member.cancel(error, 0))
    assert reader.said(Abandon)[-1].key.sequence == key.sequence + 1
    reader.do(reader.member.pull_stopped(0))
    assert reader.wants(Finish).error is error
    assert reader.member.state is HandleState.TORN
    assert len(calls(reader)) == 1


def test_a_connection_that_is_lost_meanwhile_asks_about_nothing_that_was_not_said() -> None:
    reader = Reader()
    reader.pulls()
    is_gone(reader)
    said = len(reader.actions)
    reader.do(reader.member.disconnected(0))
    reader.connect()
    assert reader.member.running is not None
    assert not [action for action in reader.actions[said:] if "Resolve" in repr(action)]
    reader.do(reader.member.pull_stopped(0))
    assert has_called_again(reader)


def test_a_new_coordinator_is_told_the_same() -> None:
    reader = Reader()
    reader.pulls()
    is_gone(reader)
    reader.do(reader.member.pull_stopped(0))
    unknown = Outcome(reader.key, 0, False, False, None, AGAIN, unknown=True)
    reader.do(reader.member.receive(unknown, 0))
    *_, last = calls(reader)
    assert (last.resume, len(last.former)) == (None, 2)
