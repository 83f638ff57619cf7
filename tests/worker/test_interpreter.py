"""What a caller may do with a handle, what its calls raise in the end, and what is told of its
memory.
"""

from __future__ import annotations

from math import inf
from typing import NamedTuple

import pytest

from tensorhub.errors import (
    DrainTimeout,
    LeaseLost,
    MutabilityViolation,
    RegistrationError,
    StateError,
    VersionConflict,
)
from tensorhub.messages import (
    Deregister,
    DigestAgain,
    DigestedAgain,
    FromWorker,
    Grant,
    Publish,
    TellDigests,
)
from tensorhub.model.manifest import Manifest
from tensorhub.testing import SimHandle, StepwiseCluster
from tensorhub.testing.sim.handle import CallRecord
from tensorhub.testing.sim.memory import MANIFEST, make_manifest
from tensorhub.types import HandleState, Location, OpKind, RegistrationId, VersionInfo
from tensorhub.worker.calls import (
    Call,
    CloseCall,
    CopyLocally,
    Fence,
    FillCall,
    Finish,
    FreeStaging,
    OpenGeneration,
    PublishCall,
    RegistrationFailed,
    ReopenGeneration,
    Say,
    StartPull,
    UnpublishCall,
)
from tensorhub.worker.interpreter import Interpreter

UPDATE = FillCall(OpKind.UPDATE, "latest")
REPLICATE = FillCall(OpKind.REPLICATE, "latest")
INFO = VersionInfo("actor", 1, "c", MANIFEST.nbytes, 1)
GRANT = Grant("lease", "source", "i", "r", 1, (), Location(), True)


class Rig(NamedTuple):
    """A handle whose calls go by its interpreter, and the names of tensors that were written."""

    cluster: StepwiseCluster
    handle: SimHandle
    interpreter: Interpreter
    written: list[str]

    def call(self, call: Call) -> None:
        """As callers' handles do: raises what they raise."""
        self.interpreter.check(call)
        asked = self.handle.call(call)
        self.cluster.run()
        assert asked.done
        self.interpreter.raise_for(call, Finish(asked.version, asked.changed, asked.error))

    def change(self) -> str:
        """A second digest of its first chunk is another one; what is said of that."""
        content = self.handle.member.content
        assert content is not None
        question = DigestAgain("i", self.handle.id, content.generation, 0)
        owner = self.handle.worker.owner
        actions, error = self.interpreter.digested_again(
            question, True, b"", owner, self.cluster.now
        )
        self.handle.apply(actions)
        self.cluster.run()
        return str(error)


def rig(version: int | None = None) -> Rig:
    cluster, written = StepwiseCluster(manifest=make_manifest(2, "xxh3-64")), list[str]()
    handle = cluster.handle("trainer")
    handle.interpreter.guard._written = lambda: written
    cluster.run()
    if version is not None:
        handle.publish(version)
        cluster.run()
    return Rig(cluster, handle, handle.interpreter, written)


def filled() -> Rig:
    """A handle that holds what another has published."""
    at = rig()
    other = at.cluster.handle("other")
    at.cluster.run()
    other.publish(1)
    at.cluster.run()
    at.call(REPLICATE)
    assert at.handle.member.version == 1
    return at


def bare() -> Interpreter:
    """One without a shell."""
    return Interpreter(rig().handle.member, list)


def refuses(manifest: Manifest) -> None:
    raise StateError("no memory")


def given_up(at: Rig) -> CallRecord:
    """The handle is given up in the midst of a call, which ends."""
    call = at.handle.last_call
    assert call is not None
    at.handle.give_up()
    at.cluster.run()
    assert call.has_ended()
    return call


def test_one_call_runs_at_a_time_until_its_fences_are_carried_out() -> None:
    at = rig(5)
    at.handle.unpublish()
    at.cluster.run(until=lambda: any(isinstance(action, Finish) for action in at.handle.todo))
    assert at.handle.member.running is None, "the member is done, its Finish is still to come"
    for refused in (
        lambda: at.interpreter.check(UPDATE),
        lambda: at.handle.call(UPDATE),
        at.interpreter.check_idle,
    ):
        with pytest.raises(
            StateError, match="a call is still running on this handle; one call at a time"
        ) as error:
            refused()
        assert error.value.retryable
    at.cluster.run()
    assert not at.interpreter.is_busy
    at.interpreter.check_idle()


def test_what_a_state_refuses_begins_nothing() -> None:
    at = rig()
    with pytest.raises(StateError, match="there is nothing to unpublish"):
        at.call(UnpublishCall())
    assert not at.interpreter.is_busy
    at.call(CloseCall())
    assert at.interpreter.is_gone
    with pytest.raises(StateError, match="is closed; register again"):
        at.interpreter.check_idle()


def test_what_nobody_carries_out_any_more_ends_and_is_not_begun() -> None:
    at = rig(5)
    at.handle.give_up()
    with pytest.raises(StateError, match="was given up; register again"):
        at.interpreter.begin(UPDATE, 1.0, at.cluster.now)


def test_memory_that_is_being_filled_is_torn_where_nobody_goes_on() -> None:
    at = rig()
    other = at.cluster.handle("other")
    at.cluster.run()
    other.publish(1)
    at.cluster.run()
    at.handle.replicate()
    at.cluster.run(until=lambda: at.cluster.can_read(at.handle))
    call = given_up(at)
    assert isinstance(call.error, StateError)
    assert call.error.memory == "torn"


def test_who_has_voted_and_is_given_up_does_not_know_what_became_of_it() -> None:
    at = rig()
    call = at.handle.publish(5)
    at.cluster.run(
        until=lambda: any(
            isinstance(action, Say) and isinstance(action.message, Publish)
            for action in at.handle.todo
        )
    )
    assert given_up(at) is call
    assert isinstance(call.error, StateError)
    assert call.error.memory == "in_doubt"


def test_a_call_of_what_is_given_up_ends_when_nobody_reads_the_memory_any_more() -> None:
    at = rig(5)
    at.handle.hold_access()
    call = at.handle.unpublish()
    at.handle.give_up()
    owner, end = at.handle.worker.owner, at.cluster.now + 100.0
    while at.cluster.now < end:
        at.cluster.advance(10.0)
        assert not call.done, "its memory is still read, and not the caller's"
        assert at.handle in at.handle.worker.handles
    at.handle.end_access()
    at.cluster.run()
    assert isinstance(call.error, StateError)
    assert at.interpreter.is_gone
    assert at.handle not in at.handle.worker.handles
    assert at.handle.id not in owner._memories


def test_at_the_workers_end_what_is_still_read_stays_closed_and_its_call_ends() -> None:
    at = rig(5)
    at.handle.hold_access()
    call = at.handle.unpublish()
    at.handle.give_up()
    at.interpreter.give_up(at.cluster.now, at.cluster.now + 2.0)
    at.cluster.advance(1.9)
    assert not call.has_ended()
    at.cluster.advance(0.2)
    assert call.has_ended()
    assert at.interpreter.is_gone
    assert not at.handle.worker.owner._memories[at.handle.id].is_open
    at.handle.end_access()


def test_nothing_is_said_of_a_registration_after_its_deregister(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    at = rig(5)
    said = list[FromWorker]()
    monkeypatch.setattr(at.handle.worker, "say", said.append)
    at.handle.apply([Say(DigestedAgain("queued", at.handle.id, None))])
    at.handle.give_up()
    at.handle.apply([Say(DigestedAgain("heard later", at.handle.id, None))])
    at.handle.give_up()
    at.cluster.run()
    assert [type(message) for message in said] == [Deregister]


@pytest.mark.parametrize("is_held", [True, False], ids=["well", "in vain"])
def test_what_was_made_for_one_call_is_no_more_when_that_is_over(is_held: bool) -> None:
    at = rig(5 if is_held else None)
    fetcher = at.cluster.fetcher("reader")
    at.cluster.run()
    call = fetcher.fetch(timeout_s=5.0)
    at.cluster.advance(20.0)
    assert (call.error is None) is is_held
    assert fetcher.interpreter.is_gone
    assert not fetcher.worker.handles
    assert not fetcher.worker.owner._memories
    assert fetcher.worker.router.is_empty
    assert fetcher.id not in at.cluster.coordinator.cluster.members


def test_who_is_refused_at_once_is_no_more_and_who_was_known_stays() -> None:
    at = rig()
    known = at.cluster.handle("known")
    at.cluster.run()
    for handle in (at.handle, known):
        assert handle.registered
    other = at.cluster.workers["known"].register("trainer", model="actor")
    at.cluster.run()
    assert isinstance(other.registration_error, RegistrationError)
    assert other.interpreter.is_gone
    known.apply([RegistrationFailed(RegistrationError("not any more"))])
    at.cluster.run()
    assert not known.interpreter.is_given_up


# -- memory that cannot be had


def test_what_could_not_be_opened_is_neither_filled_nor_reopened() -> None:
    interpreter, error = bare(), StateError("no memory")
    opened = OpenGeneration(1, "c", MANIFEST, complete=False)
    interpreter.add(
        [
            opened,
            StartPull(INFO, MANIFEST, 1, ()),
            CopyLocally(INFO, MANIFEST, 1, ()),
            ReopenGeneration(2),
            freed := FreeStaging(),
        ]
    )
    assert interpreter.next(0.0) is opened
    interpreter.not_opened(error)
    assert interpreter.next(0.0) is freed
    assert interpreter.next(0.0) is None
    reopened = ReopenGeneration(4)
    interpreter.add([OpenGeneration(3, "c", MANIFEST, complete=False), reopened])
    interpreter.next(0.0)
    assert interpreter.next(0.0) is reopened, "the next one was"


def test_what_could_not_be_opened_is_not_published(monkeypatch: pytest.MonkeyPatch) -> None:
    at = rig()
    monkeypatch.setattr(at.handle, "_take_memory", refuses)
    call = at.handle.publish(5)
    at.cluster.run()
    with pytest.raises(StateError, match="no memory"):
        _ = call.number
    assert at.cluster.coordinator.cluster.models["actor"].newest_visible() is None
    monkeypatch.undo()
    at.call(PublishCall(5))
    assert at.handle.member.version == 5


def test_a_fill_that_has_no_memory_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    at = rig()
    other = at.cluster.handle("other")
    at.cluster.run()
    other.publish(1)
    at.cluster.run()
    monkeypatch.setattr(at.handle, "_take_memory", refuses)
    call = at.handle.replicate()
    at.cluster.run()
    with pytest.raises(StateError, match="no memory"):
        _ = call.number
    monkeypatch.undo()
    at.call(REPLICATE)
    assert at.handle.member.version == 1


def test_a_staged_update_without_room_fails_and_holds_what_it_held() -> None:
    at = filled()
    at.cluster.workers["other"].handles[0].unpublish()
    at.cluster.run()
    at.cluster.workers["other"].handles[0].publish(2)
    at.cluster.run()
    call = at.handle.stage()
    at.cluster.run()
    with pytest.raises(StateError, match=r"a staged update needs \d+ bytes of host memory"):
        _ = call.number
    assert at.handle.member.version == 1


def test_a_handle_follows_others_from_its_fill_to_its_publish() -> None:
    at = filled()
    assert at.interpreter.was_filled
    at.call(UnpublishCall())
    with pytest.raises(VersionConflict):
        at.call(PublishCall(0))
    assert at.interpreter.was_filled, "a publish that failed leaves the memory as it was"
    at.call(PublishCall(2))
    assert not at.interpreter.was_filled


def test_who_takes_written_memory_back_is_told_once_and_has_it() -> None:
    for call in (UnpublishCall(), CloseCall()):
        at = rig(5)
        at.written.extend("abcdefg")
        with pytest.raises(
            MutabilityViolation, match=r"version 5 .* 'a', 'b', 'c', 'd', 'e' \(and 2 more\)"
        ) as error:
            at.call(call)
        assert error.value.memory == "torn"
        assert at.handle.member.version is None
        at.written.clear()
    at = rig(5)
    at.call(UnpublishCall())


def test_an_update_of_written_memory_begins_nothing_and_one_that_changes_nothing_looks_once_more() -> (
    None
):
    at = filled()
    at.written.append("a")
    with pytest.raises(MutabilityViolation, match="'a'"):
        at.interpreter.check(UPDATE)
    at.written.clear()
    asked = at.handle.call(UPDATE)
    at.cluster.run()
    assert not asked.changed
    at.written.append("b")
    with pytest.raises(MutabilityViolation, match="'b'"):
        at.interpreter.raise_for(UPDATE, Finish(asked.version, asked.changed))
    at.interpreter.raise_for(UPDATE, Finish(asked.version, True))


def test_bytes_of_a_publisher_that_have_changed_are_told_until_he_takes_them_back() -> None:
    at = rig(5)
    text = at.change()
    assert "while it was published" in text
    for call in (PublishCall(6), UPDATE, UPDATE):
        with pytest.raises(MutabilityViolation, match="does not have its digest any more"):
            at.interpreter.check(call)
    with pytest.raises(MutabilityViolation, match="does not have its digest any more"):
        at.call(UnpublishCall())
    assert at.interpreter.call_before_body() is None, "it was told"
    at.call(PublishCall(6))


def test_read_bytes_that_have_changed_are_given_up_and_told_once() -> None:
    at = filled()
    text = at.change()
    assert "it was given up here" in text
    assert at.handle.member.state is HandleState.EMPTY
    with pytest.raises(MutabilityViolation, match="held for others to read"):
        at.interpreter.call_before_body()
    assert at.interpreter.call_before_body() is None
    at.call(REPLICATE)


def test_a_second_digest_under_another_generation_is_nobodys_fault() -> None:
    at = rig(5)
    content = at.handle.member.content
    assert content is not None
    for changed, generation in (
        (True, content.generation + 1),
        (False, content.generation),
        (None, content.generation),
    ):
        question = DigestAgain("i", at.handle.id, generation, 0)
        at.interpreter.digested_again(
            question, changed, b"", at.handle.worker.owner, at.cluster.now
        )
    at.interpreter.check(UPDATE)


def test_mutate_takes_back_what_is_published_and_else_nothing() -> None:
    assert rig().interpreter.call_before_body() is None
    assert rig(5).interpreter.call_before_body() == UnpublishCall(before_body=True)


def test_mutate_waits_for_readers_of_a_version_that_was_rolled_back() -> None:
    """As `unpublish` does; the rollback itself is no error of the mutate."""
    at = rig(5)
    at.handle.worker.asks.rollback(4)
    at.handle.hold_access()
    at.cluster.run()
    assert at.handle.member.state is HandleState.EMPTY
    at.interpreter.check_idle()
    call = at.interpreter.call_before_body()
    assert call is not None
    at.interpreter.check(call)
    asked = at.handle.call(call, 10.0)
    at.cluster.advance(1)
    assert not asked.done
    at.handle.end_access()
    at.cluster.run()
    assert (asked.done, asked.error) == (True, None)
    at.call(PublishCall(5))


def rolled_back_while_read(call: Call) -> tuple[Rig, CallRecord]:
    """A call with 10 s, behind the fence of a version that was rolled back and is still read."""
    at = rig(5)
    at.handle.worker.asks.rollback(4)
    at.handle.hold_access()
    at.cluster.run()
    asked = at.handle.call(call, 10.0)
    at.cluster.advance(9.9)
    assert not asked.has_ended()
    return at, asked


@pytest.mark.parametrize("call", [UnpublishCall(before_body=True), PublishCall(6), CloseCall()])
def test_a_call_ends_in_time_although_a_rolled_back_version_is_still_read(call: Call) -> None:
    """G2, G10: it raises, and the next call waits for the readers, too."""
    at, asked = rolled_back_while_read(call)
    at.cluster.advance(0.1)
    assert isinstance(asked.error, DrainTimeout)
    assert "still being read after 10 s: it must not be written" in str(asked.error)
    assert (asked.error.retryable, asked.error.memory) == (True, "intact")
    again = at.handle.call(at.interpreter.call_before_body() or REPLICATE, 10.0)
    at.cluster.advance(9)
    assert not again.has_ended()
    at.handle.end_access()
    at.cluster.run()
    assert (again.done, again.error) == (True, None)
    at.call(PublishCall(6))


def test_a_cancelled_call_ends_although_a_rolled_back_version_is_still_read() -> None:
    at, asked = rolled_back_while_read(UnpublishCall(before_body=True))
    at.handle.cancel()
    at.cluster.run()
    assert (asked.has_ended(), type(asked.error)) == (True, StateError)
    assert at.handle.member.has_pending_work
    at.handle.end_access()


def test_a_call_hears_of_a_lost_state_although_a_rolled_back_version_is_still_read() -> None:
    at, asked = rolled_back_while_read(PublishCall(6))
    at.cluster.guarantees.state_lost(at.cluster.store)
    at.handle.apply(at.handle.member.state_lost(at.cluster.now))
    at.cluster.run()
    assert (asked.has_ended(), type(asked.error)) == (True, LeaseLost)
    at.handle.end_access()


def test_a_fence_is_given_up_at_its_deadline_or_as_soon_as_its_call_is_cancelled() -> None:
    at = rig(5)
    assert at.interpreter.fence_until(Fence(1, None)) == inf
    assert at.interpreter.fence_until(Fence(1, 60.0)) == 60.0
    at.handle.hold_access()
    at.handle.unpublish(50.0)
    at.cluster.run()
    fence = at.handle.todo[0]
    assert isinstance(fence, Fence)
    before = at.interpreter.fence_until(fence)
    at.handle.cancel()
    assert at.interpreter.fence_until(fence) < before


def test_only_what_is_published_is_told_of_as_made() -> None:
    class Owner:
        told = frozenset({"told"})

        def take_made(
            self, registration: RegistrationId, selection: str = "", *, if_all: bool = False
        ) -> tuple[list[tuple[int, int]], bool]:
            return [(0, 7)], selection in self.told

        def selections(self, registration: RegistrationId) -> tuple[str, ...]:
            return ("told",)

        def chunk_count(self, registration: RegistrationId, selection: str = "") -> int:
            return 1 if selection else 4

    published, read = rig(5), filled()
    said, is_all = published.interpreter.tell_made(Owner())
    assert {each.registration for each in said} == {published.handle.id}
    told = [(each.selection, each.chunks, each.runs, each.last, len(each.digests)) for each in said]
    assert told == [("", 4, ((0, 1),), False, 8), ("told", 1, ((0, 1),), True, 8)]
    assert not is_all
    Owner.told |= {""}
    assert published.interpreter.tell_made(Owner())[1]
    assert read.interpreter.tell_made(Owner()) == ([], True)


def test_digests_are_told_of_memory_or_else_of_what_is_staged_for_it() -> None:
    at = rig(5)
    content = at.handle.member.content
    assert content is not None
    lists: dict[str, tuple[int, tuple[int | None, ...]]] = {}
    question = TellDigests(at.handle.id, content.generation)

    def told(question: TellDigests) -> tuple[int, tuple[tuple[int, int], ...]]:
        (said,) = at.interpreter.tell_digests(question, lambda target, _: lists.get(target))
        assert said.last
        return said.chunks, said.runs

    assert told(question) == (0, ())
    lists[f"{at.handle.id}/staged"] = 8, (7, None, 9, 9)
    assert told(question) == (4, ((0, 1), (2, 2)))
    lists[at.handle.id] = 8, (7, 8, None)
    assert told(question) == (3, ((0, 2),))
    assert at.interpreter.must_make(question)


def test_a_loss_of_state_is_told_by_the_member() -> None:
    at = rig(5)
    at.handle.apply(at.handle.member.state_lost(at.cluster.now))
    at.cluster.run()
    at.interpreter.check_idle()
    with pytest.raises(LeaseLost):
        at.handle.member.report_loss()


def test_a_registration_that_is_given_up_again_without_a_deadline_keeps_the_one_it_has() -> None:
    at = rig(5)
    at.handle.hold_access()
    call = at.handle.unpublish()
    at.interpreter.give_up(at.cluster.now, at.cluster.now + 2.0)
    at.handle.give_up()
    at.cluster.advance(2.1)
    assert call.has_ended()
    at.handle.end_access()


def test_a_fill_that_changes_nothing_leaves_memory_that_was_filled() -> None:
    at = filled()
    at.call(UPDATE)
    assert at.interpreter.was_filled
