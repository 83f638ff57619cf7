"""As `test_checks`, for what memory holds, fences and deadlines: each check sees a deliberate bug,
and nothing else.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager

import pytest

from tensorhub.errors import DrainTimeout
from tensorhub.testing import CHUNK_BYTES, CHUNKS, GuaranteeBroken, SimHandle, StepwiseCluster
from tensorhub.testing.sim import misdeeds
from tensorhub.testing.sim.layouts import Layout
from tensorhub.testing.sim.memory import make_manifest
from tensorhub.types import HandleState
from tensorhub.worker.owner import Owner
from tests.testing.bugs import inside, outside, replaced

Scenario = Callable[[], None]
Bug = Callable[[], AbstractContextManager[None]]


def published(
    *readers: str, host_bytes: int = 0
) -> tuple[StepwiseCluster, SimHandle, list[SimHandle]]:
    """A trainer that has published version 1, and readers that hold nothing."""
    cluster = StepwiseCluster(manifest=make_manifest(CHUNKS, "xxh3-64"), host_bytes=host_bytes)
    trainer, *others = (cluster.handle(name) for name in ("trainer", *readers))
    cluster.run()
    trainer.publish(1)
    cluster.run()
    return cluster, trainer, others


def read_one_chunk(cluster: StepwiseCluster, reader: SimHandle) -> None:
    cluster.run("read")
    assert reader.pull is not None
    while reader.pull.books.chunks_verified == 0:
        cluster.read(reader)


def a_source_is_lost_half_way() -> None:
    cluster, _, (other, reader) = published("other", "reader")
    other.replicate()
    cluster.run()
    reader.replicate()
    read_one_chunk(cluster, reader)
    assert reader.pull is not None
    next(iter(reader.pull.lanes.values())).end("lost")
    cluster.advance(1.0)
    assert reader.member.version == 1


def a_broken_fill_is_begun_again() -> None:
    cluster, _, (reader,) = published("reader")
    reader.replicate()
    read_one_chunk(cluster, reader)
    reader.cancel()
    cluster.run()
    assert reader.member.state is HandleState.TORN
    reader.replicate()
    cluster.run()
    assert reader.member.version == 1


def an_update_is_staged() -> None:
    cluster, trainer, (reader,) = published("reader", host_bytes=CHUNKS * CHUNK_BYTES)
    reader.replicate()
    cluster.run()
    trainer.unpublish()
    cluster.run()
    trainer.publish(2)
    cluster.run()
    reader.stage()
    cluster.run()
    assert reader.member.version == 2


def a_call_waits_without_a_connection() -> None:
    cluster, _, (reader,) = published("reader")
    reader.worker.disconnect()
    reader.replicate(timeout_s=5)
    cluster.advance(30.0)
    cluster.guarantees.check_in_time(reader)


def an_owner_that_is_cut_off_leaves() -> None:
    cluster, trainer, _ = published()
    trainer.worker.asks.retain(1)
    cluster.run()
    trainer.worker.disconnect()
    asked = trainer.unpublish(timeout_s=100)
    cluster.advance(2 * cluster.options.lease_s)
    assert asked.done
    assert asked.error is None


def the_only_source_is_lost_while_an_engine_pauses() -> None:
    cluster, trainer, (reader,) = published("reader")
    reader.replicate("latest", hold=True)
    cluster.run("hook")
    trainer.worker.crash()
    cluster.run("hook")
    cluster.run()
    assert not reader.idle


def a_request_is_late_for_a_fence_that_was_given_up() -> None:
    cluster, trainer, (reader,) = published("reader")
    trainer.hold_access()
    reader.replicate()
    cluster.run("read")
    asked = trainer.unpublish(timeout_s=1)
    while not asked.done:  # it does not hear of the leave
        cluster.run("read", ("down", "reader"))
        cluster.advance(0.5, run=False)
    assert isinstance(asked.error, DrainTimeout)
    assert trainer.member.state is HandleState.READY
    cluster.run()
    assert reader.pull is not None
    assert not reader.pull.lanes


def a_publisher_that_has_changed_its_memory_connects_again() -> None:
    cluster, trainer, (reader,) = published("reader")
    reader.replicate()
    read_one_chunk(cluster, reader)
    trainer.cells[0] = "changed"
    cluster.guarantees.contents.spoil(
        trainer, cluster.guarantees.contents.numbers["actor"][1], 0, "changed"
    )
    assert reader.pull is not None
    next(iter(reader.pull.lanes.values())).end("corrupt", 0)
    cluster.run("read")
    assert trainer.changed
    trainer.worker.disconnect()
    trainer.worker.connect()
    cluster.run("read")


def three_share_room_for_two() -> None:
    """Two have prefetched version 1; then the third stages version 2, which a caller waits for."""
    cluster, trainer, _ = published()
    cluster.host_bytes = 2 * CHUNKS * CHUNK_BYTES
    worker = cluster.worker("host")
    first, second, third = [worker.register(f"g{number}") for number in range(3)]
    cluster.run()
    prefetched = [first.prefetch(), second.prefetch()]
    third.replicate()
    cluster.run()
    assert [asked.number for asked in prefetched] == [1, 1]
    trainer.unpublish()
    cluster.run()
    trainer.publish(2)
    cluster.run()
    third.stage()
    cluster.run()
    assert third.member.version == 2


@pytest.mark.parametrize(
    ("scenario", "bug", "says"),
    [
        (
            a_source_is_lost_half_way,
            outside.verified_chunks_asked_again,
            "resume: .* reads chunk 0 again",
        ),
        (
            a_broken_fill_is_begun_again,
            lambda: replaced(Owner, "kept", lambda *_: []),
            "partial fills: .* forgets the chunks",
        ),
        (
            an_update_is_staged,
            outside.staged_update_overwrites_early,
            "update destroys last: .* not committed",
        ),
        (
            a_call_waits_without_a_connection,
            outside.cut_off_call_waits_for_ever,
            "bounds: .* should have ended",
        ),
        (
            an_owner_that_is_cut_off_leaves,
            outside.cut_off_owner_does_not_wait,
            "leaving: .* leaves before",
        ),
        (
            the_only_source_is_lost_while_an_engine_pauses,
            outside.overwritten_without_a_source,
            "update destroys last: .* nobody is said",
        ),
        (
            a_request_is_late_for_a_fence_that_was_given_up,
            outside.request_of_an_old_generation_served,
            "incarnations: .* asked of generation",
        ),
        (
            a_publisher_that_has_changed_its_memory_connects_again,
            outside.spoiled_memory_announced,
            "digests: .* bytes have changed",
        ),
        (
            three_share_room_for_two,
            inside.newest_copy_goes,
            "host copies: .* has to go for use, .* is older",
        ),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_its_check_sees(scenario: Scenario, bug: Bug, says: str) -> None:
    scenario()
    with bug(), pytest.raises(GuaranteeBroken, match=says):
        scenario()


def test_a_rank_may_follow_one_whose_leave_was_granted_before_the_version_was_to_be_kept() -> None:
    cluster = StepwiseCluster()
    ranks, reader = cluster.group("writers", 2), cluster.fetcher("reader", 0)
    cluster.run()
    for rank in ranks:
        rank.publish(1)
    cluster.advance(1.0)
    reader.fetch()
    cluster.run("read")
    first = ranks[0].unpublish()
    cluster.run("read")
    assert not first.has_ended()  # its reader has some time to go
    ranks[1].worker.asks.retain(1)
    cluster.run("read")
    second = ranks[1].unpublish()
    cluster.advance(30.0)
    assert first.has_ended()
    assert second.has_ended()
    assert second.error is None


def test_a_publisher_may_leave_of_whose_overwritten_memory_only_a_selection_was_digested() -> None:
    cluster = StepwiseCluster(manifest=make_manifest(CHUNKS, "xxh3-64"))
    cluster.chunks = rows = CHUNKS + 3
    trainer = cluster.worker("trainer").register("trainer", 0, 1, cut=Layout(rows, 1))
    pairs = [
        [cluster.worker(f"{name}{k}").register(name, k, 2, cut=Layout(rows, 2)) for k in range(2)]
        for name in ("one", "two")
    ]
    cluster.run()
    trainer.publish(1)
    trainer.worker.asks.retain(1)
    cluster.run()
    for rank in pairs[0]:
        rank.replicate()
    cluster.run()
    for rank in pairs[0]:
        rank.unpublish()
    cluster.run()
    assert misdeeds.overwrite(trainer)
    failed = [rank.replicate(timeout_s=5.0) for rank in pairs[1]]
    cluster.advance(10.0)
    assert all(each.error is not None for each in failed)
    asked = trainer.unpublish()
    cluster.run()
    assert asked.done  # nobody wants that any more


def waits_for_an_access() -> tuple[StepwiseCluster, SimHandle]:
    """A fill that is given up while its reader's own lane is in the memory, long after its
    deadline.
    """
    cluster, _, (reader,) = published("reader")
    asked = reader.replicate(timeout_s=5)
    read_one_chunk(cluster, reader)
    reader.hold_access()
    assert reader.access is not None
    reader.cancel()
    cluster.advance(30.0)
    assert not asked.done
    return cluster, reader


def test_a_call_whose_fence_has_waited_for_an_access_ends_a_moment_after_it() -> None:
    cluster, reader = waits_for_an_access()
    cluster.guarantees.check_in_time(reader)
    reader.end_access()
    cluster.guarantees.check_in_time(reader)  # between the access's end and the fence's
    cluster.run()
    assert reader.idle


def test_a_fence_that_does_not_notice_an_accesss_end_is_noticed() -> None:
    cluster, reader = waits_for_an_access()
    reader.end_access()
    cluster.advance(30.0, run=False)
    with pytest.raises(GuaranteeBroken, match=r"bounds: .* should have ended 30\.0 s ago"):
        cluster.guarantees.check_in_time(reader)
