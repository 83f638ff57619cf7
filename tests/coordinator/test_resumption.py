"""A fill that is under way when its coordinator restarts goes on, and reads nothing twice (G8, R6).

A story of several modules: `fills`, `operations`, `testimonies`, and `worker.filling`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import pytest

from tensorhub.errors import GroupAborted, OperationTimeout, StateError, VersionUnavailable
from tensorhub.messages import Fill
from tensorhub.model.manifest import TensorDescription, build_manifest
from tensorhub.testing import CHUNK_BYTES, CHUNKS, MANIFEST, BrokenHook, CallRecord, Choice, SimHandle, StepwiseCluster
from tensorhub.types import HandleState
from tensorhub.worker.calls import Say
from tensorhub.worker.registration_session import Shard


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
        cluster.do(next(choice for choice in cluster.choices() if choice.kind in kinds.split() and choice != but))


def is_about_to_call(handle: SimHandle) -> bool:
    say = handle.todo[0] if handle.todo else None
    return isinstance(say, Say) and isinstance(say.message, Fill)


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
    """How often each of them has begun a pull. A pull never reads a chunk twice: its `missing` only shrinks."""
    opened = [[line for line in cluster.log if f"{h.worker.name} -> Fill" in line] for h in handles]
    return [len({line.partition("generation=")[2].split()[0] for line in each}) for each in opened]


def calls_again(cluster: StepwiseCluster, handle: SimHandle) -> None:
    """Until its call is on its way to the new coordinator, the next to be heard."""
    link = handle.worker.link
    assert link is not None
    until(cluster, lambda: bool(link.up) and isinstance(link.up[0], Fill), kinds="up down do")


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


def test_the_lane_to_a_source_that_is_granted_again_is_not_given_up() -> None:
    cluster, _ = published()
    reader = cluster.handle("reader")
    cluster.run()
    reader.replicate()
    until(cluster, lambda: is_reading(reader))
    assert reader.pull is not None
    running, lanes = list(reader.pull.lanes.values()), list(reader.pull.grants)
    restart(cluster)
    cluster.run("read")
    assert list(reader.pull.lanes.values()) == running
    assert is_reading(reader)
    assert list(reader.pull.grants) == lanes
    (lease,) = cluster.coordinator.cluster.leases
    assert lease not in lanes  # the coordinator knows it by another name, and each heeds its own


def test_a_lane_that_fails_afterwards_is_reported_as_the_lease_that_the_coordinator_knows() -> None:
    cluster, (trainer,) = published()
    other, reader = cluster.handle("other"), cluster.handle("reader")
    cluster.run()
    other.replicate()
    cluster.run()
    asked = reader.replicate()
    read_half(cluster, reader)
    restart(cluster)
    cluster.run("read")
    assert reader.pull is not None
    (lane,) = reader.pull.grants
    (lease,) = cluster.coordinator.cluster.leases
    reader.source_ended(lane, "stalled")
    cluster.run("read")
    assert lease not in cluster.coordinator.cluster.leases
    cluster.advance(1)
    assert asked.number == 1
    assert trainer.member.version == 1


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
    """The last holder but one died with the coordinator: what has been verified everywhere needs no source."""
    cluster, trainers = published(world_size)
    readers = cluster.group("reader", world_size)
    cluster.run()
    calls = [handle.replicate() for handle in readers]
    until(cluster, lambda: all(h.member._memory.voted is not None for h in readers), kinds="up down do read")
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


def test_a_rank_that_had_not_begun_to_write_joins_those_that_had() -> None:
    """Its Write was lost with the coordinator; it still holds the old version, and its hook has returned."""
    cluster, trainers = published(2)
    readers = cluster.group("reader", 2)
    cluster.run()
    for handle in readers:
        handle.replicate()
    cluster.run()
    publish(cluster, trainers, [2])
    calls = [handle.update(hold=True) for handle in readers]
    slow = readers[1]
    while not is_half_read(readers[0]):
        heard = slow.worker.heard_soon()
        held = bool(heard) and type(heard[0]).__name__ == "Write"
        choices = [c for c in cluster.choices() if not held or c != Choice("down", slow.worker.name)]
        cluster.do(choices[0])
    assert slow.member.version == 1
    restart(cluster)
    cluster.run("read")
    assert [is_half_read(readers[0]), slow.member.state] == [True, HandleState.FILLING]
    cluster.run()
    assert [call.number for call in calls] == [2, 2]
    assert [handle.hook_calls for handle in readers] == [1, 1]
    assert reads(cluster, readers[0]) == [2]  # one per call
    cluster.check_agreement()


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
    until(cluster, lambda: reader.member.running is not None and reader.member.running.phase.value == phase)
    restart(cluster)
    cluster.run()
    assert (asked.number, reader.hook_calls, reader.member.version) == (2, 1, 2)
    cluster.check_agreement()


def test_a_hook_that_returns_while_the_coordinator_is_away() -> None:
    cluster, (trainer,) = published()
    reader = cluster.handle("reader")
    cluster.run()
    reader.replicate()
    cluster.run()
    publish(cluster, [trainer], [2])
    asked = reader.update(hold=True)
    until(cluster, lambda: bool(reader.hooks), kinds="up down do store")
    cluster.restart()
    cluster.run()
    assert reader.hook_calls == 1
    restart(cluster)
    cluster.run()
    assert (asked.number, reader.hook_calls) == (2, 1)


def test_what_a_hook_was_told_stays_bound_though_a_newer_version_came() -> None:
    """The engine was paused for version 2, while its holder and that of 3 are still on their way back."""
    cluster, (trainer,) = published()
    keeper, other, reader = cluster.handle("keeper"), cluster.handle("other"), cluster.handle("reader")
    cluster.run()
    reader.replicate()
    cluster.run()
    publish(cluster, [trainer], [2])
    keeper.replicate()
    cluster.run()
    asked = reader.update(hold=True)
    cluster.run("hook")
    publish(cluster, [other], [])
    other.publish(3)
    cluster.run("hook")
    restart(cluster)
    cluster.run()
    assert (asked.number, reader.hook_calls) == (2, 1)


def test_a_fence_that_is_still_waited_for_goes_on() -> None:
    cluster, (trainer,) = published()
    reader = cluster.handle("reader")
    cluster.run()
    reader.replicate()
    cluster.run()
    publish(cluster, [trainer], [2])
    reader.hold_access()
    asked = reader.update()
    cluster.run()
    assert reader.member.running is not None
    assert reader.member.running.phase == "fencing"
    restart(cluster)
    cluster.run()
    assert not asked.done
    reader.end_access()
    cluster.run()
    assert asked.number == 2
    cluster.check_agreement()


def test_a_restarted_rank_ends_what_the_others_had_begun() -> None:
    """R6: its new process knows nothing of that call; it may even ask for what is newest now."""
    cluster, _ = published(2)
    first, second = cluster.group("reader", 2)
    cluster.run()
    asked = first.replicate()
    second.replicate()
    read_half(cluster, first, second)
    cluster.restart()
    second.worker.crash()
    newcomer = cluster.handle("spare", "reader", 1, 2)
    restart(cluster)
    cluster.run()
    assert not asked.done
    again = newcomer.replicate()
    cluster.run()
    for call in (asked, again):
        with pytest.raises(GroupAborted, match="rank 1 has made a new call since; call again") as caught:
            _ = call.number
        assert caught.value.retryable
    assert isinstance(asked.error, GroupAborted)
    assert asked.error.memory == "torn"
    calls = [first.replicate(), newcomer.replicate()]
    cluster.run()
    assert [call.number for call in calls] == [1, 1]


def test_a_rank_that_gave_up_meanwhile_and_calls_again_does_not_get_the_older_version() -> None:
    """G3: its new call began after 2 was published, and must not be joined to the others' fill of 1."""
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
    with pytest.raises(VersionUnavailable, match="is not known any more: it was rolled back") as caught:
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


def test_a_voted_rank_does_not_wait_for_ever_for_one_that_never_calls() -> None:
    cluster, _ = published(2)
    first, second = cluster.group("reader", 2)
    cluster.run()
    asked, left = first.replicate(timeout_s=20), second.replicate(timeout_s=20)
    until(cluster, lambda: first.member._memory.voted is not None, kinds="up down do read")
    second.worker.disconnect()
    second.cancel()
    cluster.advance(5, run=False)
    restart(cluster)
    cluster.advance(17)
    assert left.done
    assert isinstance(asked.error, OperationTimeout)
    assert "these ranks did not call: 1" in str(asked.error)
    assert first.member.state is HandleState.TORN


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


def test_who_had_not_begun_to_write_waits_for_a_source_and_keeps_its_old_version() -> None:
    cluster, (trainer,) = published()
    keeper, reader = cluster.handle("keeper"), cluster.handle("reader")
    cluster.run()
    for handle in (keeper, reader):
        handle.replicate()
        cluster.run()
    publish(cluster, [trainer], [2])
    asked = reader.update(hold=True, timeout_s=30)
    cluster.run("hook")
    trainer.worker.crash()
    restart(cluster)
    cluster.advance(29)
    assert not asked.done
    cluster.advance(2)
    with pytest.raises(VersionUnavailable, match="version 2 has lost its last source") as caught:
        _ = asked.number
    assert (caught.value.memory, reader.member.version, reader.hook_calls) == ("intact", 1, 1)
    cluster.check_agreement()


def test_a_hook_that_fails_after_the_restart_ends_it_on_all_ranks() -> None:
    cluster, trainers = published(2)
    readers = cluster.group("reader", 2)
    cluster.run()
    for handle in readers:
        handle.replicate()
    cluster.run()
    publish(cluster, trainers, [2])
    calls = [handle.update(hold=True) for handle in readers]
    cluster.run("hook")
    restart(cluster)
    cluster.run("hook")
    readers[0].hook_error = BrokenHook("no pause")
    cluster.run()
    assert isinstance(calls[0].error, BrokenHook)
    assert isinstance(calls[1].error, GroupAborted)
    assert [handle.member.version for handle in readers] == [1, 1]
    cluster.check_agreement()


def test_a_rank_whose_worker_was_lost_by_the_same_coordinator_does_not_go_on() -> None:
    """R11: its operation was decided without it."""
    cluster, _ = published()
    reader = cluster.handle("reader")
    cluster.run()
    asked = reader.replicate()
    read_half(cluster, reader)
    reader.worker.disconnect()
    cluster.advance(11, run=False)
    cluster.run("read")
    for _ in range(2):
        if reader.worker.link is None:
            reader.worker.connect()
        cluster.run("read")
    with pytest.raises(GroupAborted, match="the membership of group 'reader' changed"):
        _ = asked.number


@pytest.mark.parametrize("heard", [False, True])
def test_a_connection_that_is_lost_again_before_all_is_said(heard: bool) -> None:
    cluster, _ = published()
    reader = cluster.handle("reader")
    cluster.run()
    asked = reader.replicate()
    read_half(cluster, reader)
    restart(cluster)
    calls_again(cluster, reader)
    if heard:
        cluster.do(Choice("up", "reader"))
    reader.worker.disconnect()
    reader.worker.connect()
    cluster.run()
    assert asked.number == 1
    cluster.check_agreement()


def test_a_publish_without_a_record_ends() -> None:
    """It has moved no bytes, so its caller can say it again; a rollback in between could not be told from here."""
    cluster = StepwiseCluster()
    trainers = cluster.group("trainer", 2)
    cluster.run()
    asked = trainers[0].publish(1)
    cluster.run()
    restart(cluster)
    cluster.run()
    with pytest.raises(GroupAborted, match="its coordinator restarted; call again"):
        _ = asked.number


@pytest.mark.parametrize("heard", [False, True])
def test_the_last_chunk_comes_while_its_call_is_said_again(heard: bool) -> None:
    """The vote finds no operation yet that it belongs to, and no source is left: it is not needed."""
    cluster, (trainer,) = published()
    reader = cluster.handle("reader")
    cluster.run()
    asked = reader.replicate()
    read_half(cluster, reader)
    restart(cluster)
    calls_again(cluster, reader)
    if heard:
        cluster.run("read", Choice("down", "reader"))
    cluster.run("up", "down")
    assert reader.member.running is not None
    assert reader.member.running.phase == "voted"
    trainer.worker.crash()
    cluster.run("up")
    cluster.run()
    assert asked.number == 1
    cluster.check_agreement()


def test_a_vote_that_came_before_the_other_ranks_call_is_asked_for_again() -> None:
    cluster, _ = published(2)
    first, second = cluster.group("reader", 2)
    cluster.run()
    calls = [handle.replicate() for handle in (first, second)]
    read_half(cluster, first, second)
    restart(cluster, but=[second])
    cluster.run("read")
    cluster.run()
    assert first.member.running is not None
    assert first.member.running.phase == "voted"
    second.worker.connect()
    cluster.run()
    assert [call.number for call in calls] == [1, 1]
    cluster.check_agreement()


def test_a_rank_that_comes_late_with_what_it_had_begun_joins_the_next_call() -> None:
    """The others' operation has ended without it, at a deadline; it is not left waiting for that one."""
    cluster, _ = published(2)
    first, second = cluster.group("reader", 2)
    cluster.run()
    short, asked = first.replicate(timeout_s=5), second.replicate(timeout_s=500)
    read_half(cluster, first, second)
    restart(cluster)
    late = Choice("down", second.worker.name)
    until(cluster, lambda: second.registered and bool(second.worker.heard_soon()), kinds="up do")
    while "Outcome" not in type(second.worker.heard_soon()[0] if second.worker.heard_soon() else None).__name__:
        cluster.do(next(c for c in cluster.choices() if c.kind in ("up", "down", "do")))
    cluster.run("read", late)
    cluster.advance(5.5, run=False)
    cluster.run("read", late)
    assert isinstance(short.error, OperationTimeout)
    cluster.run("read")
    again = first.replicate()
    cluster.run("read")
    for call in (again, asked):
        assert isinstance(call.error, GroupAborted)
        assert "has made a new call since" in str(call.error)


def test_the_manifest_of_what_goes_on_is_its_publishers_also_where_nobody_else_has_it() -> None:
    """The reader itself would cut other chunks, were it to publish."""
    cluster, (trainer,) = published()
    tensor = TensorDescription("w", "uint8", (CHUNKS, CHUNK_BYTES), 0, CHUNKS * CHUNK_BYTES)
    other = build_manifest([tensor], CHUNK_BYTES // 2, "none")
    reader = cluster.worker("reader").take(Shard("odd", "actor", "reader", 0, 1, False, "", other, 0))
    cluster.run()
    reader.replicate()
    read_half(cluster, reader)
    trainer.worker.crash()
    restart(cluster)
    cluster.run("read")
    (version,) = cluster.coordinator.cluster.models["actor"].versions.values()
    assert version.manifests == {0: MANIFEST.encode()}


def test_a_prefetch_in_mid_read_goes_on_although_its_version_is_about_to_be_held() -> None:
    cluster, (trainer,) = published()
    cluster.host_bytes = CHUNKS * CHUNK_BYTES
    reader = cluster.handle("reader")
    cluster.run()
    prefetch = reader.prefetch()
    copy = reader.copy
    read_half(cluster, copy)
    cluster.restart(kept=False)
    update = reader.replicate()
    for handle in (trainer, reader):
        handle.worker.connect()
    until(cluster, lambda: is_about_to_call(copy), kinds="up down do", but=Choice("do", reader.name))
    until(cluster, lambda: is_about_to_call(reader), kinds="up down do", but=Choice("do", copy.name))
    for handle in (reader, copy):  # both calls are heard before either goes on
        cluster.do(Choice("do", handle.name))
    for _ in range(2):
        cluster.do(Choice("up", "reader"))
    cluster.run()
    assert (update.number, prefetch.has_ended()) == (1, True)
    assert copy.member.state is not HandleState.FILLING


@pytest.mark.parametrize("kept", [True, False])
@pytest.mark.parametrize("selector", ["latest", "available"])
def test_who_is_back_before_its_source_does_not_go_over_to_a_newer_version(selector: str, kept: bool) -> None:
    cluster = StepwiseCluster()
    trainer, other, reader = cluster.handle("trainer"), cluster.handle("other"), cluster.handle("reader")
    cluster.run()
    trainer.publish(1)
    cluster.run()
    other.replicate()
    cluster.run()
    call = reader.replicate(selector)
    read_half(cluster, reader)
    pull = reader.pull
    trainer.unpublish()
    cluster.run("read")
    trainer.publish(2)
    cluster.run("read")
    restart(cluster, but=[trainer, other], kept=kept)
    cluster.run("read")
    assert reader.pull is pull is not None
    for handle in (trainer, other):
        handle.worker.connect()
    cluster.run()
    assert (call.number, reads(cluster, reader)) == (1, [1])
