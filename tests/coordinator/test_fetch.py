"""A fetch: a fill of memory that serves nobody, in a group of its own.

Covers `fills` and `membership`, for memory that serves nobody.
"""

from __future__ import annotations

import pytest

from tensorhub.coordinator import Connected, views
from tensorhub.errors import ManifestMismatch, OperationTimeout, StateError, VersionUnavailable
from tensorhub.messages import Fill, Join, Outcome, Publish, Refused, Register, Registered
from tensorhub.testing import DEVICE, MANIFEST, CallRecord, SimHandle, StepwiseCluster
from tensorhub.types import HandleState, Location, ModelInfo, OpKey, OpKind
from tests.coordinator.test_membership import answers


def published(
    readers: int = 0, world_size: int = 1
) -> tuple[StepwiseCluster, list[list[SimHandle]]]:
    """Version 1, held by a trainer's group and so many others."""
    cluster = StepwiseCluster()
    groups = [
        cluster.group(name, world_size)
        for name in ("trainer", *(f"reader{n}-" for n in range(readers)))
    ]
    cluster.run()
    for rank in groups[0]:
        rank.publish(1)
    cluster.run()
    for group in groups[1:]:
        for rank in group:
            rank.replicate()
    cluster.run()
    return cluster, groups


def in_mid_read(
    cluster: StepwiseCluster, fetcher: SimHandle, selector: int | str = "latest"
) -> CallRecord:
    asked = fetcher.fetch(selector)
    cluster.run(until=lambda: fetcher.pull is not None and len(fetcher.pull.missing) == 1)
    return asked


def described(cluster: StepwiseCluster) -> ModelInfo:
    return views.describe(cluster.coordinator.cluster.models["actor"], cluster.now)[0]


def assert_nothing_is_left(cluster: StepwiseCluster, groups: list[list[SimHandle]]) -> None:
    model = cluster.coordinator.cluster.models["actor"]
    assert list(model.groups) == [group[0].shard.group for group in groups]
    assert not cluster.coordinator.cluster.leases
    assert not [*model.waiting.unbound, *model.waiting.restless, *model.waiting.flexible]
    assert {handle for handle in cluster.all_handles() if not handle.shard.serves} == set()
    assert not [
        name
        for name in cluster.coordinator.cluster.timers._when
        if name[0] in ("operation", "retry")
    ]


@pytest.mark.parametrize("rank", [0, 1])
def test_any_rank_is_fetched_by_one(rank: int) -> None:
    cluster, groups = published(world_size=2)
    asked = cluster.fetcher("reader", rank).fetch()
    cluster.run()
    assert (asked.number, asked.changed) == (1, True)
    assert asked.handle.cells == groups[0][rank].cells
    assert_nothing_is_left(cluster, groups)


def test_a_rank_that_is_not_there_is_refused() -> None:
    cluster, groups = published(world_size=2)
    asked = cluster.fetcher("reader", 2).fetch()
    cluster.run()
    with pytest.raises(
        ManifestMismatch,
        match="has no rank 2: its world_size is 2, so fetch one of the ranks 0 to 1",
    ):
        _ = asked.number
    assert_nothing_is_left(cluster, groups)


def test_it_is_no_replica_no_source_and_its_lease_is_shown() -> None:
    cluster, groups = published(world_size=2)
    fetcher = cluster.fetcher("reader", 1)
    in_mid_read(cluster, fetcher)
    info = cluster.coordinator.cluster.models["actor"]
    assert [len(holdings) for holdings in info.versions[1].holdings.values()] == [1, 1]
    (lease,) = described(cluster).leases
    assert (lease.reader, lease.source, lease.version, lease.rank) == ("reader", "trainer1", 1, 1)
    assert [replica.group for replica in described(cluster).replicas] == ["trainer"]
    cluster.run()
    assert_nothing_is_left(cluster, groups)


def test_it_waits_for_a_version_and_takes_the_newest() -> None:
    cluster = StepwiseCluster()
    asked = cluster.fetcher("reader").fetch()
    trainer = cluster.handle("trainer")
    cluster.run()
    assert not asked.done
    trainer.publish(4)
    cluster.run()
    assert asked.number == 4


def test_a_version_that_never_comes_is_named_with_the_call() -> None:
    cluster = StepwiseCluster()
    asked = cluster.fetcher("reader").fetch(timeout_s=2)
    cluster.advance(3)
    with pytest.raises(VersionUnavailable, match="fetch of 'actor': nothing was published"):
        _ = asked.number


@pytest.mark.parametrize("how", ["leaves", "crashes"])
def test_it_goes_on_elsewhere_when_its_source_is_gone(how: str) -> None:
    cluster, groups = published(readers=1)
    fetcher = cluster.fetcher("fetcher")
    asked = in_mid_read(cluster, fetcher)
    (lease,) = described(cluster).leases
    source = next(group[0] for group in groups if group[0].worker.name == lease.source)
    source.unpublish() if how == "leaves" else source.worker.crash()
    cluster.advance(11)
    assert asked.number == 1
    assert f"{lease.source} crashes" in str(cluster.log) or source.member.state is HandleState.EMPTY


def test_the_only_source_leaves_in_mid_read() -> None:
    cluster, groups = published()
    fetcher = cluster.fetcher("fetcher")
    asked = in_mid_read(cluster, fetcher, 1)
    fetcher.source_ended(next(iter(fetcher.pull.grants)) if fetcher.pull else "", "stalled")
    groups[0][0].unpublish()
    cluster.advance(11)
    with pytest.raises(VersionUnavailable, match="its last holder has left on purpose"):
        _ = asked.number
    assert_nothing_is_left(cluster, groups)


def test_cancelled_in_mid_read() -> None:
    cluster, groups = published()
    fetcher = cluster.fetcher("fetcher")
    asked = in_mid_read(cluster, fetcher)
    fetcher.cancel()
    cluster.run()
    with pytest.raises(StateError, match="cancelled"):
        _ = asked.number
    assert_nothing_is_left(cluster, groups)


def test_a_deadline_passes_in_mid_read() -> None:
    cluster, groups = published()
    fetcher = cluster.fetcher("fetcher")
    asked = in_mid_read(cluster, fetcher)
    assert fetcher.pull is not None
    for lane in fetcher.pull.lanes.values():
        lane.let_go()
        lane.queue.clear()  # it reads no more, and says nothing
    cluster.advance(61)
    with pytest.raises(
        OperationTimeout, match="fetch of 'actor': version 1 was not complete after 60 s"
    ):
        _ = asked.number
    assert_nothing_is_left(cluster, groups)


def test_what_is_verified_needs_nobodys_decision() -> None:
    cluster, _ = published()
    fetcher = cluster.fetcher("fetcher")
    asked = in_mid_read(cluster, fetcher)
    fetcher.worker.disconnect()
    while not asked.done:
        cluster.do(next(choice for choice in cluster.choices() if choice.name == fetcher.name))
    assert asked.number == 1
    fetcher.worker.connect()
    cluster.heal()  # what the coordinator was not told, it finds out
    assert list(cluster.coordinator.cluster.models["actor"].groups) == ["trainer"]


# ---------------------------------------------------------------------------------- a peer that
# says nonsense

REGISTER = Register(1, "odd", "actor", "odd", 0, 0, 1, False, False, *DEVICE, "", 0, 0, b"", None)


def say(
    cluster: StepwiseCluster, register: Register, *calls: type[Fill] | type[Publish] | OpKind
) -> list[object]:
    cluster.coordinator.step(Connected(77, "x.1", "worker"), 0.0)
    said = answers(cluster, 77, Join("x", Location(), (), 1, 0), register)
    (answer,) = [each for each in said if isinstance(each, Registered | Refused)]
    if isinstance(answer, Registered):
        key = OpKey("actor", register.group, answer.epoch, answer.sequence)
        for call in calls:
            if isinstance(call, OpKind):
                message: Fill | Publish = Fill(key, 0, "odd", call, 1, None, 7, False, False, 60.0)
            else:
                message = Publish(key, 0, "odd", 9, 7, 60.0)
            said += answers(cluster, 77, message)
    cluster.coordinator.check_invariants()
    return said


@pytest.mark.parametrize(("serves", "shard", "world_size"), [(True, 1, 2), (False, 0, 2)])
def test_a_shard_that_cannot_be_is_refused(serves: bool, shard: int, world_size: int) -> None:
    cluster, _ = published()
    odd = Register(
        1,
        "odd",
        "actor",
        "odd",
        0,
        shard,
        world_size,
        serves,
        False,
        *DEVICE,
        "",
        8,
        2,
        MANIFEST.encode(),
        None,
    )
    (refused,) = [each for each in say(cluster, odd) if isinstance(each, Refused)]
    assert refused.error.kind == "RegistrationError"


def test_memory_that_serves_nobody_holds_nothing() -> None:
    cluster, groups = published()
    content = groups[0][0].member.content
    assert content is not None
    odd = Register(
        1,
        "odd",
        "actor",
        "odd",
        0,
        0,
        1,
        False,
        False,
        *DEVICE,
        "",
        0,
        0,
        b"",
        content.held(told=True),
    )
    (answer,) = [each for each in say(cluster, odd) if isinstance(each, Registered)]
    assert not answer.keep


@pytest.mark.parametrize("call", [Publish, OpKind.REPLICATE, OpKind.UPDATE])
def test_memory_that_serves_nobody_only_fetches(call: type[Publish] | OpKind) -> None:
    cluster, _ = published()
    (outcome,) = [each for each in say(cluster, REGISTER, call) if isinstance(each, Outcome)]
    assert outcome.error is not None
    assert (outcome.committed, outcome.error.kind) == (False, "StateError")


def test_memory_that_serves_does_not_fetch() -> None:
    cluster, _ = published()
    odd = Register(
        1, "odd", "actor", "odd", 0, 0, 1, True, False, *DEVICE, "", 8, 2, MANIFEST.encode(), None
    )
    (outcome,) = [each for each in say(cluster, odd, OpKind.FETCH) if isinstance(each, Outcome)]
    assert outcome.error is not None
    assert outcome.error.kind == "StateError"
