"""A rank's own side: what it does when messages are lost, calls are given up, and fills cannot go on."""

from __future__ import annotations

import pytest

from tensorhub.errors import IntegrityError, ManifestMismatch, OperationTimeout, ProtocolError, StateError
from tensorhub.manifest import TensorDescription, build_manifest
from tensorhub.messages import ErrorInfo, ManifestReply, Progress, Refused
from tensorhub.types import HandleState
from tests.harness import CHUNK_BYTES, Handle, PureCluster


def published(*readers: str) -> tuple[PureCluster, Handle, list[Handle]]:
    cluster = PureCluster()
    trainer, others = cluster.handle("trainer"), [cluster.handle(name) for name in readers]
    cluster.run()
    trainer.publish(1)
    cluster.run()
    return cluster, trainer, others


def run_but_reads(cluster: PureCluster) -> None:
    while (choices := [choice for choice in cluster.choices() if choice.kind != "read"]) != []:
        cluster.do(choices[0])


def test_a_read_goes_on_while_nobody_can_be_told() -> None:
    """The control plane is down, the data plane is not; the vote is said when it is back."""
    cluster, _, (reader,) = published("reader")
    asked = reader.replicate()
    run_but_reads(cluster)
    reader.worker.disconnect()
    cluster.run()
    assert not asked.has_ended()
    reader.worker.connect()
    cluster.run()
    assert asked.number == 1
    cluster.check_agreement()


def test_sources_that_changed_meanwhile_are_learnt_at_the_next_connection() -> None:
    cluster, trainer, (reader, other) = published("reader", "other")
    other.replicate()
    cluster.run()
    asked = reader.replicate()
    run_but_reads(cluster)
    assert reader.pull is not None
    (grant,) = reader.pull.grants.values()
    source = cluster.find(grant)
    assert source is not None
    reader.worker.disconnect()
    run_but_reads(cluster)
    source.unpublish()  # the reader is moved, and does not hear of it
    run_but_reads(cluster)
    reader.worker.connect()
    run_but_reads(cluster)
    assert [g.source for g in reader.pull.grants.values()] == ["other" if source is trainer else "trainer"]
    cluster.run()
    assert asked.number == 1


def test_a_commit_whose_outcome_was_lost_leaves_its_memory_a_source() -> None:
    """Between the decision and its hearing the rank says what it has voted for, and stays a source throughout."""
    cluster, trainer, (reader, other) = published("reader", "other")
    asked = reader.replicate()
    while not any("reader -> Prepared" in line for line in cluster.log):
        cluster.do(cluster.choices()[0])
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
    while not cluster.unstored:
        cluster.do(cluster.choices()[0])
    other.worker.disconnect()
    cluster.run()
    got = reader.replicate(2)
    other.worker.connect()
    while not any("other <- Registered" in line for line in cluster.log[-3:]):
        cluster.do(cluster.choices()[0])
    assert cluster.coordinator.cluster.models["actor"].versions[2].has_live_source()
    cluster.run()
    assert (asked.number, got.number) == (2, 2)


def test_a_pull_that_cannot_go_on_tears() -> None:
    cluster, _, (reader,) = published("reader")
    asked = reader.replicate()
    run_but_reads(cluster)
    reader.apply(reader.member.pull_failed(IntegrityError("no source has chunk 1"), cluster.now))
    run_but_reads(cluster)
    with pytest.raises(IntegrityError, match="no source has chunk 1") as caught:
        _ = asked.number
    assert caught.value.memory == "torn"
    assert reader.member.state is HandleState.TORN
    again = reader.publish(2)  # the caller has loaded the memory anew
    cluster.run()
    assert again.number == 2


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
    asked = reader.replicate()
    while reader.member.running is None or reader.member.running.phase.value != "manifest":
        cluster.do(cluster.choices()[0])
    reply = ManifestReply(reader.member.running.request, b"nonsense")
    reader.apply(reader.member.receive(reply, cluster.now))
    cluster.run()
    assert isinstance(asked.error, ProtocolError)


def test_progress_is_for_show_and_late_or_wild_figures_do_no_harm() -> None:
    cluster, _, (reader,) = published("reader")
    asked = reader.replicate()
    run_but_reads(cluster)
    assert asked.key is not None
    reader.worker.say(Progress(asked.key, 0, 99, 99))
    run_but_reads(cluster)
    (holding,) = [h for h in cluster.coordinator.cluster.models["actor"].versions[1].holdings[0] if not h.complete]
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
    while not cluster.unstored:
        cluster.do(cluster.choices()[0])
    other.worker.disconnect()
    cluster.advance(9)
    assert "in_doubt" in repr(other.member)
    asked = other.publish(3)
    other.worker.connect()
    cluster.run()
    with pytest.raises(StateError, match="holds version 2, which is published"):
        _ = asked.number
    assert other.member.version == 2


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


def test_answers_to_other_questions_change_nothing() -> None:
    cluster, _, (reader,) = published("reader")
    asked = reader.replicate()
    while reader.member.running is None or reader.member.running.phase.value != "manifest":
        cluster.do(cluster.choices()[0])
    for message in (ManifestReply(10**6, b""), Refused(10**6, _error())):
        reader.apply(reader.member.receive(message, cluster.now))
    cluster.run()
    assert asked.number == 1


def _error() -> ErrorInfo:

    return ErrorInfo.of(StateError("no"))


@pytest.mark.parametrize("kept", [True, False])
def test_a_voted_fill_cannot_be_cancelled_alone(kept: bool) -> None:
    """R6: it stays in doubt, keeps its memory as it is, and takes the outcome when it hears it."""
    cluster = PureCluster()
    trainers, readers = cluster.group("trainer", 2), cluster.group("reader", 2)
    cluster.run()
    for handle in trainers:
        handle.publish(1)
    cluster.run()
    calls = [handle.replicate() for handle in readers]
    while not cluster.unstored:
        cluster.do(next(choice for choice in cluster.choices() if choice.kind != "store"))
    readers[0].cancel("enough")
    while (choices := [choice for choice in cluster.choices() if choice.kind != "store"]) != []:
        cluster.do(choices[0])
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


def test_a_vote_that_was_never_heard_is_said_again_out_of_the_doubt() -> None:
    cluster, _, (reader,) = published("reader")
    asked = reader.replicate()
    run_but_reads(cluster)
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
    asked = reader.update()
    while not any("reader -> ReadyToWrite" in line for line in cluster.log):
        cluster.do(cluster.choices()[0])
    reader.worker.disconnect()  # Write is on its way
    reader.worker.connect()
    while not any("reader <- Registered" in line for line in cluster.log[-2:]):
        cluster.do(cluster.choices()[0])
    reader.cancel("enough")
    cluster.run()
    assert isinstance(asked.error, StateError)
    assert reader.member.version == 1
    cluster.check_agreement()
    got = other.replicate(1)
    cluster.run()
    assert got.number == 1
