"""Checks from outside, one by one: each finds, in the shortest story, what it is for."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace

import pytest

from tensorhub.coordinator import Received
from tensorhub.coordinator.entities import Operation
from tensorhub.coordinator.operations import Deadlines, Operations
from tensorhub.coordinator.readers import Readers
from tensorhub.coordinator.refusals import LEFT
from tensorhub.coordinator.states import OperationState, WorkerState
from tensorhub.errors import IntegrityError, OperationTimeout, StateError, VersionUnavailable
from tensorhub.machine import InvariantBroken
from tensorhub.messages import LeaveRequest, Pin, Watch
from tensorhub.testing import GuaranteeBroken, SimHandle, SimulatedCluster, StepwiseCluster
from tensorhub.testing.drivers.healing import Healing
from tensorhub.testing.drivers.stepwise import Choice
from tensorhub.testing.drivers.users import UserGroup
from tensorhub.testing.sim.handle import CallRecord
from tensorhub.testing.sim.layouts import Layout
from tensorhub.testing.sim.memory import CHUNKS, MANIFEST, make_manifest
from tensorhub.testing.sim.terms import Deposed
from tensorhub.testing.sim.worker import SimWorker
from tensorhub.types import HandleState
from tests.testing.bugs import deposed, inside, outside, replaced


def published() -> tuple[StepwiseCluster, SimHandle, SimHandle]:
    cluster = StepwiseCluster()
    trainer, reader = cluster.handle("trainer"), cluster.handle("reader")
    cluster.run()
    trainer.publish(1)
    cluster.run()
    return cluster, trainer, reader


def test_a_lost_incarnation_that_is_welcomed_again_is_noticed() -> None:
    cluster, trainer, _ = published()
    trainer.worker.disconnect()
    cluster.advance(11.0)
    trainer.worker.connect()
    with (
        outside.lost_incarnation_comes_back(),
        pytest.raises(GuaranteeBroken, match=r"incarnations: trainer.1 is welcomed"),
    ):
        cluster.run()


def test_what_is_heeded_over_a_former_connection_is_noticed() -> None:
    cluster, trainer, _ = published()
    former = trainer.worker.link
    assert former is not None
    with outside.former_connection_heard():
        trainer.worker.disconnect()
        trainer.worker.connect()
        # it joins; nobody has noticed the former connection's end
        cluster.do(Choice("up", "trainer"))
        generation = trainer.member.content.generation if trainer.member.content is not None else 0
        late = LeaveRequest(1, trainer.id, generation, 1.0, abandon=False, closes=False)
        with pytest.raises(
            GuaranteeBroken, match=r"incarnations: .*LeaveGranted.* follows of what came too late"
        ):
            cluster.step(Received(former.session, late))


def test_a_question_over_a_former_connection_may_be_answered_there() -> None:
    cluster, trainer, _ = published()
    former = trainer.worker.link
    assert former is not None
    trainer.worker.disconnect()
    trainer.worker.connect()
    cluster.do(Choice("up", "trainer"))
    cluster.step(Received(former.session, Watch("actor")))
    cluster.step(Received(former.session, Pin(1, "pin", "actor", 1)))  # costs that connection
    cluster.run()
    assert not cluster.coordinator.cluster.models["actor"].pins


def test_who_asks_for_available_need_not_wait_for_a_group_of_fewer_ranks_than_have_published() -> (
    None
):
    """After a restart. All ranks of the pair are back, and hold nothing."""
    cluster = StepwiseCluster()
    cluster.chunks = rows = CHUNKS + 3

    def group(name: str, ranks: int) -> list[SimHandle]:
        return [
            cluster.worker(f"{name}{k}").register(name, k, ranks, cut=Layout(rows, ranks))
            for k in range(ranks)
        ]

    trainers, pair, keepers, (reader,) = (
        group("trainer", 3),
        group("pair", 2),
        group("keeper", 3),
        group("reader", 1),
    )

    def all_call(call: Callable[[SimHandle], object], handles: Iterable[SimHandle]) -> None:
        cluster.run()
        for handle in handles:
            call(handle)
        cluster.run()

    all_call(lambda handle: handle.publish(1), trainers)
    all_call(SimHandle.replicate, keepers)
    all_call(SimHandle.unpublish, trainers)
    all_call(lambda handle: handle.publish(2), trainers)
    all_call(SimHandle.replicate, pair)
    all_call(SimHandle.unpublish, [*trainers, *pair])
    cluster.restart()
    cluster.run()
    for worker in cluster.workers.values():
        worker.connect()
    cluster.run()
    asked = reader.replicate("available")
    cluster.run()
    assert asked.number == 1
    assert cluster.coordinator.cluster.is_recovering


def test_a_reader_that_does_not_wait_for_a_crashed_source_is_noticed() -> None:
    cluster, trainer, reader = published()
    reader.replicate(1, timeout_s=60.0)
    cluster.run(until=lambda: reader.pull is not None)
    trainer.worker.crash()
    with (
        outside.crash_taken_for_a_leave(),
        pytest.raises(GuaranteeBroken, match="selectors: nobody has left"),
    ):
        cluster.advance(15.0)


@pytest.mark.parametrize("timeout_s", [0.0, 5.0])
def test_a_reader_whose_source_leaves_or_tries_to_need_not_wait(timeout_s: float) -> None:
    cluster, trainer, reader = published()
    asked = reader.replicate(timeout_s=60.0)
    cluster.run(until=lambda: reader.pull is not None)
    trainer.unpublish(timeout_s)
    cluster.advance(15.0)
    assert asked.has_ended()


def test_a_reader_need_not_wait_for_what_its_source_was_told_to_overwrite_and_has_kept() -> None:
    """The source's call was cancelled while the coordinator took it: what it holds is as before."""
    cluster, trainer, reader = published()
    other = cluster.handle("other")
    cluster.run()
    other.publish(2)
    cluster.run()
    core = cluster.coordinator.cluster
    core.options = replace(core.options, drain_grace_s=0.0)
    asked = reader.replicate(1, timeout_s=60.0)
    cluster.run(until=lambda: reader.pull is not None)
    updating, link = trainer.update("latest"), trainer.worker.link
    assert link is not None
    while not link.up:
        cluster.do(Choice("do", trainer.name))
    cluster.do(Choice("up", trainer.worker.name))
    trainer.cancel()
    cluster.advance(15.0)
    assert isinstance(asked.error, VersionUnavailable)
    assert updating.error is not None
    assert trainer.member.state is HandleState.READY


def test_a_reader_need_not_wait_for_what_has_closed_before_the_coordinator_reads_that_it_wants_to() -> (
    None
):
    cluster, trainer, reader = published()
    former = trainer.worker.link
    assert former is not None
    trainer.close(abandon=True)
    while not any(isinstance(said, LeaveRequest) for said in former.up):
        cluster.do(Choice("do", trainer.name))
    trainer.worker.disconnect()
    while trainer in cluster.live_handles():
        cluster.do(Choice("do", trainer.name))
    cluster.advance(1.0, run=False)
    # what is held no more, which only the coordinator does not know
    asked = reader.replicate(1, timeout_s=60.0)
    while reader.pull is None:
        cluster.do(next(choice for choice in cluster.choices() if choice.kind != "notice"))
    cluster.step(Received(former.session, former.up.popleft()))
    cluster.run()
    assert LEFT in str(asked.error)


def test_a_shard_leaves_with_its_replica_although_its_own_rank_is_dead() -> None:
    """R12: the other shard has a source meanwhile, which is lost later."""
    cluster = StepwiseCluster(host_bytes=MANIFEST.nbytes)
    one, dead = cluster.group("trainer", 2)
    source, reader = cluster.worker("source"), cluster.worker("reader")
    cluster.run()
    for handle in (one, dead):
        handle.publish(1)
    cluster.run()
    assert one.member.content is not None
    info = one.member.content.version
    source.copies.seed(info, 0, 60.0)
    cluster.run()
    dead.worker.crash()
    one.unpublish()
    cluster.run()
    source.crash()
    cluster.advance(6.0)
    asked = reader.copies.seed(info, 0, 60.0, selector=1)
    cluster.run()
    cluster.advance(6.0)
    assert LEFT in str(asked.error)


def test_a_version_that_is_held_again_and_counts_as_left_is_noticed() -> None:
    cluster, trainer, reader = published()
    reader.replicate()
    cluster.run()
    reader.worker.disconnect()
    cluster.advance(11.0)  # lost
    trainer.unpublish()
    cluster.run()
    reader.worker.connect()
    cluster.run()  # it is dismissed, and comes back as another incarnation
    reader.worker.connect()
    with (
        outside.abandoned_for_ever(),
        pytest.raises(InvariantBroken, match="a layout with sources is not abandoned"),
    ):
        cluster.run()


def test_a_holder_whose_bytes_have_changed_and_that_is_counted_on_is_noticed() -> None:
    cluster, trainer, _ = published()
    cluster.check_agreement()
    content = trainer.member.content
    assert content is not None
    content.spoiled = True
    with pytest.raises(GuaranteeBroken, match="holds generation None, the coordinator thinks"):
        cluster.check_agreement()


def test_a_reader_that_is_blamed_for_one_sources_bytes_is_noticed() -> None:
    """R8: two sources that are unchanged are needed for that."""
    cluster = StepwiseCluster(manifest=make_manifest(CHUNKS, "xxh3-64"))
    trainer, other, reader = (
        cluster.handle("trainer"),
        cluster.handle("other"),
        cluster.handle("reader"),
    )
    cluster.run()
    trainer.publish(1)
    cluster.run()
    other.replicate()
    cluster.run()
    reader.replicate()
    cluster.run(until=lambda: reader.pull is not None and reader.pull.lanes)
    assert reader.pull is not None
    with inside.cleared_at_once():
        next(iter(reader.pull.lanes.values())).end("corrupt", 0)
        with pytest.raises(GuaranteeBroken, match=r"digests: .* is blamed for"):
            cluster.run()


def test_by_the_coordinators_clock_a_reader_may_be_blamed_for_one_sources_bytes() -> None:
    """R8: once its time is over there, although its caller would wait longer."""
    cluster = StepwiseCluster(manifest=make_manifest(CHUNKS, "xxh3-64"))
    cluster.clock_rate = 1.25
    trainer, reader = cluster.handle("trainer"), cluster.handle("reader")
    cluster.run()
    trainer.publish(1)
    cluster.run()
    record = reader.replicate(timeout_s=10.0)
    cluster.run(until=lambda: reader.pull is not None and reader.pull.lanes)
    assert reader.pull is not None
    next(iter(reader.pull.lanes.values())).end("corrupt", 0)
    cluster.run("read")  # the trainer's bytes are unchanged
    trainer.worker.crash()
    cluster.advance(9.0)
    assert isinstance(record.error, IntegrityError)
    assert record.until > cluster.now


def one_published(world_size: int) -> tuple[SimulatedCluster, UserGroup, UserGroup]:
    """Without chance users: a group of two has published, and another, of `world_size`, holds
    nothing.
    """
    cluster = SimulatedCluster(1, faults=())
    for name, size in (("writers", 2), ("readers", world_size)):
        ranks = [
            cluster.handle(f"{name}{rank}", name, rank, world_size=size) for rank in range(size)
        ]
        cluster.users.groups.append(UserGroup(name, size, spot=False, ranks=ranks))
    writers, readers = cluster.users.groups
    assert cluster.run_until(
        lambda: all(h.registered for group in cluster.users.groups for h in group.ranks), 10.0
    )
    published = [handle.publish(1) for handle in writers.ranks]
    assert cluster.run_until(lambda: all(asked.done for asked in published), 10.0)
    cluster.users.next_version = 2
    return cluster, writers, readers


def test_a_leader_that_wakes_up_changes_nothing_and_steps_down() -> None:
    cluster, _, readers = one_published(2)
    former = cluster.term
    times = {"lease_s": 1.0, "stops_s": 4.0, "believes_s": 0.0}
    assert cluster.process.split(**times)
    assert cluster.run_until(lambda: cluster.term is not former, 2.0)
    assert cluster.former is former
    assert not cluster.process.split(**times)  # one that leads no more at a time
    asked = [handle.replicate("latest") for handle in readers.ranks]
    assert cluster.run_until(lambda: all(each.done for each in asked), 60.0)
    assert [each.number for each in asked] == [1, 1]
    assert cluster.run_until(lambda: cluster.former is None, 5.0)
    assert not former.party.alive
    with pytest.raises(Deposed):
        cluster.keep(cluster.store[-1], former)
    with (
        deposed.deposed_leader_writes(),
        pytest.raises(GuaranteeBroken, match=r"incarnations: .* has written"),
    ):
        cluster.keep(cluster.store[-1], former)


def test_a_write_that_is_not_durable_and_counts_as_written_is_noticed() -> None:
    cluster, trainer, _ = published()
    trainer.unpublish()
    cluster.run()
    trainer.publish(2)
    cluster.run(until=lambda: cluster.unstored)
    persist = next(iter(cluster.unstored.values()))
    with pytest.raises(GuaranteeBroken, match="which it is not"):
        cluster.persisted(persist, cluster.term)


def two_that_begin() -> tuple[SimulatedCluster, Healing, UserGroup]:
    """Both ranks of another group than the publishers are just calling, with ample time."""
    cluster, _, readers = one_published(2)
    healing = cluster.healing()
    healing.ask()
    return cluster, healing, readers


def two_that_fill() -> tuple[SimulatedCluster, Healing, UserGroup]:
    """The same, and the coordinator has heard both calls."""
    cluster, healing, readers = two_that_begin()
    operations = cluster.coordinator.cluster.operations
    while not any(o.gathered and o.group.name == "readers" for o in operations()):
        cluster.take_event()
    return cluster, healing, readers


def test_a_rank_need_not_end_while_it_waits_for_one_of_whose_death_no_coordinator_knows() -> None:
    cluster, healing, readers = two_that_fill()
    cluster.process.crash(kept=True, down_s=1.0)
    readers.ranks[1].worker.crash()
    survivor = readers.ranks[0].last_call
    cluster.end_faults()
    healing.run()
    assert survivor is not None
    assert survivor.done
    assert cluster.now < survivor.until


def test_a_rank_that_waits_for_one_whose_call_the_coordinator_has_heard_is_noticed() -> None:
    cluster, healing, readers = two_that_fill()
    readers.ranks[1].worker.crash()
    cluster.end_faults()
    with (
        replaced(Operations, "member_gone", lambda *_: None),
        pytest.raises(GuaranteeBroken, match="still fills, and could"),
    ):
        healing.run()


def test_a_rank_may_end_at_the_deadline_of_one_that_has_hardly_any_time() -> None:
    cluster, healing, readers = two_that_begin()
    cluster.process.crash(kept=True, down_s=1.0)
    readers.ranks[1].worker.crash()
    cluster.users.replace(readers, 1)
    patient = readers.ranks[0].last_call
    assert patient is not None
    cluster.run_until(lambda: False, 10.0)  # all have come back to the coordinator
    assert [operation.key for operation in cluster.coordinator.cluster.operations()] == [
        patient.key
    ]
    readers.ranks[1].replicate("latest", 0.0)
    cluster.end_faults()
    healing.run()
    assert isinstance(patient.error, OperationTimeout)


def test_ranks_that_end_before_their_deadline_are_noticed() -> None:
    cluster, healing, _ = two_that_fill()
    cluster.end_faults()

    def at_once(deadlines: Deadlines, operation: Operation) -> None:
        deadlines._cluster.timers.set("operation", str(operation.key), deadlines._cluster.now)

    with (
        replaced(Deadlines, "set", at_once),
        pytest.raises(GuaranteeBroken, match=r"readers0.* has waited too long"),
    ):
        healing.run()


def fetching(
    cluster: SimulatedCluster, healing: Healing, reader: SimWorker
) -> tuple[CallRecord, Operation]:
    """This worker has asked for the first shard only, with ample time; the coordinator has bound
    that fetch.
    """
    healing.ask()
    fetch = reader.handles[-1].last_call
    assert fetch is not None
    while True:
        for operation in cluster.coordinator.cluster.operations():
            if operation.key == fetch.key and operation.state is OperationState.RUNNING:
                return fetch, operation
        cluster.take_event()


def test_a_fetch_that_has_not_begun_need_not_end_while_another_shard_is_lost() -> None:
    cluster, writers, readers = one_published(1)
    silent, dead = (handle.worker for handle in writers.ranks)
    silent.disconnect()
    silent.stopped_until = cluster.now + 3 * cluster.options.lease_s
    dead.crash()
    live = cluster.coordinator.cluster.workers
    assert cluster.run_until(
        lambda: sum(w.state is WorkerState.SUSPECT for w in live.values()) == 2, 1.0
    )
    healing = cluster.healing()
    fetch, operation = fetching(cluster, healing, readers.ranks[0].worker)
    assert not operation.writing  # it has no source yet, and then for ever half of the version only
    cluster.end_faults()
    healing.run()
    assert fetch.done
    assert fetch.version is None
    assert cluster.now < fetch.until


def test_a_fetch_that_has_begun_and_does_not_end_with_its_own_shard_is_noticed() -> None:
    cluster, writers, readers = one_published(1)
    healing = cluster.healing()
    fetch, operation = fetching(cluster, healing, readers.ranks[0].worker)
    assert operation.writing
    while fetch.handle.pull is None or not fetch.handle.pull.lanes:
        cluster.take_event()
    next(iter(fetch.handle.pull.lanes.values())).end("lost")
    writers.ranks[1].worker.crash()
    cluster.end_faults()
    with (
        replaced(Readers, "assign_sources", lambda *_: []),
        pytest.raises(GuaranteeBroken, match=r"readers0:fetch.* still fills, and could"),
    ):
        healing.run()


def handed_to_a_copy() -> tuple[StepwiseCluster, SimHandle]:
    """The only holder of a retained version is a reader's host copy."""
    cluster = StepwiseCluster()
    trainer = cluster.handle("trainer")
    cluster.host_bytes = MANIFEST.nbytes
    reader = cluster.handle("reader")
    cluster.run()
    trainer.worker.asks.retain(1)
    trainer.publish(1)
    cluster.run()
    reader.prefetch()
    cluster.run()
    trainer.unpublish()
    cluster.run()
    assert [h for h in cluster.live_handles() if h.member.version == 1] == [reader.copy]
    return cluster, reader


def closes(cluster: StepwiseCluster, handle: SimHandle, *, abandon: bool = False) -> None:
    """Its host copy, if that goes along, has gone before the coordinator hears so."""
    closed = handle.close(abandon=abandon)
    cluster.run(until=closed.has_ended)
    assert closed.error is None
    cluster.run(("up", handle.worker.name))


def test_a_host_copy_may_go_with_a_handle_that_is_abandoned() -> None:
    cluster, reader = handed_to_a_copy()
    closes(cluster, reader, abandon=True)
    assert not any(handle.member.version for handle in cluster.live_handles())


def test_a_host_copy_that_goes_with_its_handle_without_a_leave_is_noticed() -> None:
    cluster, reader = handed_to_a_copy()
    with (
        inside.copy_has_no_leave(),
        pytest.raises(GuaranteeBroken, match=r"retention: .*reader/host.* has left"),
    ):
        closes(cluster, reader)


def test_a_rank_that_counts_as_a_vote_and_has_not_heard_so_may_be_abandoned() -> None:
    """All ranks hold what they prefetch, and the store is slow (G4, R6)."""
    cluster = StepwiseCluster(host_bytes=2 * MANIFEST.nbytes)
    one, other = cluster.group("g", 2)
    cluster.run()
    for handle in (one, other):
        handle.publish(1)
    cluster.run()
    kept, lost = one.prefetch(), other.prefetch()
    cluster.run("store")
    assert cluster.unstored
    other.close(abandon=True)
    cluster.run("store")
    assert isinstance(lost.error, StateError)
    cluster.run()
    assert kept.number == 1
