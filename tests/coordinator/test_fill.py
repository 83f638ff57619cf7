"""Replicate and update: binding, writing, sources (R7, R12, G4, G8)."""

from __future__ import annotations

import pytest

from tensorhub.coordinator.entities import DECIDED_KEPT_MAX
from tensorhub.errors import (
    GroupAborted,
    IntegrityError,
    ManifestMismatch,
    OperationTimeout,
    StateError,
    TransportUnavailable,
    VersionUnavailable,
)
from tensorhub.messages import Start, Write
from tensorhub.scheduler import choice as source_choice
from tensorhub.testing import BrokenHook, CallRecord, Choice, SimHandle, StepwiseCluster
from tensorhub.types import HandleState, Location


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
    while (choices := [choice for choice in cluster.choices() if choice.kind != "read"]) != []:
        cluster.do(choices[0])
    assert any("other <- Start" in line and ":reader(" in line and ", filling)" in line for line in cluster.log)
    cluster.run()
    assert (first.number, second.number) == (1, 1)
    assert other.cells == trainer.cells


def test_latest_waits_for_a_first_version() -> None:
    cluster = StepwiseCluster()
    trainer, reader = cluster.handle("trainer"), cluster.handle("reader")
    cluster.run()
    asked = reader.replicate("latest")
    cluster.run()
    assert not asked.done
    trainer.publish(7)
    cluster.run()
    assert asked.number == 7


def test_a_wait_for_a_version_that_never_comes_names_the_model() -> None:
    cluster = StepwiseCluster()
    reader = cluster.handle("reader")
    cluster.run()
    asked = reader.replicate("latest", timeout_s=5)
    cluster.advance(6)
    with pytest.raises(VersionUnavailable, match=r"nothing was published under the model 'actor' \(is the name right\?\)"):
        _ = asked.number


def test_latest_1_is_the_one_before_and_does_not_fall_back() -> None:
    cluster, trainer, reader = trainer_and_reader()
    keeper = cluster.handle("keeper")
    cluster.run()
    asked = reader.replicate("latest-1", timeout_s=5)
    cluster.advance(6)
    with pytest.raises(VersionUnavailable, match="has one version only; there is no 'latest-1'"):
        _ = asked.number
    keeper.replicate("latest")
    cluster.run()
    trainer.unpublish()
    cluster.run()
    trainer.publish(2)
    cluster.run()
    asked = reader.replicate("latest-1")
    cluster.run()
    assert asked.number == 1


def test_latest_1_waits_for_the_one_before_where_nobody_holds_that() -> None:
    """R12: it does not fall back to an older one that somebody holds."""
    cluster, trainer, keeper = trainer_and_reader()
    reader = cluster.handle("late")
    keeper.replicate()
    for number in (2, 3):
        cluster.run()
        trainer.unpublish()
        cluster.run()
        trainer.publish(number)
    cluster.run()
    asked = reader.replicate("latest-1", timeout_s=5)
    cluster.advance(6)
    with pytest.raises(VersionUnavailable, match="no live worker holds 'latest-1'"):
        _ = asked.number
    asked = reader.replicate("latest-1")
    cluster.run()
    assert not asked.has_ended()
    trainer.unpublish()
    cluster.run()
    trainer.publish(4)  # 3 is the one before now, and nobody holds that, either
    cluster.run()
    assert not asked.has_ended()
    other = cluster.handle("other")
    cluster.run()
    other.replicate("latest")
    cluster.run()
    trainer.unpublish()
    cluster.run()
    trainer.publish(5)
    cluster.run()
    assert asked.number == 4


def test_a_newer_publication_replaces_an_unbound_target() -> None:
    """Version 1 is visible and held by nobody: nothing is bound, and 2 is what `latest` becomes."""
    cluster, trainer, reader = trainer_and_reader()
    trainer.unpublish()
    cluster.run()
    asked = reader.replicate("latest")
    cluster.run()
    assert not asked.done
    trainer.publish(2)
    cluster.run()
    assert asked.number == 2


def test_at_least_waits_for_that_number() -> None:
    cluster, trainer, reader = trainer_and_reader()
    asked = reader.update("latest", at_least=3)
    cluster.run()
    assert not asked.done
    trainer.unpublish()
    cluster.run()
    trainer.publish(3)
    cluster.run()
    assert asked.number == 3


def test_at_least_is_waited_for_by_who_holds_an_older_version_and_by_its_whole_group() -> None:
    """What is held, and any newer version below that number, is not enough."""
    cluster = StepwiseCluster()
    trainers, readers = cluster.group("trainer", 2), cluster.group("reader", 2)
    cluster.run()
    calls: list[CallRecord] = []
    for number in range(1, 5):
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
            calls = [handle.update("latest", at_least=4) for handle in readers]
            cluster.run()
        assert [call.has_ended() for call in calls] == [number == 4] * 2
        assert [handle.member.version for handle in readers] == [4 if number == 4 else 1] * 2
    assert [(call.number, call.changed) for call in calls] == [(4, True), (4, True)]


@pytest.mark.parametrize("what", ["connection", "coordinator"])
def test_at_least_is_not_forgotten_with_a_connection_or_a_coordinator(what: str) -> None:
    cluster, trainer, reader = trainer_and_reader()
    reader.replicate()
    cluster.run()
    asked = reader.update("latest", at_least=3)
    cluster.run()
    if what == "coordinator":
        cluster.restart()
    for worker in (reader.worker, trainer.worker):
        worker.disconnect()
        worker.connect()
    cluster.run()
    for number in (2, 3):
        trainer.unpublish()
        cluster.run()
        assert not asked.has_ended()
        trainer.publish(number)
        cluster.run()
    assert asked.number == 3


@pytest.mark.parametrize("selector", ["latest-1", "available"])
def test_at_least_holds_for_every_selector(selector: str) -> None:
    cluster, trainer, reader = trainer_and_reader()
    keeper = cluster.handle("keeper")
    cluster.run()
    asked = reader.update(selector, at_least=3)
    for number in (2, 3, 4):
        cluster.run()
        assert not asked.has_ended()
        keeper.update("latest")
        cluster.run()
        trainer.unpublish()
        cluster.run()
        trainer.publish(number)
        if selector == "available" and number == 3:
            break
    cluster.run()
    assert asked.number == 3


def test_at_least_that_never_comes_says_so() -> None:
    cluster, _, reader = trainer_and_reader()
    asked = reader.update("latest", at_least=3, timeout_s=2)
    cluster.advance(3)
    with pytest.raises(VersionUnavailable, match="version 3 of 'actor' was not published; the newest is 1"):
        _ = asked.number


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
    while not reader.hooks:
        cluster.do(cluster.choices()[0])
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
    while (choices := [c for c in cluster.choices() if c != Choice("hook", readers[1].name)]) != []:
        cluster.do(choices[0])
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
    """Its Start is no Write: nobody writes before its manifest, however late, has come and fits."""
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
    calls = [readers[0].update(), newcomer.update()]
    slow = Choice("up", "spare")
    while not any(isinstance(message, Start) for message in newcomer.worker.heard_soon()):
        cluster.do(cluster.choices()[0])
    while (choices := [c for c in cluster.choices() if c != slow]) != []:
        cluster.do(choices[0])
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
    while newcomer.pull is None:
        cluster.do(cluster.choices()[0])
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
    while reader.pull is None:
        cluster.do(cluster.choices()[0])
    reader.cancel("enough")
    cluster.run()
    assert isinstance(asked.error, StateError)
    assert asked.error.memory == "torn"
    assert (reader.member.state, reader.member.version) == (HandleState.TORN, None)
    again = reader.replicate()
    cluster.run()
    assert again.number == 1


def test_an_abandon_that_crosses_write_keeps_the_old_version_published() -> None:
    """R7: aborted before the first write, the old version is published again."""
    cluster, trainer, reader = trainer_and_reader()
    reader.replicate()
    cluster.run()
    trainer.unpublish()
    cluster.run()
    trainer.publish(2)
    cluster.run()
    asked = reader.update()
    while not any(isinstance(message, Write) for message in reader.worker.heard_soon()):
        cluster.do(cluster.choices()[0])
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
    while reader.member.running is None or reader.member.running.phase.value != "fencing":
        cluster.do(cluster.choices()[0])
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
        with pytest.raises(ManifestMismatch, match=r"over 1 rank.*over 2"):
            _ = call.number


def test_a_lost_source_is_replaced_and_nothing_verified_is_read_again() -> None:
    cluster, _, reader = trainer_and_reader()
    second = cluster.handle("second")
    cluster.run()
    second.replicate()
    cluster.run()
    asked = reader.replicate()
    while reader.pull is None or len(reader.pull.missing) != 1:
        cluster.do(cluster.choices()[0])
    assert reader.pull is not None
    (grant,) = reader.pull.grants.values()
    cluster.find(grant).worker.crash()  # type: ignore[union-attr]
    before = len(cluster.log)
    cluster.run()
    cluster.advance(1)
    assert asked.number == 1
    assert any("reader <- AddSource" in line for line in cluster.log[before:])
    assert len(reader.pull.missing) == 0


def test_a_source_that_is_given_up_while_nobody_could_hear_it_is_not_read_under_the_same_lease_again() -> None:
    cluster, _, reader = trainer_and_reader()
    asked = reader.replicate()
    while reader.pull is None or len(reader.pull.missing) != 1:
        cluster.do(cluster.choices()[0])
    assert reader.pull is not None
    (lease,) = reader.pull.grants
    reader.worker.disconnect()
    reader.source_ended(lease, "lost")
    cluster.run()
    reader.worker.connect()
    cluster.run()
    cluster.advance(1)
    assert asked.number == 1
    assert len(cluster.guarantees.contents.truth) == 1


def test_the_only_source_is_tried_again_after_a_while_that_grows() -> None:
    cluster, _, reader = trainer_and_reader()
    asked = reader.replicate()
    while reader.pull is None:
        cluster.do(cluster.choices()[0])
    waits = []
    for _ in range(7):
        assert reader.pull is not None
        reader.source_ended(next(iter(reader.pull.grants)), "stalled")
        began = cluster.now
        while not reader.pull.grants:
            for choice in [c for c in cluster.choices() if c.kind != "read"]:
                cluster.do(choice)
            cluster.advance(0.01, run=False)
        waits.append(cluster.now - began)
    cluster.run()
    assert asked.number == 1
    assert waits == pytest.approx([0.05, 0.1, 0.2, 0.4, 0.8, 1.6, 2.0], abs=0.04)


def test_two_ranks_failing_sources_are_each_tried_again_in_time() -> None:
    cluster = StepwiseCluster()
    trainers, readers = cluster.group("trainer", 2), cluster.group("reader", 2)
    cluster.run()
    for handle in trainers:
        handle.publish(1)
    cluster.run()
    calls = [handle.replicate() for handle in readers]
    while any(handle.pull is None for handle in readers):
        cluster.do(next(c for c in cluster.choices() if c.kind != "read"))
    for times, handle in ((4, readers[0]), (1, readers[1])):
        for _ in range(times):
            assert handle.pull is not None
            while not handle.pull.grants:
                for choice in [c for c in cluster.choices() if c.kind != "read"]:
                    cluster.do(choice)
                cluster.advance(0.01, run=False)
            handle.source_ended(next(iter(handle.pull.grants)), "stalled")
    cluster.advance(5)
    assert [call.number for call in calls] == [1, 1]


def test_a_lost_last_source_is_waited_for_until_the_deadline() -> None:
    cluster, trainer, reader = trainer_and_reader()
    asked = reader.replicate(timeout_s=30)
    while reader.pull is None:
        cluster.do(cluster.choices()[0])
    trainer.worker.crash()
    cluster.advance(29)
    assert not asked.done
    cluster.advance(3)
    with pytest.raises(VersionUnavailable, match=r"lost its last source.*none came back in time") as caught:
        _ = asked.number
    assert caught.value.memory == "torn"


def test_a_fill_that_takes_too_long_names_the_slow_ranks() -> None:
    cluster = StepwiseCluster()
    trainers, readers = cluster.group("trainer", 2), cluster.group("reader", 2)
    cluster.run()
    for handle in trainers:
        handle.publish(1)
    cluster.run()
    calls = [handle.replicate(timeout_s=5) for handle in readers]
    slow = Choice("read", readers[1].name)
    while (choices := [c for c in cluster.choices() if c != slow]) != []:
        cluster.do(choices[0])
    cluster.advance(2, run=False)
    while cluster.now < 6:
        cluster.advance(0.5, run=False)
        while (choices := [c for c in cluster.choices() if c != slow]) != []:
            cluster.do(choices[0])
    for call in calls:
        with pytest.raises(OperationTimeout, match=r"version 1 was not complete after 5 s on rank\(s\) \[1\]") as caught:
            _ = call.number
        assert caught.value.memory == "torn"


def let_fail(cluster: StepwiseCluster, asked: CallRecord, reasons: dict[str, str]) -> None:
    """Each read ends as its source's reason says, until the call does."""
    while not asked.done:
        for choice in [c for c in cluster.choices() if c.kind != "read"]:
            cluster.do(choice)
        pull = asked.handle.pull
        for lease, grant in list(pull.grants.items()) if pull is not None else []:
            asked.handle.source_ended(lease, reasons[grant.source])
        cluster.advance(0.05, run=False)


@pytest.mark.parametrize("last", ["corrupt", "stalled"])
def test_bad_digests_from_every_source_are_an_integrity_error(last: str) -> None:
    cluster, _, reader = trainer_and_reader()
    other = cluster.handle("other")
    cluster.run()
    other.replicate()
    cluster.run()
    asked = reader.replicate(timeout_s=5)
    let_fail(cluster, asked, {"trainer": "corrupt", "other": last})
    assert isinstance(asked.error, IntegrityError if last == "corrupt" else VersionUnavailable | OperationTimeout)
    assert (asked.error.retryable, asked.error.memory) == (True, "torn")
    for says in ("version 1", "reads that failed", "worker 'trainer': corrupt", f"worker 'other': {last}"):
        assert says in str(asked.error)


def test_a_rank_without_a_sound_source_is_its_groups_cause() -> None:
    cluster = StepwiseCluster()
    trainers, readers = cluster.group("trainer", 2), cluster.group("reader", 2)
    cluster.run()
    for handle in trainers:
        handle.publish(1)
    cluster.run()
    sound, bad = [handle.replicate(timeout_s=5) for handle in readers]
    let_fail(cluster, bad, {"trainer1": "corrupt"})
    cluster.run()
    assert isinstance(bad.error, IntegrityError)
    assert isinstance(sound.error, GroupAborted)
    assert sound.error.causes == {1: str(bad.error)}
    assert (sound.error.retryable, sound.error.memory) == (True, "torn")


def test_a_source_on_the_same_host_is_preferred() -> None:
    cluster = StepwiseCluster()
    trainer = cluster.handle("trainer")
    near = cluster.worker("near", Location(host="h1")).register("near")
    reader = cluster.worker("reader", Location(host="h1")).register("reader")
    cluster.run()
    trainer.publish(1)
    cluster.run()
    near.replicate()
    cluster.run()
    reader.replicate()
    cluster.run()
    assert any("reader <- Start" in line and ":near(" in line for line in cluster.log)


def test_without_a_transport_in_common_nothing_is_overwritten() -> None:
    """R7: the only holder speaks another transport; the old version stays."""
    cluster = StepwiseCluster()
    trainer = cluster.worker("trainer", transports=("rdma", "tcp")).register("trainer")
    reader = cluster.handle("reader")
    cluster.run()
    trainer.publish(1)
    cluster.run()
    reader.replicate()
    cluster.run()
    trainer.unpublish()
    cluster.run()
    other = cluster.worker("other", transports=("rdma",)).register("other")
    cluster.run()
    other.publish(2)
    cluster.run()
    asked = reader.update()
    cluster.run()
    with pytest.raises(TransportUnavailable, match="rank 0 has tcp, and version 2 is offered over rdma") as caught:
        _ = asked.number
    assert caught.value.memory == "intact"
    assert reader.member.version == 1


@pytest.mark.parametrize(("host", "found"), [("here", True), ("elsewhere", False)])
def test_a_transport_of_one_host_is_none_in_common_with_another_host(host: str, found: bool) -> None:
    cluster = StepwiseCluster()
    trainer = cluster.worker("trainer", Location(host="here"), transports=("cma",)).register("trainer")
    reader = cluster.worker("reader", Location(host=host), transports=("cma",)).register("reader")
    cluster.run()
    trainer.publish(1)
    cluster.run()
    asked = reader.replicate()
    cluster.run()
    if found:
        assert asked.number == 1
    else:
        with pytest.raises(TransportUnavailable, match="rank 0 has cma, and version 1 is offered over cma only"):
            _ = asked.number


def test_nothing_is_overwritten_while_its_only_source_is_suspected() -> None:
    cluster, trainer, reader = trainer_and_reader()
    trainer.worker.disconnect()
    cluster.run()
    asked = reader.replicate(timeout_s=5)
    cluster.run()
    assert reader.member.state is HandleState.EMPTY
    cluster.advance(6)
    assert isinstance(asked.error, VersionUnavailable)
    assert "no holder of version 1 can be reached now" in str(asked.error)
    assert asked.error.memory == "intact"


def test_replicate_over_published_memory_is_refused_here() -> None:
    _, trainer, _ = trainer_and_reader()
    with pytest.raises(StateError, match=r"holds version 1: update\(\) replaces it"):
        trainer.replicate()


def test_a_source_given_up_unheard_is_not_taken_for_another_one() -> None:
    """The reader's word is lost with its connection, and the coordinator speaks of that lease once more."""
    cluster, trainer, reader = trainer_and_reader()
    asked = reader.replicate()
    while reader.pull is None:
        cluster.do(cluster.choices()[0])
    (lease,) = reader.pull.grants
    reader.worker.disconnect()
    reader.source_ended(lease, "lost")
    while cluster.choices():
        cluster.do(cluster.choices()[0])
    reader.worker.connect()
    cluster.advance(1.0)
    assert asked.number == 1
    assert sum(f"-> ReadFailed key=reader@1.2#0 rank=0 lease={lease} " in line for line in cluster.log) == 1
    assert reader.cells == trainer.cells


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


@pytest.mark.parametrize(("transports", "sources"), [(("tcp",), 3), (("cma", "tcp"), 1)])
def test_readers_that_copy_out_of_memory_need_no_chain(
    monkeypatch: pytest.MonkeyPatch, transports: tuple[str, ...], sources: int
) -> None:
    """Over sockets the source's host would send the same bytes three times; who copies is in nobody's way."""
    monkeypatch.setattr(source_choice, "LATENCY_S", (0.0, 0.0, 0.0, 0.0))
    cluster = StepwiseCluster()
    for name in ("trainer", "a", "b", "c"):
        cluster.worker(name, Location(host="one"), transports)
    trainer, *readers = (cluster.handle(name) for name in ("trainer", "a", "b", "c"))
    cluster.run()
    trainer.publish(1)
    cluster.run()
    for reader in readers:
        reader.replicate()
        while steps := [step for step in cluster.choices() if step.kind != "read"]:
            cluster.do(steps[0])
    leases = cluster.coordinator.cluster.leases.values()
    assert len({lease.holding.member.worker.name for lease in leases}) == sources
    cluster.run()
    assert all(reader.cells == trainer.cells for reader in readers)
