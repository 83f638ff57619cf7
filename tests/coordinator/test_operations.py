"""Groups (R6): ranks that are restarted in the midst of a call, calls that differ, doubts across a
coordinator's restart.

Covers `operations` and `decisions`.
"""

from __future__ import annotations

import pytest

from tensorhub.errors import GroupAborted, OperationTimeout
from tensorhub.testing import CallRecord, Choice, SimHandle, StepwiseCluster
from tensorhub.types import HandleState
from tests.coordinator.test_resumption import publish, published


def holding_one(world_size: int) -> tuple[StepwiseCluster, list[SimHandle]]:
    """Readers that hold version 1, of which there is a version 2."""
    cluster, trainers = published(world_size)
    readers = cluster.group("reader", world_size)
    cluster.run()
    for handle in readers:
        handle.replicate()
    cluster.run()
    publish(cluster, trainers, [2])
    return cluster, readers


def in_phase(handle: SimHandle, phase: str) -> bool:
    running = handle.member.running
    return running is not None and running.phase.value == phase


def replace(cluster: StepwiseCluster, handle: SimHandle) -> SimHandle:
    """Its process dies, and another one takes its rank's place within its lease."""
    handle.worker.crash()
    while cluster.ending:
        cluster.do(Choice("notice", str(cluster.ending[0])))
    shard = handle.shard
    return cluster.handle("spare", shard.group, shard.rank, shard.world_size)


def end_well(cluster: StepwiseCluster, ranks: list[SimHandle], number: int) -> None:
    calls = [handle.update() for handle in ranks]
    cluster.run()
    assert [call.number for call in calls] == [number] * len(ranks)
    cluster.check_agreement()


@pytest.mark.parametrize(
    "phase", ["asked", "manifest", "hook", "held", "fencing", "pulling", "voted"]
)
def test_a_rank_that_is_restarted_in_the_midst_of_an_update_ends_it_for_the_others(
    phase: str,
) -> None:
    cluster, ranks = holding_one(3)
    first, _, third = ranks
    if phase == "manifest":
        third.worker.manifests.clear()
    if phase == "fencing":
        third.hold_access()
    calls = [handle.update(hold=phase in ("manifest", "hook", "held")) for handle in ranks]
    others = (
        {Choice("hook", handle.name) for handle in (first,)} if phase in ("hook", "held") else set()
    )
    slow = Choice("read", first.name)  # so that nothing is decided yet
    while not in_phase(third, phase):
        cluster.do(
            next(choice for choice in cluster.choices() if choice != slow and choice not in others)
        )
    spare = replace(cluster, third)
    cluster.run()
    for call in calls[:2]:
        with pytest.raises(GroupAborted, match="rank 2 was replaced by worker 'spare'") as caught:
            _ = call.number
        assert caught.value.retryable
        torn = call.handle.member.state is HandleState.TORN
        assert caught.value.memory == ("torn" if torn else "intact")
        assert torn == (phase in ("fencing", "pulling", "voted"))
    end_well(cluster, [*ranks[:2], spare], 2)


def test_a_rank_that_is_restarted_before_it_has_called_ends_the_call_of_those_that_have() -> None:
    cluster, ranks = holding_one(3)
    calls = [handle.update() for handle in ranks[:2]]
    cluster.run()
    spare = replace(cluster, ranks[2])
    cluster.run()
    for call in calls:
        assert isinstance(call.error, GroupAborted)
        assert call.error.memory == "intact"
    end_well(cluster, [*ranks[:2], spare], 2)


def test_a_rank_that_is_restarted_in_the_midst_of_a_publish_leaves_the_number_unused() -> None:
    cluster = StepwiseCluster()
    ranks = cluster.group("trainer", 3)
    cluster.run()
    calls = [handle.publish(1) for handle in ranks[:2]]
    cluster.run()
    spare = replace(cluster, ranks[2])
    cluster.run()
    assert [type(call.error) for call in calls] == [GroupAborted, GroupAborted]
    again = [handle.publish(1) for handle in (*ranks[:2], spare)]
    cluster.run()
    assert [call.number for call in again] == [1, 1, 1]


@pytest.mark.parametrize(
    ("one", "two"),
    [
        ("publish(2)", "publish(3)"),
        ("publish(2)", "update('latest')"),
        ("update('latest')", "update('latest-1')"),
        ("update('latest')", "update(1)"),
        ("update('latest')", "update('latest', at_least=2)"),
    ],
)
def test_differing_calls_end_on_all_ranks_at_once_and_are_both_named(one: str, two: str) -> None:
    cluster = StepwiseCluster()
    ranks = cluster.group("trainer", 2)
    cluster.run()
    calls: list[CallRecord] = [
        _call(handle, what) for handle, what in zip(ranks, (one, two), strict=True)
    ]
    cluster.run()
    for call in calls:
        assert isinstance(call.error, GroupAborted)
        assert f"{one} on rank 0, {two} on rank 1" in str(call.error)
        assert call.error.causes == {0: f"called {one}", 1: f"called {two}"}
        assert (call.error.retryable, call.error.memory) == (False, "intact")
    again = [handle.publish(1) for handle in ranks]
    cluster.run()
    assert [call.number for call in again] == [1, 1]


def test_ranks_that_are_one_call_apart_meet_also_where_a_rank_ends_its_call_itself() -> None:
    """Its deadline comes first where the coordinator's clock is slow. The other rank, which calls
    late, joins it in the next call, as after a deadline of the coordinator.
    """
    cluster = StepwiseCluster()
    cluster.clock_rate = 0.5
    ranks = cluster.group("trainer", 2)
    cluster.run()
    alone = ranks[0].publish(1, 5.0)
    cluster.advance(8.0)
    assert isinstance(alone.error, OperationTimeout)
    together = [rank.publish(1, 5.0) for rank in ranks]
    cluster.run()
    assert [each.number for each in together] == [1, 1]


def _call(handle: SimHandle, what: str) -> CallRecord:
    name, _, arguments = what.removesuffix(")").partition("(")
    if name == "publish":
        return handle.publish(int(arguments))
    selector, _, at_least = arguments.partition(", at_least=")
    number = int(at_least) if at_least else None
    return handle.update(selector.strip("'") if "'" in selector else int(selector), at_least=number)


@pytest.mark.heavy
def test_a_group_of_eight_in_every_order_of_its_ranks_calls() -> None:
    """Each rank is the last one once; each barrier changes nothing; each version comes to all."""
    cluster, world_size = StepwiseCluster(), 8
    trainers, readers = cluster.group("trainer", world_size), cluster.group("reader", world_size)
    cluster.run()
    for number in range(1, world_size + 1):
        order = [*range(number, world_size), *range(number)]
        if number > 1:
            for handle in trainers:
                handle.unpublish()
            cluster.run()
        promises = [trainers[rank].publish(number) for rank in order]
        fills = [readers[rank].update(at_least=number) for rank in reversed(order)]
        cluster.run()
        assert [call.number for call in promises] == [number] * world_size
        assert [call.number for call in fills] == [number] * world_size
        barrier = [readers[rank].update() for rank in order]
        cluster.run()
        assert [call.changed for call in barrier] == [False] * world_size
        assert [handle.cells for handle in readers] == [handle.cells for handle in trainers]
    cluster.check_agreement()


def test_two_groups_of_one_model_in_one_process_do_not_mix() -> None:
    """As double buffering needs them: each has its own ranks, keys and versions."""
    cluster = StepwiseCluster()
    workers = [cluster.worker(f"w{rank}") for rank in range(2)]
    front = [worker.register("front", rank, 2) for rank, worker in enumerate(workers)]
    back = [worker.register("back", rank, 2) for rank, worker in enumerate(workers)]
    cluster.run()
    for handle in front:
        handle.publish(1)
    cluster.run()
    calls = [back[0].replicate(), front[0].update(at_least=2), back[1].replicate()]
    cluster.run()
    assert [call.done for call in calls] == [True, False, True]
    assert [handle.member.version for handle in back] == [1, 1]
    front[0].cancel()
    front[1].update(at_least=2)
    cluster.run()
    for handle in front:
        handle.unpublish()
    cluster.run()
    again = [handle.publish(2) for handle in front]
    cluster.run()
    assert [call.number for call in again] == [2, 2]
    calls = [handle.update() for handle in back]
    cluster.run()
    assert [call.number for call in calls] == [2, 2]
    cluster.check_agreement()
