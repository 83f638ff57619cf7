"""The selector "available": the newest version that can be fetched now (R12, G6), and what errors
say of what is held.
"""

from __future__ import annotations

import pytest

from tensorhub.errors import VersionUnavailable
from tensorhub.testing import CallRecord, SimHandle, StepwiseCluster
from tensorhub.types import HandleState
from tests.coordinator.test_partial import (
    lose,
    readers_of_a_trainer,
)
from tests.coordinator.test_recovery import reconnect


def publish(cluster: StepwiseCluster, *trainers: SimHandle, number: int) -> None:
    for handle in trainers:
        if handle.member.state is HandleState.READY:
            handle.unpublish()
    cluster.run()
    for handle in trainers:
        handle.publish(number)
    cluster.run()


def replicate(cluster: StepwiseCluster, *handles: SimHandle) -> None:
    asked = [handle.update("latest") for handle in handles]
    cluster.run()
    assert all(each.error is None for each in asked)


def newest_left() -> tuple[StepwiseCluster, SimHandle, SimHandle, SimHandle]:
    """Version 1 is held by a keeper; version 2, the newest, by nobody: its trainer has left."""
    cluster = StepwiseCluster()
    trainer, keeper, reader = (
        cluster.handle("trainer"),
        cluster.handle("keeper"),
        cluster.handle("reader"),
    )
    cluster.run()
    publish(cluster, trainer, number=1)
    replicate(cluster, keeper)
    publish(cluster, trainer, number=2)
    trainer.unpublish()
    cluster.run()
    return cluster, trainer, keeper, reader


def error_of(asked: CallRecord) -> VersionUnavailable:
    assert asked.done
    assert isinstance(asked.error, VersionUnavailable), asked.error
    return asked.error


# --------------------------------------------------------------------------------------------------
# what it resolves to


@pytest.mark.parametrize("call", ["replicate", "update", "stage", "prefetch", "fetch"])
def test_it_is_the_newest_that_is_held_where_latest_waits_for_one_that_nobody_holds(
    call: str,
) -> None:
    cluster, _, _, reader = newest_left()
    cluster.host_bytes = 10**9
    if call in ("stage", "prefetch"):
        reader = cluster.handle("rich")
        cluster.run()
    waits = reader if call != "fetch" else cluster.fetcher("reader")
    asked = getattr(waits, call)("available")
    cluster.run()
    assert (asked.number, asked.changed) == (1, True)
    late = cluster.handle("late")
    cluster.run()
    latest = late.replicate("latest")
    cluster.run()
    assert not latest.has_ended()


def test_it_is_latest_where_somebody_holds_that() -> None:
    cluster, trainer, _, reader = newest_left()
    publish(cluster, trainer, number=3)
    asked = reader.replicate("available")
    cluster.run()
    assert asked.number == 3


def test_it_waits_while_nothing_was_ever_published() -> None:
    cluster = StepwiseCluster()
    trainer, reader = cluster.handle("trainer"), cluster.handle("reader")
    cluster.run()
    asked = reader.replicate("available")
    cluster.advance(30)
    assert not asked.has_ended()
    trainer.publish(7)
    cluster.run()
    assert asked.number == 7


def test_it_fails_at_once_where_nobody_holds_what_was_published() -> None:
    cluster, _, keeper, reader = newest_left()
    keeper.unpublish()
    cluster.run()
    asked = reader.replicate("available")
    cluster.run()
    error = error_of(asked)
    assert str(error) == (
        "no complete copy of a version of 'actor' is held, and 'available' waits for no worker; held "
        "now: no complete copy"
    )
    assert (error.retryable, error.memory) == (True, "intact")


def test_a_group_is_bound_in_one_step_to_one_version() -> None:
    cluster = StepwiseCluster()
    trainers, keepers, readers = (
        cluster.group("trainer", 2),
        cluster.group("keeper", 2),
        cluster.group("reader", 2),
    )
    cluster.run()
    publish(cluster, *trainers, number=1)
    replicate(cluster, *keepers)
    publish(cluster, *trainers, number=2)
    first = readers[0].replicate("available")  # when 2 is held
    cluster.run()
    trainers[1].unpublish()  # with one rank, version 2 is not whole any more
    cluster.run()
    second = readers[1].replicate("available")
    cluster.run()
    assert [first.number, second.number] == [1, 1]
    cluster.check_agreement()


def test_every_shard_must_be_held_by_somebody_who_is_heard_of() -> None:
    """A holder that has just died is not waited for, although its lease still runs; if there is no
    other, it is.
    """
    cluster, trainer, keeper, reader = newest_left()
    publish(cluster, trainer, number=3)
    trainer.worker.crash()
    cluster.run()
    asked = reader.replicate("available")
    cluster.run()
    assert asked.number == 1
    keeper.worker.crash()
    reader.unpublish()
    cluster.run()
    again = reader.replicate("available")
    cluster.run()
    assert not again.has_ended()  # they may be back in time
    cluster.advance(cluster.options.lease_s + 1)
    assert "held now: no complete copy" in str(error_of(again))


def test_a_silent_holder_that_is_heard_again_is_read() -> None:
    cluster = StepwiseCluster()
    trainer, reader = cluster.handle("trainer"), cluster.handle("reader")
    cluster.run()
    publish(cluster, trainer, number=1)
    trainer.worker.disconnect()
    cluster.run()
    asked = reader.replicate("available", timeout_s=30)
    cluster.run()
    assert not asked.has_ended()
    trainer.worker.connect()
    cluster.run()
    assert asked.number == 1


# -----------------------------------------------------------------------------------------------
# what the caller holds


def test_the_callers_own_copy_counts() -> None:
    cluster, trainer, _, reader = newest_left()
    publish(cluster, trainer, number=3)
    replicate(cluster, reader)
    trainer.unpublish()
    cluster.run()
    asked = reader.update("available")
    cluster.run()
    assert (asked.number, asked.changed) == (3, False)


def test_what_a_rank_holds_is_never_replaced_by_an_older_one() -> None:
    """Rank 1 of a reader is a new process, and nobody else holds its shard of version 2: version 1
    can be fetched.
    """
    cluster = StepwiseCluster()
    trainers, keepers, readers = (
        cluster.group("trainer", 2),
        cluster.group("keeper", 2),
        cluster.group("reader", 2),
    )
    cluster.run()
    publish(cluster, *trainers, number=1)
    replicate(cluster, *keepers)
    publish(cluster, *trainers, number=2)
    replicate(cluster, *readers)
    for handle in trainers:
        handle.unpublish()
    cluster.run()
    readers[1].worker.crash()
    cluster.advance(cluster.options.lease_s + 1)
    newcomer = cluster.handle("newcomer", "reader", 1, 2)
    cluster.run()
    calls = [readers[0].update("available"), newcomer.update("available")]
    cluster.run()
    for asked in calls:
        assert str(error_of(asked)) == (
            "no complete copy of version 2 of 'actor' or a newer one is held, and 'available' waits "
            "for no worker; held now: "
            "version 1 by 1 replica; a rank of this group holds version 2, which 'available' never "
            "replaces by an older "
            "one: call unpublish() on it first, or give the number of that version"
        )
    assert readers[0].member.version == 2
    named = [readers[0].update(1), newcomer.update(1)]
    cluster.run()
    assert [asked.number for asked in named] == [1, 1]


def test_after_a_rollback_an_older_version_of_the_new_lineage_may_replace_what_was_held() -> None:
    cluster, trainer, _, reader = newest_left()
    publish(cluster, trainer, number=3)
    replicate(cluster, reader)
    trainer.worker.asks.rollback(1)
    cluster.run()
    asked = reader.update("available")
    cluster.run()
    assert asked.number == 1


def test_the_error_names_the_shards_that_nobody_holds() -> None:
    cluster = StepwiseCluster()
    trainer, readers = cluster.group("trainer", 2), cluster.group("reader", 2)
    cluster.run()
    publish(cluster, *trainer, number=1)
    trainer[0].worker.crash()
    cluster.run()
    cluster.advance(cluster.options.lease_s + 1)
    asked = [each.replicate("available") for each in readers]
    cluster.run()
    assert (
        "(of version 1, in the published layout, no worker has all of the shards of ranks 0)"
        in str(error_of(asked[0]))
    )


def test_a_version_that_a_rollback_has_made_the_newest_and_nobody_holds_is_not_waited_for() -> None:
    """It was published, and forgotten since: nothing is left of this lineage."""
    cluster = StepwiseCluster()
    trainer, reader = cluster.handle("trainer"), cluster.handle("reader")
    cluster.run()
    for number in range(1, 6):
        publish(cluster, trainer, number=number)
    trainer.worker.asks.rollback(2)
    cluster.run()
    asked = reader.replicate("available")
    cluster.run()
    assert "held now: no complete copy" in str(error_of(asked))


def test_what_a_rollback_is_about_to_retire_is_not_offered() -> None:
    cluster = StepwiseCluster()
    trainer, keepers = cluster.handle("trainer"), [cluster.handle(name) for name in ("one", "two")]
    reader = cluster.handle("reader")
    cluster.run()
    for number, keeper in enumerate(keepers, 1):
        publish(cluster, trainer, number=number)
        replicate(cluster, keeper)
    publish(cluster, trainer, number=3)
    asked = reader.replicate(3)
    cluster.run("read")
    trainer.worker.asks.rollback(1)
    cluster.run("read")
    text = str(error_of(asked))
    assert "held now: version 1 by 1 replica; the selector 'available' gets 1" in text
    assert "version 2" not in text


# --------------------------------------------------------------------------------------------------
# at_least


def test_at_least_waits_for_that_number_and_fails_at_once_where_nobody_holds_it() -> None:
    cluster, trainer, _, reader = newest_left()
    gone = reader.update("available", at_least=2)
    cluster.run()
    assert "no complete copy of version 2 of 'actor' or a newer one" in str(error_of(gone))
    asked = reader.update("available", at_least=3)
    cluster.run()
    assert not asked.has_ended()
    publish(cluster, trainer, number=3)
    assert asked.number == 3


def test_at_least_that_never_comes_says_so() -> None:
    cluster, _, _, reader = newest_left()
    asked = reader.update("available", at_least=5, timeout_s=2)
    cluster.advance(3)
    text = str(error_of(asked))
    assert (
        "version 5 of 'actor' was not published; the newest is 2; held now: version 1 by 1 replica"
        in text
    )


# -------------------------------------------------------------------------------------------------
# partial copies (G6)


def left_in_parts(
    *backwards: bool, keeper: bool = True
) -> tuple[StepwiseCluster, list[SimHandle], list[CallRecord], SimHandle]:
    """Version 1 is left in partial copies of these readers; version 0 is held by a keeper."""
    cluster, trainer, readers, asked = readers_of_a_trainer(*backwards, keeper=keeper)
    late = cluster.handle("late")
    cluster.run("read")
    lose(cluster, trainer, readers)
    return cluster, readers, asked, late


def test_partial_copies_do_not_count_even_if_together_they_are_whole() -> None:
    cluster, readers, asked, late = left_in_parts(False, True)
    mine = late.replicate("available")
    cluster.run("read")
    assert late.member.state is HandleState.FILLING
    assert [reader.member.state for reader in readers] == [HandleState.FILLING] * 2
    cluster.run()
    assert mine.number == 0
    # readers that are bound complete each other all the same
    assert [each.number for each in asked] == [1, 1]


def test_partial_copies_and_nothing_else_are_nothing() -> None:
    cluster, _, _, late = left_in_parts(False, True, keeper=False)
    mine = late.replicate("available")
    cluster.run("read")
    assert "held now: no complete copy" in str(error_of(mine))


# -------------------------------------------------------------------------------------------------
# lost once it is bound


# --------------------------------------------------------------------------------------------------
# after a restart


def restarted(*, but: str) -> tuple[StepwiseCluster, SimHandle, SimHandle]:
    """Version 2 is held by the trainer only, version 1 by a keeper; the coordinator has restarted,
    and one is not back.
    """
    cluster = StepwiseCluster()
    trainer, keeper, reader = (
        cluster.handle("trainer"),
        cluster.handle("keeper"),
        cluster.handle("reader"),
    )
    cluster.run()
    publish(cluster, trainer, number=1)
    replicate(cluster, keeper)
    publish(cluster, trainer, number=2)
    cluster.restart()
    reconnect(cluster, but=but)
    cluster.run()
    return cluster, trainer, reader


def test_after_a_restart_the_recorded_holder_of_a_newer_version_is_waited_for() -> None:
    cluster, trainer, reader = restarted(but="trainer")
    asked = reader.replicate("available")
    cluster.advance(cluster.options.lease_s / 4)
    assert not asked.has_ended()
    trainer.worker.connect()
    cluster.run()
    assert asked.number == 2


def test_after_a_restart_it_is_waited_for_until_the_recovery_lease_is_over() -> None:
    cluster, trainer, reader = restarted(but="trainer")
    trainer.worker.crash()
    asked = reader.replicate("available")
    cluster.advance(cluster.options.lease_s * 0.9)
    assert not asked.has_ended()
    cluster.advance(cluster.options.lease_s * 0.2)
    assert asked.number == 1


# --------------------------------------------------------------------------------------------------
# errors


def test_latest_that_ends_says_what_is_held_by_how_many_and_which_selector_gets_it() -> None:
    cluster, _, _, reader = newest_left()
    other = cluster.handle("other")
    cluster.run()
    other.replicate(1)
    cluster.run()
    asked = reader.replicate("latest", timeout_s=5)
    cluster.advance(6)
    assert str(error_of(asked)) == (
        "replicate of 'actor': no live worker holds 'latest' of 'actor' (the newest version is 2); "
        "held now: version 1 by 2 "
        "replicas; the selector 'available' gets 1; waited 5 s"
    )


def test_who_holds_it_is_told_that_it_does() -> None:
    cluster, _, keeper, reader = newest_left()
    other = cluster.handle("other")
    cluster.run()
    other.replicate(1)
    cluster.run()

    def told(asked: CallRecord) -> str:
        cluster.run()
        return str(error_of(asked)).rpartition("held now: ")[2]

    assert told(other.update(9)) == "version 1 by this group and 1 other replica"
    assert told(reader.update(9)) == "version 1 by 2 replicas; the selector 'available' gets 1"
    keeper.unpublish()
    cluster.run()
    assert told(other.update(9)) == "version 1 by this group itself"
    assert told(reader.update(9)) == "version 1 by 1 replica; the selector 'available' gets 1"


def test_a_number_that_does_not_exist_says_what_is_held() -> None:
    cluster, _, _, reader = newest_left()
    asked = reader.replicate(9)
    cluster.run()
    assert (
        "wait_for() waits for a version; held now: version 1 by 1 replica; the selector 'available'"
        in str(asked.error)
    )


def test_only_the_newest_few_are_named() -> None:
    cluster = StepwiseCluster()
    trainer = cluster.handle("trainer")
    keepers = [cluster.handle(f"keeper{number}") for number in range(5)]
    reader = cluster.handle("reader")
    cluster.run()
    for number, keeper in enumerate(keepers):
        publish(cluster, trainer, number=number)
        replicate(cluster, keeper)
    trainer.unpublish()
    cluster.run()
    asked = reader.replicate(9)
    cluster.run()
    told = (
        "held now: version 4 by 1 replica, version 3 by 1 replica, version 2 by 1 replica and 2 "
        "older; the selector"
    )
    assert f"{told} 'available' gets 4" in str(asked.error)
