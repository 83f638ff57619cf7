"""A rank's own side: what it does when messages are lost, calls are given up, and fills cannot go
on.
"""

from __future__ import annotations

import pytest

from tensorhub.errors import (
    CoordinatorUnavailable,
    DrainTimeout,
    IntegrityError,
    LeaseLost,
    ManifestMismatch,
    OperationTimeout,
    ProtocolError,
    StateError,
    VersionUnavailable,
)
from tensorhub.machine import InvariantBroken
from tensorhub.messages import (
    Abandon,
    AddSource,
    DigestedAgain,
    ErrorInfo,
    Fill,
    FromWorker,
    ManifestReply,
    Outcome,
    Progress,
    ReadFailed,
    Refused,
    Register,
    RegisterAgain,
    Registered as RegisteredReply,
    Resolve,
    Revoked,
    Start,
    Write,
)
from tensorhub.model.manifest import TensorDescription, build_manifest
from tensorhub.testing import CHUNK_BYTES, CHUNKS, CallRecord, SimHandle, StepwiseCluster
from tensorhub.testing.sim.host_copies import CopyRequest
from tensorhub.testing.sim.layouts import Layout
from tensorhub.testing.sim.memory import make_manifest
from tensorhub.types import HandleState, OpKey, VersionInfo
from tensorhub.worker.active_call import DEADLINE_SLACK_S
from tensorhub.worker.calls import Action, CloseCall, Finish, Say
from tensorhub.worker.filling import Filling
from tensorhub.worker.member import Member
from tensorhub.worker.states import Phase


def published(*readers: str) -> tuple[StepwiseCluster, SimHandle, list[SimHandle]]:
    cluster = StepwiseCluster()
    trainer, others = cluster.handle("trainer"), [cluster.handle(name) for name in readers]
    cluster.run()
    trainer.publish(1)
    cluster.run()
    return cluster, trainer, others


def test_a_read_goes_on_while_nobody_can_be_told() -> None:
    """The control plane is down, the data plane is not; the vote is said when it is back."""
    cluster, _, (reader,) = published("reader")
    asked = reader.replicate()
    cluster.run("read")
    reader.worker.disconnect()
    cluster.run()
    assert not asked.has_ended()
    reader.worker.connect()
    cluster.run()
    assert asked.number == 1
    cluster.check_agreement()


def test_who_has_deregistered_does_not_register_again() -> None:
    """The question crosses its Deregister, and nobody would ever take that registration back."""
    cluster = StepwiseCluster()
    late = cluster.handle("late")
    cluster.run()

    def asked() -> list[Action]:
        return late.member.receive(
            RegisterAgain(late.member._session._register_request, whole=False), cluster.now
        )

    assert len(asked()) == 1
    closed = late.close()
    assert not closed.has_ended()
    assert asked() == []
    cluster.run()
    assert late.member.state is HandleState.CLOSED
    assert asked() == []


def test_sources_that_changed_meanwhile_are_learnt_at_the_next_connection() -> None:
    cluster, trainer, (reader, other) = published("reader", "other")
    other.replicate()
    cluster.run()
    asked = reader.replicate()
    cluster.run("read")
    assert reader.pull is not None
    (grant,) = reader.pull.grants.values()
    source = cluster.find(grant)
    assert source is not None
    reader.worker.disconnect()
    cluster.run("read")
    source.unpublish()  # the reader is moved, and does not hear of it
    cluster.run("read")
    reader.worker.connect()
    cluster.run("read")
    assert [g.source for g in reader.pull.grants.values()] == [
        "other" if source is trainer else "trainer"
    ]
    cluster.run()
    assert asked.number == 1


def test_a_commit_whose_outcome_was_lost_leaves_its_memory_a_source() -> None:
    """Between the decision and its hearing the rank says what it has voted for, and stays a source
    throughout.
    """
    cluster, trainer, (reader, other) = published("reader", "other")
    asked = reader.replicate()
    cluster.run(until=lambda: any("reader -> Prepared" in line for line in cluster.log))
    reader.worker.disconnect()
    cluster.run()
    trainer.worker.crash()
    cluster.advance(6)
    late = other.replicate()
    reader.worker.connect()
    cluster.run()
    assert (asked.number, late.number) == (1, 1)
    assert not cluster.coordinator.cluster.models["actor"].versions[1].abandoned
    assert sum("reader <- DropSource" in line or "order" in line for line in cluster.log) == 0
    cluster.check_agreement()


def test_a_publication_whose_outcome_was_lost_never_lost_its_source() -> None:
    """The same for a publisher, who does not know the content id yet."""
    cluster, _, _ = published()
    other, reader = cluster.handle("other"), cluster.handle("reader")
    cluster.run()
    asked = other.publish(2)
    cluster.run(until=lambda: cluster.unstored)
    other.worker.disconnect()
    cluster.run()
    got = reader.replicate(2)
    other.worker.connect()
    cluster.run(until=lambda: any("other <- Registered" in line for line in cluster.log[-3:]))
    assert cluster.coordinator.cluster.models["actor"].versions[2].has_live_source()
    cluster.run()
    assert (asked.number, got.number) == (2, 2)


def test_a_pull_that_cannot_go_on_tears() -> None:
    cluster, _, (reader,) = published("reader")
    asked = reader.replicate()
    cluster.run("read")
    reader.apply(reader.member.pull_failed(IntegrityError("no source has chunk 1"), cluster.now))
    cluster.run("read")
    with pytest.raises(IntegrityError, match="no source has chunk 1") as caught:
        _ = asked.number
    assert caught.value.memory == "torn"
    assert reader.member.state is HandleState.TORN
    with pytest.raises(StateError, match=r"torn: .*unpublish\(\)") as refused:
        reader.publish(2)
    assert refused.value.memory == "torn"
    reader.unpublish()  # the caller has loaded the memory anew
    cluster.run("read")
    again = reader.publish(2)
    cluster.run()
    assert again.number == 2


def test_the_coordinator_hears_why_a_source_was_given_up() -> None:
    cluster, _, (reader,) = published("reader")
    reader.replicate()
    cluster.run("read")
    assert reader.pull is not None
    (lease,) = reader.pull.grants
    why = "corrupt", "its digest is another one"
    actions = reader.member.source_failed(lease, *why, cluster.now, chunk=1)
    said = [each.message for each in actions if isinstance(each, Say)]
    failed = [message for message in said if isinstance(message, ReadFailed)]
    assert [(each.lease, each.reason, each.detail, each.chunk) for each in failed] == [
        (lease, *why, 1)
    ]


def test_a_source_that_was_given_up_offline_is_told_and_not_read_again() -> None:
    """The coordinator grants the same lease again: it would wait for a lane that has ended."""
    cluster, _, (reader, other) = published("reader", "other")
    other.replicate()
    cluster.run()
    asked = reader.replicate()
    cluster.run("read")
    assert reader.pull is not None
    ((lease, lane),) = reader.pull.lanes.items()
    reader.worker.disconnect()
    lane.end("lost")
    cluster.run("read")
    reader.worker.connect()
    cluster.run()
    assert asked.number == 1
    assert [each.grant.lease for each in reader.pull.all_lanes].count(lease) == 1


def test_tensors_that_do_not_fit_are_named_and_nothing_is_written() -> None:
    cluster, _, (reader,) = published("reader")
    tensor = TensorDescription("other", "uint8", (2, CHUNK_BYTES), 0, 2 * CHUNK_BYTES)
    odd = build_manifest([tensor], CHUNK_BYTES, "none")
    object.__setattr__(reader.member.shard, "manifest", odd)
    asked = reader.replicate()
    cluster.run()
    with pytest.raises(ManifestMismatch, match="tensor 'w' is missing at the reader") as caught:
        _ = asked.number
    assert caught.value.memory == "intact"
    assert reader.member.state is HandleState.EMPTY
    cluster.check_agreement()


def test_a_manifest_that_is_none_ends_the_call() -> None:
    cluster, _, (reader,) = published("reader")
    reader.worker.manifests.clear()
    asked = reader.replicate()
    cluster.run(
        until=lambda: (
            reader.member.running is not None and reader.member.running.phase.value == "manifest"
        )
    )
    running = reader.member.running
    assert isinstance(running, Filling)
    assert running.binding is not None
    reply = ManifestReply(running.binding.request, b"nonsense")
    reader.apply(reader.member.receive(reply, cluster.now))
    cluster.run()
    assert isinstance(asked.error, ProtocolError)


@pytest.mark.parametrize("empty", [True, False])
def test_a_check_of_what_was_given_up_since_says_nothing_of_what_is_there_now(empty: bool) -> None:
    cluster, trainer, (reader,) = published("reader")
    handle = reader if empty else trainer
    held, changed = handle.member.content, IntegrityError("its bytes have changed")
    generation = held.generation + 1 if held is not None else 1

    def said(inquiry: str) -> list[FromWorker]:
        now = cluster.now
        return said_in(handle.member.digested_again(inquiry, generation, True, changed, now))

    assert said("") == []
    registration = handle.shard.registration
    assert said("inquiry") == [
        DigestedAgain("inquiry", registration, None, b"", generation=generation)
    ]
    assert handle.member.content is held


@pytest.mark.parametrize("runs", ["nothing", "a publish"])
def test_what_comes_for_a_fill_that_has_ended_changes_nothing(runs: str) -> None:
    cluster, _, (reader,) = published("reader")
    if runs == "a publish":
        reader.publish(2)
        cluster.run(until=lambda: bool(cluster.unstored))
    member, now, late = reader.member, cluster.now, StateError("late")
    before = repr(member)
    assert not [
        *member.hook_returned(None, now),
        *member.source_failed("lease", "lost", "", now),
        *member.planned(1, late, now),
        *member.ranks_checked(1, late, now),
        *member.pull_done(now),
        *member.compared(0, 1, [], now),
        *member.room_ended(None, now),
        *member.copied(frozenset(), now),
        *member.pull_failed(late, now),
        *member.pull_stopped(now),
        *member.receive(ManifestReply(10**6, b""), now),
        *member.receive(Refused(10**6, _error()), now),
        *member.receive(RegisterAgain(10**6, whole=False), now),
    ]
    assert repr(member) == before


def test_nothing_is_told_of_a_pull_before_its_call_is_said() -> None:
    cluster, _, (reader,) = published("reader")
    assert reader.member.progress(1, 1, ()) is None
    reader.worker.disconnect()
    reader.replicate()
    assert reader.member.progress(1, 1, ()) is None
    reader.worker.connect()
    cluster.run("read")
    told = reader.member.progress(1, 1, ())
    assert told is not None
    assert told.key == reader.member.running.key  # type: ignore[union-attr]


@pytest.mark.parametrize("rolled_back", [False, True])
def test_an_update_to_what_is_held_changes_nothing_also_where_that_was_rolled_back_since(
    rolled_back: bool,
) -> None:
    cluster, _, (reader,) = published("reader")
    reader.replicate()
    cluster.run()
    reader.update()
    held, member = reader.member.content, reader.member
    assert held is not None
    assert member.running is not None
    assert member.running.phase is Phase.ASKED
    assert member.running.key is not None
    if rolled_back:
        order = Revoked(reader.shard.registration, held.version.content_id, "rolled back")
        reader.apply(member.receive(order, cluster.now))
        assert member.content is None
    outcome = Outcome(member.running.key, 0, True, True, held.version, None)
    (finish,) = [each for each in member.receive(outcome, cluster.now) if isinstance(each, Finish)]
    assert (finish.version, finish.changed, finish.error) == (held.version, False, None)


@pytest.mark.parametrize(("what", "left"), [("publish", "empty"), ("replicate", "torn")])
def test_who_is_in_doubt_when_the_coordinator_has_lost_its_state_has_memory_as_its_call_left_it(
    what: str, left: str
) -> None:
    """A publish has written nothing."""
    cluster, _, (reader,) = published("reader")
    asked = reader.publish(2, timeout_s=3) if what == "publish" else reader.replicate(timeout_s=3)
    cluster.run(until=lambda: f" {Phase.VOTED.value} until" in repr(reader.member.running))
    reader.worker.disconnect()
    cluster.advance(3, run=False)
    cluster.run("store")
    assert asked.has_ended()
    assert "in_doubt" in repr(reader.member)
    reader.apply(reader.member.state_lost(cluster.now))
    assert reader.member.state.value == left


def test_what_has_changed_while_the_rest_is_pulled_ends_the_fill() -> None:
    """A chunk that was verified: this machine's memory is at fault."""
    cluster, _, (reader,) = published("reader")
    asked = reader.replicate()
    cluster.run("read")
    assert reader.member.content is not None
    generation, changed = reader.member.content.generation, IntegrityError("its bytes have changed")
    reader.apply(reader.member.digested_again("", generation, True, changed, cluster.now))
    cluster.run("read")
    assert asked.error is changed
    assert reader.member.state is HandleState.TORN


def test_after_a_call_that_was_left_what_is_held_is_said_again_and_nothing_is_left_any_more() -> (
    None
):
    """Its outcome comes late: what this rank held may have counted for its vote."""
    cluster, _, (reader,) = published("reader")
    reader.replicate()
    cluster.run()
    asked = reader.update(at_least=2)
    cluster.run()
    reader.cancel()
    cluster.advance(2.5, run=False)  # no word has come, and none is waited for
    run_actions(cluster)
    assert asked.has_ended()
    member, now = reader.member, cluster.now
    assert asked.key is not None
    assert [type(each) for each in over_a_new_connection(member, now)] == [Abandon, Register]
    outcome = Outcome(asked.key, 0, False, False, None, _error())
    (register,) = said_in(member.receive(outcome, now))
    assert isinstance(register, Register)
    assert register.held is not None
    assert [type(each) for each in over_a_new_connection(member, now)] == [Register]


def test_a_doubt_that_is_resolved_before_the_registration_is_answered_says_what_is_held() -> None:
    """The coordinator that answers may have taken over after the commit: of what was registered it
    knows a vote only.
    """
    cluster, _, _ = published()
    other = cluster.handle("other")
    cluster.run()
    asked = other.publish(2, timeout_s=3)
    cluster.run(until=lambda: cluster.unstored)
    other.cancel("enough")
    cluster.advance(9, run=False)
    run_actions(cluster)
    assert asked.has_ended()
    assert asked.key is not None
    member, now = other.member, cluster.now
    (*_, voted) = over_a_new_connection(member, now)
    assert isinstance(voted, Register)
    assert voted.held is not None
    assert voted.held.voted
    version = VersionInfo("actor", 2, "minted", 1, 1)
    (said,) = said_in(member.receive(Outcome(asked.key, 0, True, True, version, None), now))
    assert isinstance(said, Register)
    assert said.held is not None
    assert (said.held.content_id, said.held.voted) == ("minted", False)


def over_a_new_connection(member: Member, now: float) -> list[FromWorker]:
    """What it says first."""
    member.disconnected(now)
    return said_in(member.connected(now))


def test_a_handle_that_is_closed_has_nothing_to_say_when_it_is_closed_again() -> None:
    cluster, _, (reader,) = published("reader")
    reader.close()
    cluster.run()
    assert reader.member.state is HandleState.CLOSED
    (finish,) = reader.member.begin(CloseCall(), 60, cluster.now)
    assert isinstance(finish, Finish)
    assert finish.error is None


def test_an_owner_whose_connection_breaks_while_it_asks_to_leave_leaves_by_itself() -> None:
    cluster, trainer, (reader,) = published("reader")
    reader.replicate()
    cluster.run("read")
    asked = trainer.unpublish(60)
    cluster.run("read")
    assert not asked.has_ended()
    trainer.worker.disconnect()
    cluster.run()
    assert asked.has_ended()
    assert asked.error is None
    assert trainer.member.state is HandleState.EMPTY


def test_a_publish_that_is_to_be_called_again_has_ended() -> None:
    """Only a fill calls again by itself."""
    cluster, _, (reader,) = published("reader")
    asked = reader.publish(2)
    cluster.run(until=lambda: bool(cluster.unstored))
    assert asked.key is not None
    again = Outcome(asked.key, 0, False, False, None, _error(), again=True)
    reader.apply(reader.member.receive(again, cluster.now))
    cluster.run("store")
    assert isinstance(asked.error, StateError)
    assert reader.member.state is HandleState.EMPTY


@pytest.mark.parametrize(
    ("name", "wrong", "says"),
    [
        ("content", None, "a state says whether there is content"),
        ("in_place", None, "what is in place has a version"),
        ("doubt", OpKey("m", "g", 1, 1), "a state says whether there is a doubt"),
    ],
)
def test_parts_of_memory_that_disagree_are_noticed(name: str, wrong: object, says: str) -> None:
    _, trainer, _ = published()
    trainer.member.check_invariants()
    setattr(trainer.member._memory, name, wrong)
    with pytest.raises(InvariantBroken, match=f"^{says}: "):
        trainer.member.check_invariants()


def said_in(actions: list[Action]) -> list[FromWorker]:
    return [each.message for each in actions if isinstance(each, Say)]


def hears_that_it_is_unknown(cluster: StepwiseCluster, reader: SimHandle) -> None:
    """Of its running call, from a new coordinator."""
    running = reader.member.running
    assert running is not None
    assert running.key is not None
    unknown = Outcome(running.key, 0, False, False, None, _error(), unknown=True)
    reader.apply(reader.member.receive(unknown, cluster.now))


def test_a_call_that_a_new_coordinator_does_not_know_is_said_over_each_connection_until_it_does() -> (
    None
):
    cluster, _, (reader,) = published("reader")
    asked = reader.replicate()
    cluster.run("read")
    hears_that_it_is_unknown(cluster, reader)
    member = reader.member
    assert member.running is not None
    key = member.running.key
    for _ in range(2):
        member.disconnected(cluster.now)
        *_, register = said_in(member.connected(cluster.now))
        assert isinstance(register, Register)
        answer = RegisteredReply(register.request, register.registration, 1, 0, True)
        *_, fill, resolve = said_in(member.receive(answer, cluster.now))
        assert isinstance(fill, Fill)
        assert fill.resume is not None
        assert (fill.key, resolve) == (key, Resolve(fill.key, 0))
    assert not asked.has_ended()


def test_what_a_rank_holds_may_have_been_its_vote_as_long_as_nothing_is_bound() -> None:
    """Its call was bound before, by a coordinator that has restarted."""
    cluster, trainer, (reader,) = published("reader")
    reader.replicate()
    cluster.run()
    trainer.unpublish()
    cluster.run()
    trainer.publish(2)
    cluster.run()
    reader.worker.manifests.clear()
    asked = reader.update(timeout_s=3)
    cluster.run(
        until=lambda: (
            reader.member.running is not None and reader.member.running.phase is Phase.MANIFEST
        )
    )
    hears_that_it_is_unknown(cluster, reader)
    assert reader.member.running is not None
    assert reader.member.running.phase is Phase.ASKED
    reader.worker.disconnect()
    reader.cancel("enough")
    cluster.advance(DEADLINE_SLACK_S)
    assert isinstance(asked.error, StateError)
    assert asked.error.memory == "in_doubt"


def test_an_update_ends_the_prefetch_of_what_it_reads_and_has_its_memory_freed() -> None:
    cluster = StepwiseCluster()
    cluster.host_bytes = 2**40
    trainer, reader = cluster.handle("trainer"), cluster.handle("reader")
    cluster.run()
    trainer.publish(1)
    cluster.run()
    prefetched = reader.prefetch()
    cluster.run("read")
    asked = reader.update()
    cluster.run()
    assert asked.number == 1
    assert isinstance(prefetched.error, StateError)
    assert "an update has taken what was prefetched so far" in str(prefetched.error)
    assert reader.worker.copies.machine.budget.reserved_bytes == 0


def test_progress_is_for_show_and_late_or_wild_figures_do_no_harm() -> None:
    cluster, _, (reader,) = published("reader")
    asked = reader.replicate()
    cluster.run("read")
    assert asked.key is not None
    reader.worker.say(Progress(asked.key, 0, 99, 99))
    cluster.run("read")
    (holding,) = [
        h
        for h in cluster.coordinator.cluster.models["actor"].versions[1].holdings[0]
        if not h.complete
    ]
    assert holding.chunks_verified == 2
    cluster.run()
    reader.worker.say(Progress(asked.key, 0, 1, 1))
    cluster.run()
    assert asked.number == 1


def test_a_call_that_the_doubt_forbids_is_judged_once_it_is_resolved() -> None:
    cluster, _, _ = published()
    other = cluster.handle("other")
    cluster.run()
    other.publish(2, timeout_s=3)
    cluster.run(until=lambda: cluster.unstored)
    other.worker.disconnect()
    cluster.advance(9)
    assert "in_doubt" in repr(other.member)
    asked = other.publish(3)
    other.worker.connect()
    cluster.run()
    with pytest.raises(StateError, match="holds version 2, which is published"):
        _ = asked.number
    assert other.member.version == 2


def test_a_call_that_waits_for_the_outcome_of_the_last_one_begins_with_it() -> None:
    cluster, _, _ = published()
    other = cluster.handle("other")
    cluster.run()
    other.publish(2, timeout_s=3)
    cluster.run(until=lambda: cluster.unstored)
    for _ in range(2):  # it gives its call up, and then waits for the outcome no longer
        cluster.now += 3 + DEADLINE_SLACK_S
        cluster.time_passes()
        cluster.run("store")
    assert "in_doubt" in repr(other.member)
    asked = other.unpublish()
    cluster.run("store")
    assert not asked.has_ended()
    cluster.run()
    assert asked.has_ended()
    assert asked.error is None
    assert other.member.state is HandleState.EMPTY


def test_a_silent_coordinator_does_not_hold_a_call_for_ever() -> None:
    """It is connected and says nothing: each step gets its slack, then the call ends by itself."""
    cluster, _, (reader,) = published("reader")
    reader.worker.say = lambda message: None  # type: ignore[method-assign]
    asked = reader.replicate(timeout_s=3)
    cluster.heartbeat_at = 1e9
    cluster.advance(7)
    with pytest.raises(OperationTimeout, match="replicate did not end within 3 s") as caught:
        _ = asked.number
    assert caught.value.memory == "intact"


@pytest.mark.parametrize(
    ("what", "phase"),
    [
        ("publish", Phase.QUEUED),
        ("publish", Phase.VOTED),
        ("replicate", Phase.QUEUED),
        ("replicate", Phase.ASKED),
        ("replicate", Phase.PULLING),
        ("replicate", Phase.VOTED),
    ],
)
def test_while_the_coordinator_is_away_a_call_ends_at_its_deadline(what: str, phase: Phase) -> None:
    """It will hear nothing, so no step gets a slack."""
    cluster, _, (reader,) = published("reader")
    if phase is Phase.QUEUED:
        reader.worker.disconnect()
    asked = reader.publish(2, timeout_s=3) if what == "publish" else reader.replicate(timeout_s=3)
    cluster.run(until=lambda: f" {phase.value} until" in repr(reader.member.running))
    reader.worker.disconnect()
    cluster.advance(3, run=False)
    cluster.run()
    assert isinstance(asked.error, CoordinatorUnavailable)


def test_answers_to_other_questions_change_nothing() -> None:
    cluster, _, (reader,) = published("reader")
    reader.worker.manifests.clear()
    asked = reader.replicate()
    cluster.run(
        until=lambda: (
            reader.member.running is not None and reader.member.running.phase.value == "manifest"
        )
    )
    for message in (ManifestReply(10**6, b""), Refused(10**6, _error())):
        reader.apply(reader.member.receive(message, cluster.now))
    cluster.run()
    assert asked.number == 1


def _error() -> ErrorInfo:

    return ErrorInfo.of(StateError("no"))


@pytest.mark.parametrize("kept", [True, False])
def test_a_voted_fill_cannot_be_cancelled_alone(kept: bool) -> None:
    """R6: it stays in doubt, keeps its memory as it is, and takes the outcome when it hears it."""
    cluster = StepwiseCluster()
    trainers, readers = cluster.group("trainer", 2), cluster.group("reader", 2)
    cluster.run()
    for handle in trainers:
        handle.publish(1)
    cluster.run()
    calls = [handle.replicate() for handle in readers]
    while not cluster.unstored:
        cluster.do(next(choice for choice in cluster.choices() if choice.kind != "store"))
    readers[0].cancel("enough")
    cluster.run("store")
    assert isinstance(calls[0].error, StateError)
    assert calls[0].error.memory == "in_doubt"
    assert "in_doubt" in repr(readers[0].member)
    if kept:
        cluster.run()
        assert [handle.member.version for handle in readers] == [1, 1]
    else:
        cluster.fail_store()
        cluster.run()
        assert [handle.member.state for handle in readers] == [HandleState.TORN, HandleState.TORN]
    cluster.check_agreement()


def test_a_barrier_is_in_doubt_also_where_what_was_held_is_given_up_before_its_end() -> None:
    """R6: what this rank held was its vote. The record comes after both ranks have left, and says
    committed (G4).
    """
    cluster = StepwiseCluster()
    trainers, readers = cluster.group("trainer", 2), cluster.group("reader", 2)
    cluster.run()
    for handle in trainers:
        handle.publish(1)
    cluster.run()
    for handle in readers:
        handle.replicate()
    cluster.run()
    calls = [handle.update() for handle in readers]
    cluster.run("store")
    assert cluster.unstored
    for handle in readers:
        handle.cancel("enough")
    cluster.run("store")
    member = readers[0].member
    assert member.content is not None
    changed = IntegrityError("its bytes have changed")
    readers[0].apply(
        member.digested_again("inquiry", member.content.generation, True, changed, cluster.now)
    )
    assert [handle.member.state for handle in readers] == [HandleState.EMPTY, HandleState.READY]
    cluster.now += DEADLINE_SLACK_S
    cluster.time_passes()
    cluster.run("store")
    assert [getattr(call.error, "memory", None) for call in calls] == ["in_doubt", "in_doubt"]
    cluster.run()
    cluster.check_agreement()


def test_a_vote_that_was_never_heard_is_said_again_out_of_the_doubt() -> None:
    cluster, _, (reader,) = published("reader")
    asked = reader.replicate()
    cluster.run("read")
    reader.worker.disconnect()
    cluster.run()
    reader.cancel("enough")
    cluster.run()
    assert isinstance(asked.error, StateError)
    assert asked.error.memory == "in_doubt"
    reader.worker.connect()
    cluster.run()
    assert (reader.member.state, reader.member.version) == (HandleState.READY, 1)
    assert cluster.coordinator.cluster.leases == {}


def test_an_abort_of_a_fill_whose_write_was_never_heard_leaves_nothing_behind() -> None:
    """Register came while the operation still ran, its end without the Write that was lost."""
    cluster, trainer, (reader, other) = published("reader", "other")
    reader.replicate()
    cluster.run()
    trainer.unpublish()
    cluster.run()
    trainer.publish(2)
    cluster.run()
    asked = reader.update(hold=True)
    cluster.run(until=lambda: any("reader -> ReadyToWrite" in line for line in cluster.log))
    reader.worker.disconnect()  # Write is on its way
    reader.worker.connect()
    cluster.run(until=lambda: any("reader <- Registered" in line for line in cluster.log[-2:]))
    reader.cancel("enough")
    cluster.run()
    assert isinstance(asked.error, StateError)
    assert reader.member.version == 1
    cluster.check_agreement()
    got = other.replicate(1)
    cluster.run()
    assert got.number == 1


# ------------------------------------------------------------------------------------------------
# fences that do not end


def stays_published(cluster: StepwiseCluster, asked: CallRecord | CopyRequest) -> None:
    """The call ended with DrainTimeout, and its memory is a source as before, under another
    generation (R4).
    """
    handle = asked.handle
    assert isinstance(asked.error, DrainTimeout)
    assert (asked.error.retryable, asked.error.memory) == (True, "intact")
    assert (
        "version 1 is still being read after 8 s: it stays published and must not be written"
        in str(asked.error)
    )
    assert (handle.member.state, handle.member.version) == (HandleState.READY, 1)
    late = cluster.handle("late")
    cluster.run()
    got = late.replicate(1)
    cluster.run()
    assert got.number == 1
    cluster.check_agreement()


@pytest.mark.parametrize("online", [True, False])
@pytest.mark.parametrize("what", ["unpublish", "close"])
def test_memory_that_is_read_beyond_the_deadline_stays_published(what: str, online: bool) -> None:
    cluster, trainer, _ = published()
    trainer.hold_access()
    if not online:
        trainer.worker.disconnect()
    asked = trainer.unpublish(8) if what == "unpublish" else trainer.close(8)
    cluster.advance(7.9)
    assert not asked.has_ended()
    assert trainer.member.state is HandleState.DRAINING
    cluster.advance(0.1)
    assert asked.has_ended()
    if not online:
        trainer.worker.connect()
        cluster.run()
    stays_published(cluster, asked)
    again = trainer.unpublish(8) if what == "unpublish" else trainer.close(8)
    cluster.advance(1)
    assert not again.has_ended()  # the old access counts (G2)
    trainer.end_access()
    cluster.run()
    assert again.done
    assert again.error is None
    cluster.check_agreement()


def announced_open(handle: SimHandle) -> list[int]:
    """Have it checked that whenever it says what it holds, that can be read: the generations under
    which it has said so.
    """
    worker, say, said = handle.worker, handle.worker.say, list[int]()

    def listening(message: FromWorker) -> None:
        if (
            isinstance(message, Register)
            and message.registration == handle.id
            and message.held is not None
        ):
            held = worker.owner._memories[handle.id]
            assert held.is_open, f"{message} is said of memory that is closed"
            assert held.generation == message.held.generation
            said.append(held.generation)
        say(message)

    worker.say = listening  # type: ignore[method-assign]
    return said


@pytest.mark.parametrize(
    "when", ["online", "offline", "back while it is fenced", "back at its deadline", "restarted"]
)
@pytest.mark.parametrize("what", ["unpublish", "close", "update"])
def test_memory_that_could_not_be_fenced_is_announced_again_once_it_is_open(
    what: str, when: str
) -> None:
    cluster, _, (reader, other) = published("reader", "other")
    reader.replicate()
    cluster.run()
    other.publish(2)
    cluster.run()
    reader.hold_access()
    said, worker = announced_open(reader), reader.worker
    assert reader.member.content is not None
    before = reader.member.content.generation
    asked = getattr(reader, what)(timeout_s=8)
    cluster.run()
    if when != "online":
        worker.disconnect()
    if when == "restarted":
        cluster.restart()
        cluster.run()
    if when in ("back while it is fenced", "restarted"):
        cluster.advance(1)
        for each in cluster.workers.values():
            if each.link is None:
                each.connect()
        cluster.run()
        assert not asked.has_ended()
        assert said == []  # closed memory is not said to be held
    cluster.advance(8.1, run=when != "back at its deadline")
    if worker.link is None:
        worker.connect()
    cluster.run()
    assert isinstance(asked.error, DrainTimeout)
    assert reader.member.content is not None
    assert before != reader.member.content.generation == said[-1]
    cluster.workers["trainer"].crash()
    late = cluster.handle("late")
    cluster.advance(cluster.options.lease_s + 1)
    got = late.replicate(1)
    cluster.run()
    assert got.number == 1
    reader.end_access()


@pytest.mark.parametrize("online", [True, False])
def test_an_update_that_cannot_fence_leaves_the_old_version_published(online: bool) -> None:
    cluster, _, (reader, other) = published("reader", "other")
    reader.replicate()
    cluster.run()
    other.publish(2)
    cluster.run()
    reader.hold_access()
    asked = reader.update("latest", 8)
    cluster.run()
    if not online:
        reader.worker.disconnect()
    cluster.advance(8)
    if not online:
        reader.worker.connect()
        cluster.run()
    stays_published(cluster, asked)
    reader.end_access()
    again = reader.update("latest", 8)
    cluster.run()
    assert again.number == 2


def test_what_is_ordered_out_while_it_is_fenced_for_an_update_is_overwritten_all_the_same() -> None:
    """It is on its way out: a second fence, and a handle that holds nothing, would leave the update
    waiting for good.
    """
    cluster, _, (reader, other) = published("reader", "other")
    reader.replicate()
    cluster.run()
    other.publish(2)
    cluster.run()
    reader.hold_access()
    asked = reader.update("latest")
    cluster.run()
    assert reader.member.content is not None
    registration, content_id = reader.shard.registration, reader.member.content.version.content_id
    reader.apply(
        reader.member.receive(Revoked(registration, content_id, "rolled back"), cluster.now)
    )
    cluster.run()
    reader.end_access()
    cluster.run()
    assert (asked.number, reader.member.version) == (2, 2)
    cluster.check_agreement()


def test_on_one_rank_a_fence_that_does_not_end_ends_the_groups_update() -> None:
    cluster = StepwiseCluster()
    trainers, readers = cluster.group("trainer", 2), cluster.group("reader", 2)
    cluster.run()
    for version in (1, 2):
        for handle in trainers:
            handle.publish(version)
        cluster.run()
        if version == 1:
            for handle in readers:
                handle.replicate()
            cluster.run()
            for handle in trainers:
                handle.unpublish()
            cluster.run()
    readers[0].hold_access()
    one, two = [handle.update("latest", 8) for handle in readers]
    cluster.advance(8)
    assert (type(one.error), readers[0].member.version) == (DrainTimeout, 1)
    assert isinstance(two.error, OperationTimeout)
    assert "version 2 was not complete after 8 s on rank(s) [0]" in str(two.error)
    assert (two.error.retryable, two.error.memory) == (True, "torn")
    readers[0].end_access()
    cluster.run()
    cluster.check_agreement()


def test_readers_have_half_the_timeout_to_leave_and_the_fence_the_rest() -> None:
    """The coordinator would give them its grace of 5 s."""
    cluster, trainer, (reader,) = published("reader")
    got = reader.replicate()
    cluster.run("read")
    asked = trainer.unpublish(4)
    while not asked.done:
        cluster.advance(0.25, run=False)
        cluster.run("read")
    assert cluster.now == 2.0
    assert asked.error is None
    cluster.advance(100)
    assert isinstance(got.error, VersionUnavailable)


def test_a_cancelled_unpublish_takes_the_memory_back_if_it_can() -> None:
    cluster, trainer, _ = published()
    trainer.hold_access()
    asked = trainer.unpublish(60)
    cluster.run()
    trainer.cancel("enough")
    cluster.advance(1)
    trainer.end_access()
    cluster.run()
    assert asked.done
    assert trainer.member.state is HandleState.EMPTY


def test_memory_that_is_not_published_again_is_fenced_however_long_it_takes() -> None:
    """A broken fill: neither its caller nor the next call may write while somebody reads."""
    cluster, trainer, (reader,) = published("reader")
    asked = reader.replicate()
    cluster.run("read")
    assert cluster.can_read(reader)
    cluster.read(reader)
    cluster.read(reader)  # one chunk is verified, and offered
    reader.hold_access()
    trainer.worker.crash()
    reader.cancel("enough")
    cluster.advance(100)
    assert not asked.has_ended()
    assert reader.member.state is HandleState.TORN
    reader.end_access()
    cluster.run()
    assert asked.has_ended()


def test_what_was_ordered_out_is_told_by_the_next_unpublish_once() -> None:
    """R2: the version was given up while its holder was taken for dead."""
    cluster, trainer, _ = published()
    other = cluster.handle("other")
    trainer.worker.disconnect()
    cluster.advance(30)
    for version in (2, 3, 4):
        other.publish(version)
        cluster.run()
        if version < 4:
            other.unpublish()
            cluster.run()
    trainer.worker.connect()
    cluster.run()
    trainer.worker.disconnect()
    trainer.worker.connect()
    trainer.hold_access()
    cluster.run()
    assert (trainer.member.state, trainer.member.has_pending_work) == (HandleState.EMPTY, True)
    asked = trainer.unpublish()
    cluster.advance(1)
    # it says that the memory may be written, so it waits for the fence (G2)
    assert not asked.has_ended()
    cluster.advance(60)
    assert isinstance(asked.error, DrainTimeout)
    assert trainer.member.has_pending_work
    asked = trainer.unpublish()
    cluster.advance(1)
    assert not asked.has_ended()
    trainer.end_access()
    cluster.run()
    assert isinstance(asked.error, LeaseLost)
    assert "version 1, which it held, is unknown to the coordinator" in str(asked.error)
    assert (asked.error.retryable, asked.error.memory, trainer.member.has_pending_work) == (
        False,
        "intact",
        False,
    )
    with pytest.raises(StateError, match="there is nothing to unpublish"):
        trainer.unpublish()
    trainer.publish(5)
    cluster.run()
    assert trainer.member.version == 5


@pytest.mark.parametrize(
    "when", ["before the connection is lost", "while there is none", "afterwards"]
)
def test_a_write_that_was_lost_with_its_connection_and_given_up_leaves_the_old_version_known(
    when: str,
) -> None:
    """The coordinator has begun a fill here that never was; whatever it hears in which order, the
    old version is held.
    """
    cluster, trainer, (reader,) = published("reader")
    reader.replicate()
    cluster.run()
    trainer.unpublish()
    cluster.run()
    trainer.publish(2)
    cluster.run()
    asked = reader.update(hold=True)
    cluster.run(
        until=lambda: any(isinstance(message, Write) for message in reader.worker.heard_soon())
    )
    if when.startswith("before"):
        reader.cancel()
    reader.worker.disconnect()
    if when.startswith("while"):
        reader.cancel()
    reader.worker.connect()
    if when == "afterwards":
        while (
            reader.member.running is None
            or reader.worker.link is None
            or not reader.worker.link.welcomed
        ):
            cluster.do(
                next(choice for choice in cluster.choices() if choice.kind in ("up", "down"))
            )
        reader.cancel()
    cluster.run()
    assert isinstance(asked.error, StateError)
    assert (asked.error.memory, reader.member.state, reader.member.version) == (
        "intact",
        HandleState.READY,
        1,
    )
    cluster.check_agreement()
    late = cluster.handle("late")
    cluster.run()
    got = late.replicate(1)
    cluster.run()
    assert got.number == 1


@pytest.mark.parametrize("what", ["update", "unpublish"])
def test_a_call_that_is_cancelled_while_its_fence_waits_ends_soon(what: str) -> None:
    """One of its own accesses runs on: the memory stays published, as it is."""
    cluster, trainer, (reader,) = published("reader")
    reader.replicate()
    cluster.run()
    trainer.unpublish()
    cluster.run()
    trainer.publish(2)
    cluster.run()
    reader.hold_access()
    asked = reader.update(timeout_s=600) if what == "update" else reader.unpublish(timeout_s=600)
    cluster.run()
    assert not asked.has_ended()
    reader.cancel("enough")
    cluster.advance(3)
    assert asked.has_ended()
    assert (reader.member.state, reader.member.version) == (HandleState.READY, 1)
    cluster.check_agreement()
    reader.end_access()
    again = reader.update()
    cluster.run()
    assert again.number == 2


def asks_what_is_in_it(
    layout: Layout | None,
) -> tuple[StepwiseCluster, SimHandle, SimHandle, CallRecord]:
    """A reader that is bound to a version, and has asked what is in it; the answer is not here
    yet.
    """
    cluster = StepwiseCluster()
    trainer = cluster.worker("trainer").register(
        "trainer", cut=Layout(8, 1) if layout is not None else None
    )
    reader = cluster.worker("reader").register("reader", cut=layout)
    cluster.run()
    trainer.publish(1)
    cluster.run()
    asked = reader.replicate()
    cluster.run(
        until=lambda: reader.member.running is None or reader.member.running.phase is Phase.MANIFEST
    )
    return cluster, trainer, reader, asked


LAYOUTS = [None, Layout(8, 1, left_out=2, partial=True)]  # the trainer's own, and another one


@pytest.mark.parametrize("layout", LAYOUTS)
def test_who_asks_what_is_in_a_version_when_the_coordinator_restarts_waits_for_its_holders(
    layout: Layout | None,
) -> None:
    """The new coordinator knows the version, and not what is in it until a holder is back."""
    cluster, trainer, reader, asked = asks_what_is_in_it(layout)
    cluster.restart()
    for back in (reader, trainer):
        back.worker.connect()
        cluster.run()
    assert asked.number == 1


@pytest.mark.parametrize("layout", LAYOUTS)
def test_what_was_asked_over_a_lost_connection_is_asked_again(layout: Layout | None) -> None:
    cluster, _, reader, asked = asks_what_is_in_it(layout)
    reader.worker.disconnect()
    reader.worker.connect()
    cluster.run()
    assert asked.number == 1


def test_a_source_that_is_added_twice_before_the_pull_begins_is_read_once() -> None:
    """Messages may come twice, though no transport of today does that."""
    cluster, _, (reader,) = published("reader")
    asked = reader.replicate()
    cluster.run(
        until=lambda: any(isinstance(message, Start) for message in reader.worker.heard_soon())
    )
    (start,) = [message for message in reader.worker.heard_soon() if isinstance(message, Start)]
    cluster.run(
        until=lambda: reader.member.running is None or reader.member.running.phase is Phase.MANIFEST
    )
    again = AddSource(start.key, 0, start.grants[0])
    for _ in range(2):
        reader.worker.hear(again)
    cluster.run()
    assert asked.number == 1


# -------------------------------------------------------------------------------------------------
# no ghosts are left


def test_a_handle_that_is_closed_before_it_was_confirmed_is_deregistered() -> None:
    """Its Register may be on its way, and nobody would ever end what comes of it."""
    cluster, trainer, _ = published()
    early = trainer.worker.register("early")
    asked = early.close()
    cluster.run()
    assert (asked.has_ended(), asked.error, early.member.state) == (True, None, HandleState.CLOSED)
    assert early.shard.registration not in cluster.coordinator.cluster.members


@pytest.mark.parametrize("late", ["while it is deregistered", "when it is closed"])
def test_the_outcome_of_a_call_that_was_left_announces_no_closed_handle_again(late: str) -> None:
    cluster, _, (reader,) = published("reader")
    call = reader.update(at_least=2, timeout_s=60)
    cluster.run()
    reader.cancel()
    cluster.advance(2.5, run=False)  # no word has come, and none is waited for
    run_actions(cluster)
    assert call.has_ended()
    closed = reader.close(timeout_s=0.1)
    run_actions(cluster)
    if late == "when it is closed":
        cluster.advance(2.5, run=False)
        run_actions(cluster)
    assert closed.has_ended() is (late == "when it is closed")
    registers = reader.member._session._register_request
    cluster.run()
    assert reader.member.state is HandleState.CLOSED
    assert reader.member._session._register_request == registers
    assert reader.shard.registration not in cluster.coordinator.cluster.members


def run_actions(cluster: StepwiseCluster) -> None:
    """What shells do by themselves; nothing that was sent arrives."""
    while (choices := [choice for choice in cluster.choices() if choice.kind == "do"]) != []:
        cluster.do(choices[0])


def test_a_copy_that_knows_the_ids_of_its_parts_only_is_known_to_a_coordinator_that_has_come_back() -> (
    None
):
    """Also where nobody is left who could say what they name."""
    cluster = StepwiseCluster(manifest=make_manifest(CHUNKS, "xxh3-64"))
    cluster.chunks = rows = CHUNKS + 3

    def pair(name: str) -> list[SimHandle]:
        return [
            cluster.worker(f"{name}{k}").register(name, k, 2, cut=Layout(rows, 2)) for k in range(2)
        ]

    trainers = pair("trainer")
    cluster.host_bytes = 2**40
    hosts = [cluster.handle(f"host{k}") for k in range(2)]
    cluster.run()
    for trainer in trainers:
        trainer.publish(1)
    hosts[0].worker.asks.retain(1)
    cluster.run()
    for trainer in trainers:
        trainer.close()
    cluster.run()
    cluster.restart()
    cluster.run()
    for host in hosts:
        host.worker.connect()
    cluster.advance(cluster.options.lease_s / 2)
    asked = [reader.replicate() for reader in pair("reader")]
    cluster.run()
    assert [each.number for each in asked] == [1, 1]
