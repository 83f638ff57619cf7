"""Replicate and update: binding, writing, sources (R7, R12, G4, G8)."""

from __future__ import annotations

import pytest

from tensorhub.errors import (
    GroupAborted,
    ManifestMismatch,
    StateError,
)
from tensorhub.messages import Deregister, Start
from tensorhub.testing import BrokenHook, CallRecord, Choice, SimHandle, StepwiseCluster
from tensorhub.types import HandleState
from tests.coordinator.test_bridges import filling, finish, published


def trainer_and_reader(version: int = 1) -> tuple[StepwiseCluster, SimHandle, SimHandle]:
    cluster = StepwiseCluster()
    trainer, reader = cluster.handle("trainer"), cluster.handle("reader")
    cluster.run()
    trainer.publish(version)
    cluster.run()
    return cluster, trainer, reader


def run_until(cluster: StepwiseCluster, line: str) -> None:
    """Let things happen until a message is delivered that is shown with `line`."""
    seen = len(cluster.log)
    for _ in range(1000):
        cluster.do(cluster.choices()[0])
        if any(line in new for new in cluster.log[seen:]):
            return
    raise AssertionError(f"no {line!r}")


def test_replicate_copies_what_was_published() -> None:
    cluster, trainer, reader = trainer_and_reader()
    asked = reader.replicate()
    cluster.run()
    assert (asked.number, asked.changed) == (1, True)
    assert reader.cells == trainer.cells
    assert reader.member.state is HandleState.READY


def test_a_reader_is_a_source_from_its_first_chunk_on() -> None:
    cluster, trainer, reader = trainer_and_reader()
    other = cluster.handle("other")
    cluster.run()
    first, second = reader.replicate(), other.replicate()
    cluster.run("read")
    assert any(
        "other <- Start" in line and ":reader(" in line and ", filling)" in line
        for line in cluster.log
    )
    cluster.run()
    assert (first.number, second.number) == (1, 1)
    assert other.cells == trainer.cells


def test_update_calls_the_hook_with_everything_intact_and_then_writes() -> None:
    cluster, trainer, reader = trainer_and_reader()
    reader.replicate()
    cluster.run()
    trainer.unpublish()
    cluster.run()
    trainer.publish(2)
    cluster.run()
    old = list(reader.cells)
    asked = reader.update(hold=True)
    cluster.run(until=lambda: reader.hooks)
    assert reader.hooks[0].version.version == 2
    assert reader.cells == old
    assert reader.member.version == 1
    cluster.run()
    assert (asked.number, asked.changed, reader.hook_calls) == (2, True, 1)


def test_no_rank_writes_before_every_hook_has_returned() -> None:
    cluster = StepwiseCluster()
    trainers, readers = cluster.group("trainer", 2), cluster.group("reader", 2)
    cluster.run()
    for handle in trainers:
        handle.publish(1)
    cluster.run()
    calls = [handle.replicate(hold=True) for handle in readers]
    cluster.run(Choice("hook", readers[1].name))
    assert [handle.hook_calls for handle in readers] == [1, 0]
    assert all(handle.member.state is HandleState.EMPTY for handle in readers)
    cluster.run()
    assert [call.number for call in calls] == [1, 1]


def test_a_hook_that_raises_ends_the_update_on_all_ranks_intact() -> None:
    cluster = StepwiseCluster()
    trainers, readers = cluster.group("trainer", 2), cluster.group("reader", 2)
    cluster.run()
    for number in (1, 2):
        for handle in trainers:
            if handle.member.state is HandleState.READY:
                handle.unpublish()
        cluster.run()
        for handle in trainers:
            handle.publish(number)
        cluster.run()
        if number == 1:
            for handle in readers:
                handle.replicate()
            cluster.run()
    readers[0].hook_error = BrokenHook("cannot pause")
    calls = [handle.update(hold=True) for handle in readers]
    cluster.run()
    assert isinstance(calls[0].error, BrokenHook)
    with pytest.raises(GroupAborted, match="cannot pause") as caught:
        _ = calls[1].number
    assert caught.value.memory == "intact"
    assert [handle.member.version for handle in readers] == [1, 1]
    cluster.check_agreement()


def test_a_no_op_update_is_a_barrier_of_its_group() -> None:
    cluster = StepwiseCluster()
    trainers = cluster.group("trainer", 2)
    cluster.run()
    for handle in trainers:
        handle.publish(1)
    cluster.run()
    one = trainers[0].update("latest")
    cluster.run()
    assert not one.done
    two = trainers[1].update("latest")
    cluster.run()
    assert [(call.number, call.changed) for call in (one, two)] == [(1, False), (1, False)]


@pytest.mark.parametrize("ranks", [1, 2])
def test_an_update_with_nothing_new_is_one_round_trip_after_the_last_rank_has_called(
    ranks: int,
) -> None:
    cluster = StepwiseCluster()
    trainers = cluster.group("trainer", ranks)
    cluster.run()
    for handle in trainers:
        handle.publish(1)
    cluster.run()
    for handle in trainers[:-1]:
        handle.update()
    cluster.run()
    seen = len(cluster.log)
    trainers[-1].update()
    cluster.run()
    said = [line.split()[1:4] for line in cluster.log[seen:] if " -> " in line or " <- " in line]
    assert said[0][1:] == ["->", "Fill"]
    assert sorted(said[1:]) == sorted(
        [trainer.worker.name, "<-", "Outcome"] for trainer in trainers
    )


def test_a_rank_that_holds_the_version_in_another_layout_than_its_group_has_now_fills_it_again() -> (
    None
):
    world, trainers = published()
    readers = filling(world, ranks=2)
    finish(world, readers, trainers)
    for rank in readers:
        rank.take(Start)
    world.say(readers[1], Deregister(99, readers[1].name, True))
    readers[1].layout_id = "own/another"
    world.register(readers[1])
    world.fill(readers)
    assert [len(rank.take(Start)) for rank in readers] == [1, 1]


def test_cancelling_in_the_middle_of_a_fill_leaves_torn_memory() -> None:
    cluster, _, reader = trainer_and_reader()
    asked = reader.replicate()
    run_until(cluster, "reader <- Start")
    cluster.run(until=lambda: reader.pull is not None)
    reader.cancel("enough")
    cluster.run()
    assert isinstance(asked.error, StateError)
    assert asked.error.memory == "torn"
    assert (reader.member.state, reader.member.version) == (HandleState.TORN, None)
    again = reader.replicate()
    cluster.run()
    assert again.number == 1


@pytest.mark.parametrize("hooks", [(False, False), (True, False), (False, True)])
def test_ranks_without_a_hook_overwrite_what_has_the_same_manifest_at_once(
    hooks: tuple[bool, bool],
) -> None:
    """Nothing can keep them from it, so nobody asks: an update is two round trips to the
    coordinator, and not three.
    """
    cluster = StepwiseCluster()
    trainers, readers = cluster.group("trainer", 2), cluster.group("reader", 2)
    cluster.run()
    for number in (1, 2):
        for handle in trainers:
            handle.publish(number)
        cluster.run()
        calls = [handle.update(hold=hold) for handle, hold in zip(readers, hooks, strict=True)]
        cluster.run()
        assert [call.number for call in calls] == [number, number]
        for handle in trainers:
            handle.unpublish()
        cluster.run()
    asked = sum("-> ReadyToWrite" in line for line in cluster.log)
    assert asked == (4 if any(hooks) else 0)


def test_given_up_between_the_fence_and_the_first_byte_the_old_version_is_published_again() -> None:
    cluster, trainer, reader = trainer_and_reader()
    reader.replicate()
    cluster.run()
    trainer.unpublish()
    cluster.run()
    trainer.publish(2)
    cluster.run()
    asked = reader.update()
    cluster.run(
        until=lambda: (
            reader.member.running is not None and reader.member.running.phase.value == "fencing"
        )
    )
    reader.cancel("enough")
    cluster.run()
    assert isinstance(asked.error, StateError)
    assert reader.member.version == 1
    cluster.check_agreement()


def test_another_layout_is_refused_before_anything_changes() -> None:
    cluster, _, _ = trainer_and_reader()
    readers = cluster.group("wide", 2)
    cluster.run()
    calls = [handle.replicate() for handle in readers]
    cluster.run()
    for call in calls:
        with pytest.raises(ManifestMismatch, match=r"over 2\).*plain tensors.*over 1 rank"):
            _ = call.number


def let_fail(cluster: StepwiseCluster, asked: CallRecord, reasons: dict[str, str]) -> None:
    """Each read ends as its source's reason says, until the call does."""
    while not asked.done:
        for choice in [c for c in cluster.choices() if c.kind != "read"]:
            cluster.do(choice)
        pull = asked.handle.pull
        for lease, grant in list(pull.grants.items()) if pull is not None else []:
            asked.handle.source_ended(lease, reasons[grant.source])
        cluster.advance(0.05, run=False)


def test_replicate_over_published_memory_is_refused_here() -> None:
    _, trainer, _ = trainer_and_reader()
    with pytest.raises(StateError, match=r"holds version 1: update\(\) replaces it"):
        trainer.replicate()
