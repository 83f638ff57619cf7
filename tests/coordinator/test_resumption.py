"""A fill that is under way when its coordinator restarts goes on, and reads nothing twice (G8, R6).

A story of several modules: `fills`, `operations`, `testimonies`, and `worker.filling`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import pytest

from tensorhub.errors import GroupAborted, OperationTimeout, StateError, VersionUnavailable
from tensorhub.testing import MANIFEST, CallRecord, Choice, SimHandle, StepwiseCluster
from tensorhub.types import HandleState


def published(world_size: int = 1, versions: int = 1) -> tuple[StepwiseCluster, list[SimHandle]]:
    cluster = StepwiseCluster()
    trainers = cluster.group("trainer", world_size)
    cluster.run()
    publish(cluster, trainers, range(1, versions + 1))
    return cluster, trainers


def publish(cluster: StepwiseCluster, ranks: list[SimHandle], numbers: Iterable[int]) -> None:
    for number in numbers:
        for handle in ranks:
            if handle.member.state is HandleState.READY:
                handle.unpublish()
        cluster.run()
        for handle in ranks:
            handle.publish(number)
        cluster.run()


def until(
    cluster: StepwiseCluster,
    reached: Callable[[], bool],
    *,
    kinds: str = "up down do store hook read",
    but: Choice | None = None,
) -> None:
    """Let things of these kinds happen until it is so."""
    while not reached():
        cluster.do(
            next(
                choice
                for choice in cluster.choices()
                if choice.kind in kinds.split() and choice != but
            )
        )


def is_reading(handle: SimHandle) -> bool:
    return handle.pull is not None and any(lane.access for lane in handle.pull.lanes.values())


def is_half_read(handle: SimHandle) -> bool:
    return handle.pull is not None and not is_reading(handle) and len(handle.pull.missing) == 1


def read_half(cluster: StepwiseCluster, *handles: SimHandle) -> None:
    """Let each of them read one of its two chunks."""
    while not all(map(is_half_read, handles)):
        waiting = [Choice("read", handle.name) for handle in handles if is_half_read(handle)]
        cluster.do(next(choice for choice in cluster.choices() if choice not in waiting))


def restart(cluster: StepwiseCluster, *, but: Iterable[SimHandle] = (), kept: bool = False) -> None:
    cluster.restart(kept=kept)
    away = [handle.worker for handle in but]
    for worker in cluster.workers.values():
        if worker.alive and worker.link is None and worker not in away:
            worker.connect()


def reads(cluster: StepwiseCluster, *handles: SimHandle) -> list[int]:
    """How often each of them has begun a pull. A pull never reads a chunk twice: its `missing` only
    shrinks.
    """
    opened = [[line for line in cluster.log if f"{h.worker.name} -> Fill" in line] for h in handles]
    return [len({line.partition("generation=")[2].split()[0] for line in each}) for each in opened]


@pytest.mark.parametrize("times", [1, 3])
@pytest.mark.parametrize("ranks", [1, 2])
def test_a_fill_in_mid_read_goes_on_across_restarts(ranks: int, times: int) -> None:
    cluster, _ = published(ranks)
    readers = cluster.group("reader", ranks)
    cluster.run()
    calls = [handle.replicate() for handle in readers]
    read_half(cluster, *readers)
    pulls = [handle.pull for handle in readers]
    for _ in range(times):
        restart(cluster)
        cluster.run("read")
    assert [handle.pull for handle in readers] == pulls
    assert all(map(is_half_read, readers))
    cluster.run()
    assert [call.number for call in calls] == [1] * ranks
    assert reads(cluster, *readers) == [1] * ranks
    cluster.check_agreement()


def test_it_reads_on_while_the_coordinator_is_away_and_votes_when_it_is_back() -> None:
    cluster, _ = published()
    reader = cluster.handle("reader")
    cluster.run()
    asked = reader.replicate()
    read_half(cluster, reader)
    cluster.restart()
    cluster.run()
    assert reader.pull is not None
    assert (reader.pull.missing, asked.done) == (set(), False)
    restart(cluster)
    cluster.run()
    assert asked.number == 1
    cluster.check_agreement()


def test_a_source_that_is_gone_meanwhile_is_replaced() -> None:
    cluster, (trainer,) = published()
    other, reader = cluster.handle("other"), cluster.handle("reader")
    cluster.run()
    other.replicate()
    cluster.run()
    asked = reader.replicate()
    read_half(cluster, reader)
    assert reader.pull is not None
    (grant,) = reader.pull.grants.values()
    source = cluster.find(grant)
    assert source is not None
    cluster.restart()
    source.worker.crash()
    restart(cluster)
    cluster.run()
    assert asked.number == 1
    assert reads(cluster, reader) == [1]
    assert next(h for h in (trainer, other) if h.worker.alive).member.version == 1


def test_a_chain_of_readers_goes_on() -> None:
    """One reads from the trainer, the next from what that one has verified."""
    cluster, _ = published()
    first, second = cluster.handle("first"), cluster.handle("second")
    cluster.run()
    calls = [first.replicate()]
    read_half(cluster, first)
    calls.append(second.replicate())
    cluster.run(Choice("read", first.name), Choice("read", second.name))
    restart(cluster)
    cluster.run()
    assert [call.number for call in calls] == [1, 1]
    assert reads(cluster, first, second) == [1, 1]
    cluster.check_agreement()


@pytest.mark.parametrize("world_size", [1, 2])
def test_a_vote_without_a_record_counts_again(world_size: int) -> None:
    """The last holder but one died with the coordinator: what has been verified everywhere needs no
    source.
    """
    cluster, trainers = published(world_size)
    readers = cluster.group("reader", world_size)
    cluster.run()
    calls = [handle.replicate() for handle in readers]
    until(
        cluster,
        lambda: all(h.member._memory.voted is not None for h in readers),
        kinds="up down do read",
    )
    for handle in trainers:
        handle.worker.crash()
    restart(cluster)
    cluster.run()
    assert [call.number for call in calls] == [1] * world_size
    cluster.check_agreement()
    late = cluster.group("late", world_size)
    cluster.run()
    more = [handle.replicate() for handle in late]
    cluster.run()
    assert [call.number for call in more] == [1] * world_size


@pytest.mark.parametrize("phase", ["asked", "manifest", "hook", "held"])
def test_what_nobody_had_begun_to_write_is_called_again_and_its_hook_once(phase: str) -> None:
    cluster, (trainer,) = published()
    reader = cluster.handle("reader")
    cluster.run()
    reader.replicate()
    cluster.run()
    publish(cluster, [trainer], [2])
    asked = reader.update(hold=True)
    if phase in ("asked", "manifest"):
        reader.worker.manifests.clear()
    until(
        cluster,
        lambda: reader.member.running is not None and reader.member.running.phase.value == phase,
    )
    restart(cluster)
    cluster.run()
    assert (asked.number, reader.hook_calls, reader.member.version) == (2, 1, 2)
    cluster.check_agreement()


def test_a_rank_that_gave_up_meanwhile_and_calls_again_does_not_get_the_older_version() -> None:
    """G3: its new call began after 2 was published, and must not be joined to the others' fill of
    1.
    """
    cluster, (trainer0, trainer1) = published(2)
    first, second = cluster.group("reader", 2)
    others = cluster.group("other", 2)
    cluster.run()
    asked = first.replicate(timeout_s=500)
    left = second.replicate()
    read_half(cluster, first, second)
    for handle in (first, second):
        handle.worker.disconnect()
    second.cancel()
    cluster.advance(5)
    assert isinstance(left.error, StateError)
    for handle in others:
        handle.publish(2)
    cluster.run("read")
    restart(cluster)
    again = second.replicate()
    cluster.run()
    assert isinstance(asked.error, GroupAborted)
    assert isinstance(again.error, GroupAborted)
    calls = [first.replicate(), second.replicate()]
    cluster.run()
    assert [call.number for call in calls] == [2, 2]
    assert [trainer0.member.version, trainer1.member.version] == [1, 1]


def test_ranks_that_had_begun_with_different_versions_do_not_go_on_together() -> None:
    """No coordinator does that to them; if it were so, they must not commit."""
    cluster, trainers = published(2)
    others = cluster.group("other", 2)
    cluster.run()
    for handle in others:
        handle.publish(2)
    cluster.run()
    readers = cluster.group("reader", 2)
    cluster.run()
    calls: list[CallRecord] = []
    first = [handle.replicate(1) for handle in readers]
    read_half(cluster, *readers)
    content = readers[1].member.content
    assert content is not None
    two = cluster.coordinator.cluster.models["actor"].versions[2]
    cluster.restart()
    readers[1].member.running.binding.version = two.info  # type: ignore[union-attr]
    restart(cluster)
    cluster.run("read")
    calls += first
    cluster.run()
    for call in calls:
        with pytest.raises(GroupAborted, match="with different versions on the ranks"):
            _ = call.number
    assert all(handle.member.state is HandleState.TORN for handle in readers)
    assert trainers[0].member.version == 1


def test_content_that_was_rolled_back_meanwhile_is_given_up() -> None:
    cluster, (trainer,) = published(1, 2)
    reader = cluster.handle("reader")
    cluster.run()
    asked = reader.replicate(2)
    read_half(cluster, reader)
    reader.worker.disconnect()
    trainer.worker.asks.rollback(1)
    cluster.run("read")
    restart(cluster)
    cluster.run()
    with pytest.raises(
        VersionUnavailable, match="is not known any more: it was rolled back"
    ) as caught:
        _ = asked.number
    assert (caught.value.memory, reader.member.state) == ("torn", HandleState.TORN)


def test_the_deadline_is_the_callers_own() -> None:
    cluster, _ = published()
    reader = cluster.handle("reader")
    cluster.run()
    asked = reader.replicate(timeout_s=20)
    read_half(cluster, reader)
    for _ in range(3):
        cluster.advance(5, run=False)
        restart(cluster)
        cluster.run("read")
    cluster.advance(4.9, run=False)
    cluster.run("read")
    assert not asked.done
    cluster.advance(0.2, run=False)
    cluster.run("read")
    assert isinstance(asked.error, OperationTimeout)
    assert asked.error.memory == "torn"


def test_a_source_that_does_not_come_back_is_waited_for_until_the_deadline() -> None:
    cluster, (trainer,) = published()
    reader = cluster.handle("reader")
    cluster.run()
    asked = reader.replicate(timeout_s=30)
    read_half(cluster, reader)
    trainer.worker.crash()
    restart(cluster)
    cluster.advance(29)
    assert not asked.done
    cluster.advance(2)
    with pytest.raises(VersionUnavailable, match="version 1 has lost its last source"):
        _ = asked.number


def test_a_version_that_its_holder_has_overwritten_is_not_waited_for() -> None:
    """The trainer is back first, and publishes the next one while the reader is away."""
    cluster, (trainer,) = published()
    reader = cluster.handle("reader")
    cluster.run()
    asked = reader.update()
    read_half(cluster, reader)
    restart(cluster, but=[reader])
    cluster.run("read")
    trainer.unpublish()
    cluster.run("read")
    trainer.publish(2)
    cluster.run("read")
    reader.worker.connect()
    cluster.run()
    assert asked.number == 2  # no time has passed
    cluster.check_agreement()


def test_a_version_that_was_bound_and_not_begun_is_not_waited_for_either() -> None:
    cluster, (trainer,) = published()
    reader = cluster.handle("reader")
    cluster.run()
    asked = reader.update(hold=True)
    until(cluster, lambda: bool(reader.hooks))
    restart(cluster, but=[reader])
    cluster.run("hook")
    publish(cluster, [trainer], [2])
    reader.worker.connect()
    cluster.run()
    assert (asked.number, reader.hook_calls) == (2, 1)


def test_a_call_goes_on_to_no_newer_version_that_has_no_source_yet() -> None:
    cluster, (trainer,) = published()
    keeper, reader = cluster.handle("keeper"), cluster.handle("reader")
    cluster.run()
    keeper.replicate()
    cluster.run()
    trainer.unpublish()
    cluster.run()
    asked = reader.update()
    read_half(cluster, reader)
    trainer.publish(2)
    cluster.run("read")
    restart(cluster, but=[trainer, keeper])
    cluster.run("read")
    keeper.worker.connect()
    cluster.run()
    assert asked.number == 1


def test_a_shard_of_a_newer_version_is_read_as_soon_as_one_worker_is_back_with_it() -> None:
    """Not all of its ranks are back: the version itself is unavailable as before."""
    cluster = StepwiseCluster(host_bytes=4 * MANIFEST.nbytes)
    groups = [cluster.group("trainer", 3), cluster.group("other", 3)]
    host = cluster.worker("host")
    cluster.run()
    for number, ranks in enumerate(groups, 1):
        for handle in ranks:
            handle.publish(number)
        cluster.run("read")
        if number == 1:
            newest = cluster.coordinator.cluster.models["actor"].newest_visible()
            assert newest is not None
            wanted = host.copies.seed(newest.info, 1, 60)
            cluster.run("read")
            (copy,) = host.handles
            read_half(cluster, copy)
    restart(cluster, but=[handle for ranks in groups for handle in ranks])
    for rank in (0, 1):
        assert not wanted.done
        groups[1][rank].worker.connect()
        cluster.run()
    assert wanted.done  # no time has passed
    assert copy.member.version == 2
