"""Replicate and update: binding, writing, sources (R7, R12, G4, G8)."""

from __future__ import annotations

from collections import Counter

import pytest

from tensorhub.coordinator.entities import DECIDED_KEPT_MAX, Holding, RankPart, Version
from tensorhub.coordinator.readers import Readers
from tensorhub.coordinator.shards import Shards
from tensorhub.coordinator.source_choice import SourceChoice
from tensorhub.errors import (
    GroupAborted,
    ManifestMismatch,
    StateError,
)
from tensorhub.messages import Grant, Need, Start, Write
from tensorhub.model.digests import root_of
from tensorhub.testing import CHUNKS, BrokenHook, CallRecord, Choice, SimHandle, StepwiseCluster
from tensorhub.types import HandleState
from tests.coordinator.layout_world import NO_DIGESTS, World, list_of
from tests.coordinator.test_bridges import cut


def trainer_and_reader(version: int = 1) -> tuple[StepwiseCluster, SimHandle, SimHandle]:
    cluster = StepwiseCluster()
    trainer, reader = cluster.handle("trainer"), cluster.handle("reader")
    cluster.run()
    trainer.publish(version)
    cluster.run()
    return cluster, trainer, reader


def test_a_source_is_chosen_once_and_what_changes_is_counted_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """What makes sure of a source before the first byte changes is what is granted."""
    chosen: list[RankPart] = []
    counted: Counter[tuple[int, Holding]] = Counter()
    choose, count = SourceChoice.choose, Shards.count

    def choose_once(self: SourceChoice, part: RankPart, version: Version, need: Need | None = None) -> Holding | None:
        chosen.append(part)
        return choose(self, part, version, need)

    def count_once(self: Shards[Holding]) -> None:
        counted.update((cluster.coordinator.cluster.cause, holding) for holding in self.uncounted)
        count(self)

    cluster, trainer, reader = trainer_and_reader()
    monkeypatch.setattr(SourceChoice, "choose", choose_once)
    monkeypatch.setattr(Shards, "count", count_once)
    reader.replicate()
    cluster.run()
    trainer.unpublish()
    cluster.run()
    trainer.publish(2)
    cluster.run()
    reader.update("latest")
    cluster.run()
    assert len(chosen) == 2
    assert max(counted.values()) <= 2  # before it may be read, and when its fill is committed


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
    assert any("other <- Start" in line and ":reader(" in line and ", filling)" in line for line in cluster.log)
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


def test_an_empty_rank_beside_one_that_holds_something_says_that_it_is_ready() -> None:
    """Its Start is no Write where another one has a hook: nobody writes before its manifest, however late, has come."""
    cluster = StepwiseCluster()
    trainers, readers = cluster.group("trainer", 2), cluster.group("reader", 2)
    cluster.run()
    for handle in trainers:
        handle.publish(1)
    cluster.run()
    for handle in readers:
        handle.replicate()
    cluster.run()
    for handle in trainers:
        handle.unpublish()
    cluster.run()
    readers[1].worker.crash()
    cluster.advance(11)
    newcomer = cluster.handle("spare", "reader", 1, 2)
    for handle in trainers:
        handle.publish(2)
    cluster.run()
    calls = [readers[0].update(hold=True), newcomer.update()]
    slow = Choice("up", "spare")
    cluster.run(until=lambda: any(isinstance(message, Start) for message in newcomer.worker.heard_soon()))
    cluster.run(slow)
    assert readers[0].member.version == 1
    cluster.run()
    assert [call.number for call in calls] == [2, 2]


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
def test_an_update_with_nothing_new_is_one_round_trip_after_the_last_rank_has_called(ranks: int) -> None:
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
    assert sorted(said[1:]) == sorted([trainer.worker.name, "<-", "Outcome"] for trainer in trainers)


def test_a_group_in_which_one_rank_holds_the_version_already() -> None:
    """Only the newcomer reads; the other's memory stays a source throughout."""
    cluster = StepwiseCluster()
    trainers, readers = cluster.group("trainer", 2), cluster.group("reader", 2)
    cluster.run()
    for handle in trainers:
        handle.publish(1)
    cluster.run()
    for handle in readers:
        handle.replicate()
    cluster.run()
    readers[1].worker.crash()
    cluster.advance(11)
    newcomer = cluster.handle("spare", "reader", 1, 2)
    cluster.run()
    calls = [readers[0].update(), newcomer.update()]
    cluster.run()
    assert [(call.number, call.changed) for call in calls] == [(1, False), (1, True)]
    group = cluster.coordinator.cluster.models["actor"].groups["reader"]
    assert [(replica.state.value, sorted(replica.holdings)) for replica in group.replicas] == [("ready", [0, 1])]


def test_that_ranks_memory_survives_when_the_newcomer_fails() -> None:
    cluster = StepwiseCluster()
    trainers, readers = cluster.group("trainer", 2), cluster.group("reader", 2)
    cluster.run()
    for handle in trainers:
        handle.publish(1)
    cluster.run()
    for handle in readers:
        handle.replicate()
    cluster.run()
    readers[1].worker.crash()
    cluster.advance(11)
    newcomer = cluster.handle("spare", "reader", 1, 2)
    cluster.run()
    calls = [readers[0].update(), newcomer.update()]
    cluster.run(until=lambda: newcomer.pull is not None)
    newcomer.cancel("enough")
    cluster.run()
    assert isinstance(calls[0].error, GroupAborted)
    assert isinstance(calls[1].error, StateError)
    assert calls[1].error.memory == "torn"
    assert readers[0].member.version == 1
    cluster.check_agreement()
    for handle in trainers:
        handle.worker.crash()
    cluster.advance(11)
    shard = cluster.coordinator.cluster.models["actor"].versions[1].holdings[0]
    assert [holding.is_source for holding in shard] == [True]


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
def test_ranks_without_a_hook_overwrite_what_has_the_same_manifest_at_once(hooks: tuple[bool, bool]) -> None:
    """Nothing can keep them from it, so nobody asks: an update is two round trips to the coordinator, and not three."""
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


@pytest.mark.parametrize("hold", [True, False], ids=["hook", "bare"])
def test_an_abandon_that_crosses_write_keeps_the_old_version_published(hold: bool) -> None:
    """R7: aborted before the first write, the old version is published again. Without a hook, Start is Write, too."""
    cluster, trainer, reader = trainer_and_reader()
    reader.replicate()
    cluster.run()
    trainer.unpublish()
    cluster.run()
    trainer.publish(2)
    cluster.run()
    asked = reader.update(hold=hold)
    cluster.run(until=lambda: any(isinstance(message, Write if hold else Start) for message in reader.worker.heard_soon()))
    reader.cancel("enough")
    cluster.run()
    assert isinstance(asked.error, StateError)
    assert asked.error.memory == "intact"
    assert reader.member.version == 1
    cluster.check_agreement()
    other = cluster.handle("other")
    cluster.run()
    got = other.replicate(1)
    cluster.run()
    assert got.number == 1


def test_given_up_between_the_fence_and_the_first_byte_the_old_version_is_published_again() -> None:
    cluster, trainer, reader = trainer_and_reader()
    reader.replicate()
    cluster.run()
    trainer.unpublish()
    cluster.run()
    trainer.publish(2)
    cluster.run()
    asked = reader.update()
    cluster.run(until=lambda: reader.member.running is not None and reader.member.running.phase.value == "fencing")
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


def test_a_rank_that_missed_more_operations_than_are_remembered_meets_the_others_again() -> None:
    cluster = StepwiseCluster()
    first, second = cluster.group("reader", 2)
    cluster.run()
    for _ in range(DECIDED_KEPT_MAX + 8):
        first.replicate(timeout_s=0.1)
        cluster.advance(0.2)
    missed = second.replicate(timeout_s=1)
    cluster.run()
    assert isinstance(missed.error, GroupAborted)
    assert missed.error.retryable
    publishers = cluster.group("publisher", 2)
    cluster.run()
    for rank in publishers:
        rank.publish(1)
    asked = [rank.replicate(timeout_s=5) for rank in (first, second)]
    cluster.advance(1)
    assert [each.number for each in asked] == [1, 1]


def test_a_group_that_is_ready_to_write_goes_on_with_the_commit_that_brings_a_source_back() -> None:
    """The commit is the only word of it: until then others hold the version complete, but they have not committed."""
    cluster = StepwiseCluster()
    trainers, early, late = (cluster.group(name, 2) for name in ("trainer", "early", "late"))
    cluster.run()
    for trainer in trainers:
        trainer.publish(1)
    cluster.run()
    asked = [reader.replicate(hold=reader in late) for reader in (*early, *late)]
    cluster.run("store", "hook")
    for trainer in trainers:
        trainer.worker.crash()
    for _ in range(8):  # until they are lost
        cluster.advance(cluster.options.lease_s / 4, run=False)
        cluster.run("store", "hook")
    cluster.run("store")
    version = cluster.coordinator.cluster.models["actor"].versions[1]
    assert not version.has_live_source()
    assert len(version.starving) == 1
    cluster.run()
    assert [each.number for each in asked] == [1] * 4


def test_a_rank_overwrites_what_it_holds_with_another_manifest_only_once_all_are_ready() -> None:
    """Whether that fits it finds out itself; till then its mates must not have overwritten anything (R7)."""
    world = World()
    (trainer,) = world.group("t", [("world/1", ())])
    world.publish([trainer], 1)
    world.manifest = NO_DIGESTS
    (reader,) = world.group("r", [("world/1", ())])
    world.fill([reader])
    world.tell(trainer)
    world.vote(reader, root=root_of(list_of(CHUNKS)))
    assert [start.write for start in reader.take(Start)] == [True]  # it held nothing
    world.leave(trainer)
    world.fenced(trainer)
    world.publish([trainer], 2)
    world.fill([reader])
    assert [start.write for start in reader.take(Start)] == [False]
    world.ready(reader)
    assert reader.take(Write)


def test_a_vote_costs_nothing_for_the_ranks_that_read_on(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World()
    trainers, readers = (world.group(name, [cut(rank) for rank in range(4)]) for name in "tr")
    world.publish(trainers, 1)
    world.fill(readers)
    looked_at: list[str] = []
    assign = Readers.assign_sources

    def noted(choice: Readers, part: RankPart) -> list[Grant]:
        looked_at.append(part.member.registration)
        return assign(choice, part)

    monkeypatch.setattr(Readers, "assign_sources", noted)
    monkeypatch.setattr(world.core, "check_waits", lambda: None)  # that looks at all
    for reader in readers[:3]:
        world.vote(reader, root=root_of(list_of(CHUNKS)))
    assert looked_at == []
