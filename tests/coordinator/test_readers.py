"""Who reads from whom: leases, sources that fail, leave or are lost, and what readers tell of links
(R7, R9, G9).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import replace

import pytest

from tensorhub.coordinator.readers import RETRY_S_FIRST
from tensorhub.coordinator.views import describe
from tensorhub.errors import (
    TransportUnavailable,
    VersionUnavailable,
)
from tensorhub.messages import (
    Flow,
    Heartbeat,
    Progress,
)
from tensorhub.scheduler import choice as source_choice
from tensorhub.scheduler.links import Distance
from tensorhub.testing import CallRecord, SimHandle, StepwiseCluster
from tensorhub.types import DeltaUse, HandleState, Location, Purpose
from tests.coordinator.test_fills import trainer_and_reader
from tests.coordinator.test_membership import published, worker_state
from tests.coordinator.test_resumption import published as groups_of

SITE = Distance.SITE


class Readers:
    """A trainer, and readers in other racks of its site that have all been granted a source, and
    have read nothing.
    """

    def __init__(self, count: int, *, fetch: bool = False) -> None:
        self.cluster = StepwiseCluster()
        for number in range(count + 1):
            self.cluster.worker(
                f"w{number}", Location(rack=f"rack {number}", host=f"host {number}")
            )
        self.trainer = self.cluster.handle("w0")
        make: Callable[[str], SimHandle] = self.cluster.fetcher if fetch else self.cluster.handle
        self.handles = [make(f"w{number}") for number in range(1, count + 1)]
        self.cluster.run()
        self.trainer.publish(1)
        self.cluster.run()
        self.asked: list[CallRecord] = []
        for reader in self.handles:
            self.asked.append(reader.fetch() if fetch else reader.replicate())
            self.let_all_but_reads_happen()

    def let_all_but_reads_happen(self) -> None:
        self.cluster.run("read")

    def lease(self, number: int) -> str:
        reader = self.handles[number]
        leases = self.cluster.coordinator.cluster.leases.values()
        return next(lease.id for lease in leases if lease.part.member.registration == reader.id)

    def tells(self, number: int, *flows: Flow) -> None:
        """A reader says how far it is."""
        key = self.asked[number].key
        assert key is not None
        self.handles[number].worker.say(Progress(key, 0, 0, 0, flows))
        self.let_all_but_reads_happen()

    def flows(self, number: int, nbytes: int, seconds: float) -> None:
        self.tells(number, Flow(self.lease(number), nbytes, seconds))

    @property
    def rate(self) -> float:
        """What a link within the site is taken to carry."""
        known = self.cluster.coordinator.cluster
        return known.links.rates(known.now)[SITE]


def test_a_running_read_says_whether_it_gets_deltas() -> None:
    readers = Readers(2)
    models = readers.cluster.coordinator.cluster.models.values()
    readers.tells(0, Flow(readers.lease(0), 10**6, 1.0, DeltaUse.USED))
    (info,) = [describe(model, readers.cluster.now)[0] for model in models]
    assert [view.deltas for view in info.leases] == [DeltaUse.USED, DeltaUse.UNDECIDED]


@pytest.mark.parametrize("purpose", [Purpose.USE, Purpose.ARCHIVE])
def test_a_slow_read_from_an_archive_says_nothing_of_links_nor_of_workers(purpose: Purpose) -> None:
    """It waits for its bucket. What comes fast tells that the link can."""
    readers = Readers(3)
    known = readers.cluster.coordinator.cluster
    before = readers.rate
    for number in range(3):
        lease = known.leases[readers.lease(number)]
        member = lease.holding.member
        member.said = replace(member.said, purpose=purpose)
        known.reckon(lease.holding)
        readers.flows(number, 10**6, 10.0)
    is_slower = readers.rate < before
    assert is_slower is (purpose is Purpose.USE)
    assert not any(worker.slowness for worker in known.workers.values())
    if purpose is Purpose.ARCHIVE:
        for number in range(3):
            readers.flows(number, int(100 * before), 20.0)
        assert readers.rate > before


def test_a_lost_source_is_replaced_and_nothing_verified_is_read_again() -> None:
    cluster, _, reader = trainer_and_reader()
    second = cluster.handle("second")
    cluster.run()
    second.replicate()
    cluster.run()
    asked = reader.replicate()
    cluster.run(until=lambda: reader.pull is not None and len(reader.pull.missing) == 1)
    assert reader.pull is not None
    (grant,) = reader.pull.grants.values()
    cluster.find(grant).worker.crash()  # type: ignore[union-attr]
    before = len(cluster.log)
    cluster.run()
    cluster.advance(1)
    assert asked.number == 1
    assert any("reader <- AddSource" in line for line in cluster.log[before:])
    assert len(reader.pull.missing) == 0


def test_a_source_that_is_given_up_while_nobody_could_hear_it_is_not_read_under_the_same_lease_again() -> (
    None
):
    cluster, _, reader = trainer_and_reader()
    asked = reader.replicate()
    cluster.run(until=lambda: reader.pull is not None and len(reader.pull.missing) == 1)
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
    cluster.run(until=lambda: reader.pull is not None)
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


def test_each_rank_tries_its_source_again_at_its_own_time() -> None:
    cluster, _ = groups_of(2)
    ranks = cluster.group("reader", 2)
    cluster.run()
    for rank in ranks:
        rank.replicate()

    def granted(seconds: float) -> list[bool]:
        cluster.advance(seconds, run=False)
        cluster.run("read")
        return [rank.pull is not None and bool(rank.pull.grants) for rank in ranks]

    def fails(*failing: SimHandle) -> None:
        for rank in failing:
            assert rank.pull is not None
            rank.source_ended(next(iter(rank.pull.grants)), "stalled")
        cluster.run("read")

    assert granted(0.0) == [True, True]
    fails(ranks[1])
    assert granted(RETRY_S_FIRST) == [True, True]
    fails(*ranks)  # the second one waits twice as long now
    assert granted(0.0) == [False, False]
    assert granted(RETRY_S_FIRST) == [True, False]
    assert granted(RETRY_S_FIRST) == [True, True]


def test_what_has_failed_less_is_read_first() -> None:
    """However near it is: it may come back again and again, and fail each time."""
    cluster = StepwiseCluster()
    trainer = cluster.handle("trainer")
    near = cluster.worker("near", Location(host="h1")).register("near")
    reader = cluster.worker("reader", Location(host="h1")).register("reader")
    cluster.run()
    trainer.publish(1)
    cluster.run()
    near.replicate()
    cluster.run()
    asked = reader.replicate()
    read_from = []
    for reason in ("stalled", "dropped", "stalled"):
        while reader.pull is None or not reader.pull.grants:
            for choice in [c for c in cluster.choices() if c.kind != "read"]:
                cluster.do(choice)
            cluster.advance(0.01, run=False)
        (grant,) = reader.pull.grants.values()
        read_from.append(grant.source)
        cluster.advance(0.5, run=False)  # by then what has failed may be tried again
        reader.source_ended(grant.lease, reason)
    cluster.run()
    assert read_from == ["near", "trainer", "trainer"]
    assert asked.number == 1


def test_of_sources_that_have_all_failed_the_one_that_failed_least_is_read_first() -> None:
    cluster = StepwiseCluster()
    trainer = cluster.handle("trainer")
    near = cluster.worker("near", Location(host="h1")).register("near")
    other = cluster.handle("other")
    reader = cluster.worker("reader", Location(host="h1")).register("reader")
    cluster.run()
    trainer.publish(1)
    cluster.run()
    for each in (near, other):
        each.replicate()
        cluster.run()
    asked = reader.replicate()
    read_from = []
    for _ in range(6):
        while reader.pull is None or not reader.pull.grants:
            for choice in [c for c in cluster.choices() if c.kind != "read"]:
                cluster.do(choice)
            cluster.advance(0.01, run=False)
        (grant,) = reader.pull.grants.values()
        read_from.append(grant.source)
        cluster.advance(2.0, run=False)  # by then what has failed may be tried again
        reader.source_ended(grant.lease, "stalled")
    cluster.run()
    assert Counter(read_from) == {"near": 2, "trainer": 2, "other": 2}
    assert asked.number == 1


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
    with pytest.raises(
        TransportUnavailable, match="rank 0 has tcp, and version 2 is offered over rdma"
    ) as caught:
        _ = asked.number
    assert caught.value.memory == "intact"
    assert reader.member.version == 1


@pytest.mark.parametrize(("host", "found"), [("here", True), ("elsewhere", False)])
def test_a_transport_of_one_host_is_none_in_common_with_another_host(
    host: str, found: bool
) -> None:
    cluster = StepwiseCluster()
    trainer = cluster.worker("trainer", Location(host="here"), transports=("cma",)).register(
        "trainer"
    )
    reader = cluster.worker("reader", Location(host=host), transports=("cma",)).register("reader")
    cluster.run()
    trainer.publish(1)
    cluster.run()
    asked = reader.replicate()
    cluster.run()
    if found:
        assert asked.number == 1
    else:
        with pytest.raises(
            TransportUnavailable, match="rank 0 has cma, and version 1 is offered over cma only"
        ):
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


@pytest.mark.parametrize(("transports", "sources"), [(("tcp",), 3), (("cma", "tcp"), 1)])
def test_readers_that_copy_out_of_memory_need_no_chain(
    monkeypatch: pytest.MonkeyPatch, transports: tuple[str, ...], sources: int
) -> None:
    """Over sockets the source's host would send the same bytes three times; who copies is in
    nobody's way.
    """
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
        cluster.run("read")
    leases = cluster.coordinator.cluster.leases.values()
    assert len({lease.holding.member.worker.name for lease in leases}) == sources
    cluster.run()
    assert all(reader.cells == trainer.cells for reader in readers)


def test_an_update_goes_on_as_soon_as_no_read_of_the_old_version_is_left() -> None:
    """Also where the last reader has given its source up, and still wants it."""
    cluster, trainer, second = published()
    reader = cluster.handle("late")
    cluster.run()
    reader.replicate()
    cluster.run("read")
    second.publish(2)
    cluster.run("read")
    trainer.update()
    cluster.run("read")
    assert trainer.pull is None
    assert reader.pull is not None
    reader.source_ended(next(iter(reader.pull.grants)), "stalled")
    cluster.run("read")
    assert trainer.pull is not None


def test_a_dead_readers_source_is_told_to_cut_it_off() -> None:
    cluster, trainer, reader = published()
    reader.replicate(timeout_s=60)
    cluster.run(until=lambda: reader.pull is not None)
    assert reader.pull is not None
    (lease,) = reader.pull.grants
    reader.worker.crash()
    cluster.advance(11)
    assert any(f"trainer <- CutReader lease={lease}" in line for line in cluster.log)
    assert trainer.worker.cut == {lease}
    assert cluster.coordinator.cluster.leases == {}


def test_a_cut_that_was_lost_on_the_way_is_repeated() -> None:
    cluster, trainer, reader = published()
    reader.replicate(timeout_s=60)
    cluster.run(until=lambda: reader.pull is not None)
    trainer.worker.disconnect()
    reader.worker.crash()
    cluster.advance(9)
    trainer.worker.connect()
    trainer.worker.say(Heartbeat(0))
    while cluster.now < 10.5:
        cluster.advance(0.5, run=True)
    assert worker_state(cluster, trainer) == "live"
    trainer.worker.disconnect()
    trainer.worker.connect()
    cluster.advance(1)
    assert cluster.coordinator.cluster.leases == {}


def test_a_lost_source_whose_reader_has_no_other_may_still_serve_it() -> None:
    """R11: LOST only removes it from counts; immutable bytes may still be read."""
    cluster, trainer, reader = published()
    asked = reader.replicate(timeout_s=60)
    cluster.run(until=lambda: reader.pull is not None)
    trainer.worker.disconnect()
    while cluster.now < 11:
        for choice in [c for c in cluster.choices() if c.kind != "read"]:
            cluster.do(choice)
        cluster.advance(0.5, run=False)
    assert worker_state(cluster, trainer) == "lost"
    cluster.run()
    assert asked.number == 1
    assert reader.cells == trainer.cells


def test_a_reader_is_sent_to_a_source_in_its_own_rack() -> None:
    """Although the newest source, and the publisher, are in another one."""
    cluster = StepwiseCluster()
    places = {"trainer": "a", "near": "b", "newest": "a", "reader": "b"}
    for name, rack in places.items():
        cluster.worker(name, Location(rack=rack, host=f"host of {name}"))
    handles = {name: cluster.handle(name) for name in places}
    cluster.run()
    handles["trainer"].publish(1)
    cluster.run()
    for name in ("near", "newest"):
        handles[name].replicate()
        cluster.run()
    handles["reader"].replicate()
    cluster.run()
    asked = [line for line in cluster.log if "reader <- Start" in line]
    assert [":near(" in line for line in asked] == [True]
