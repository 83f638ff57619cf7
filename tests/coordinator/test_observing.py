"""What observers are told: events, and where the seconds of an update went (G12)."""

from __future__ import annotations

import math
from dataclasses import fields, replace
from typing import Any

import pytest

from tensorhub.coordinator import Received, explaining, observing
from tensorhub.coordinator.explaining import SENTENCES, Known, Lane, Rank, Update, explanation
from tensorhub.coordinator.observing import SECONDS_BOUNDS, Histogram, Observations
from tensorhub.errors import VersionUnavailable
from tensorhub.messages import (
    Events,
    Explained,
    GetEvents,
    GetUpdates,
    Leave,
    ReadFailed,
    Served,
    Took,
    Updates,
)
from tensorhub.observed import (
    EVENT_KINDS,
    EVENTS_PAGE_MAX,
    LINKS_MAX,
    PART_NAMES,
    ClusterEvent,
    Explanation,
    LinkTiming,
    Part,
    ServedTiming,
)
from tensorhub.protocol import codec
from tensorhub.testing import CHUNK_BYTES, CHUNKS, Choice, SimHandle, StepwiseCluster
from tensorhub.testing.sim.memory import make_manifest
from tensorhub.transport.built_in import TRANSPORTS
from tensorhub.types import Location, OpKey, VersionInfo
from tests.coordinator.test_answers import ask, observed

READ_S = 4.0
SIZE = CHUNKS * CHUNK_BYTES


def observations(cluster: StepwiseCluster) -> Observations:
    return cluster.coordinator.observations


def explained(cluster: StepwiseCluster, **which: Any) -> Explanation:
    about: dict[str, Any] = {"model": "actor", "version": None, "group": None, **which}
    found = observations(cluster).explanation(cluster.now, **about)
    assert math.isclose(sum(part.seconds for part in found.parts), found.seconds, abs_tol=1e-9)
    assert all(part.name in PART_NAMES and part.seconds > 0 for part in found.parts)
    return found


def parts(found: Explanation) -> dict[str, float]:
    """Seconds by name; none of them twice."""
    by_name = {part.name: round(part.seconds, 6) for part in found.parts}
    assert len(by_name) == len(found.parts)
    return by_name


def stepwise(**more: Any) -> StepwiseCluster:
    """A cluster whose ranks say what their calls took as the tests have them say it."""
    cluster = StepwiseCluster(**more)
    cluster.explained.tells = False
    return cluster


def pair(*readers: str) -> tuple[StepwiseCluster, list[SimHandle]]:
    """A trainer that has published version 1, and these readers."""
    cluster = stepwise()
    handles = [cluster.handle(name) for name in ("trainer", *readers)]
    cluster.run()
    handles[0].publish(1)
    cluster.run()
    return cluster, handles


def begin(cluster: StepwiseCluster, reader: SimHandle) -> str:
    """Have this reader begin to read. Returns its lease."""
    leases = cluster.coordinator.cluster.leases
    before = set(leases)
    if reader.member.shard.serves:
        reader.replicate()
    else:
        reader.fetch()
    cluster.run("read", until=lambda: set(leases) - before)
    (lease,) = set(leases) - before
    return lease


def read(cluster: StepwiseCluster, reader: SimHandle, seconds: float = READ_S) -> str:
    """Have this reader read for so long. Returns its lease."""
    lease = begin(cluster, reader)
    cluster.advance(seconds, run=False)
    cluster.run()
    return lease


def two_ranks() -> tuple[StepwiseCluster, list[SimHandle], list[SimHandle]]:
    """Trainers that have published version 1, and the ranks of a group."""
    cluster = stepwise()
    trainers, ranks = cluster.group("trainer", 2), cluster.group("group", 2)
    cluster.run()
    for trainer in trainers:
        trainer.publish(1)
    cluster.run()
    return cluster, trainers, ranks


def key_of(cluster: StepwiseCluster, handle: SimHandle) -> OpKey:
    """Of its group's last update."""
    rows = observations(cluster).updates(cluster.now, "actor")
    return next(row.key for row in rows if row.key.group == handle.member.shard.group)


def tell(
    cluster: StepwiseCluster,
    handle: SimHandle,
    seconds: float = READ_S,
    phases: dict[str, float] | None = None,
    *links: LinkTiming,
) -> None:
    """Have this reader's worker say what its last call took."""
    key = key_of(cluster, handle)
    handle.worker.say(Took(key, 0, seconds, tuple((phases or {}).items()), links))
    cluster.run()


def timing(lease: str, **seconds: Any) -> LinkTiming:
    return LinkTiming(lease, "trainer", "tcp", "live", SIZE, READ_S, **seconds)


# ----------------------------------------------------------------------------------------------
# the skeleton


def test_waiting_for_the_last_rank() -> None:
    cluster, _, (first, second) = two_ranks()
    first.replicate()
    cluster.run()
    cluster.advance(2.0)
    found = explained(cluster)
    assert parts(found) == {"ranks": 2.0}
    assert found.sentence == "running: 2 of 2 s: waiting for a worker to call, no call of rank 1"
    second.replicate()
    cluster.run()
    found = explained(cluster)
    assert parts(found) == {"ranks": 2.0}
    assert found.sentence == f"2 of 2 s: waiting for {second.worker.name} to call"


def test_waiting_for_a_version() -> None:
    cluster, (trainer, reader) = pair("reader")
    reader.update(at_least=2)
    cluster.run()
    cluster.advance(3.0)
    assert parts(explained(cluster, group="reader")) == {"version": 3.0}
    trainer.unpublish()
    cluster.run()
    trainer.publish(2)
    cluster.run()
    found = explained(cluster)
    assert (found.version, parts(found)) == (2, {"version": 3.0})


def test_waiting_for_a_source_before_and_within_the_read() -> None:
    cluster, (trainer, reader) = pair("reader")
    trainer.worker.disconnect()
    cluster.run()
    reader.replicate()
    cluster.run()
    cluster.advance(1.0)
    assert parts(explained(cluster)) == {"source": 1.0}
    trainer.worker.connect()
    cluster.run(until=lambda: reader.pull is not None)
    lease = next(iter(cluster.coordinator.cluster.leases))
    cluster.run(Choice("read", reader.name))
    key = key_of(cluster, reader)
    reader.worker.say(ReadFailed(key, 0, lease, "lost", "gone"))
    cluster.run(
        Choice("read", reader.name), until=lambda: lease not in cluster.coordinator.cluster.leases
    )
    cluster.advance(0.04, run=False)
    waits = [(part.name, part.seconds) for part in explained(cluster).parts]
    assert waits == [("source", 1.0), ("source", pytest.approx(0.04))]


def test_waiting_for_a_holder_of_the_version_that_is_asked_for() -> None:
    cluster, (trainer, reader) = pair("keeper")
    trainer.unpublish()
    cluster.run()
    reader.replicate()
    cluster.run()
    cluster.advance(1.0)
    assert parts(explained(cluster)) == {"source": 1.0}


def test_every_wait_for_another_source_within_a_read_counts() -> None:
    cluster, (_, reader) = pair("reader")
    begin(cluster, reader)
    leases, held = cluster.coordinator.cluster.leases, Choice("read", reader.name)
    waited_s = []
    for _ in range(2):
        (lease,) = leases
        reader.worker.say(ReadFailed(key_of(cluster, reader), 0, lease, "lost", "gone"))
        cluster.run(held)
        cluster.advance(1.0, run=False)  # the source is lent again meanwhile
        cluster.run(held)
        waited_s.append(parts(explained(cluster))["source"])
    assert waited_s == [0.05, 0.15]  # the second one lasts twice as long
    assert parts(explained(cluster)) == {"source": waited_s[1], "link": 2.0 - waited_s[1]}


def test_reads_that_do_not_overlap_are_not_beside_each_other() -> None:
    before, after = Lane("s", "i", None, 0.0, 1.0), Lane("s", "i", None, 2.0)
    during = Lane("s", "i", None, 0.5, 3.0)
    assert not before.is_beside(after)
    assert not after.is_beside(before)
    assert during.is_beside(before)
    assert during.is_beside(after)


def test_a_hook_and_the_steps_around_it() -> None:
    cluster, (_, reader) = pair("reader")
    reader.update(hold=True)
    cluster.run("hook")
    cluster.advance(2.0, run=False)
    assert parts(explained(cluster)) == {"before_write": 2.0}
    cluster.run()
    assert parts(explained(cluster)) == {"before_write": 2.0}
    tell(cluster, reader, 2.5, {"hook": 1.5})
    assert parts(explained(cluster)) == {"before_write": 1.5, "control": 1.0}


def test_digests_that_come_late() -> None:
    cluster = stepwise(manifest=make_manifest(CHUNKS, "xxh3-64"))
    trainer, reader = cluster.handle("trainer"), cluster.handle("reader")
    cluster.run()
    trainer.publish(1)
    cluster.run()
    reader.replicate()
    cluster.run(Choice("up", "trainer"), Choice("down", "trainer"))
    cluster.advance(1.5, run=False)
    assert parts(explained(cluster)) == {"digests": 1.5}
    cluster.run()
    assert parts(explained(cluster)) == {"digests": 1.5}


def test_the_store_and_what_else_comes_before_a_decision() -> None:
    cluster, _, ranks = two_ranks()
    for rank in ranks:
        rank.replicate()
    cluster.run("store")
    cluster.advance(0.5, run=False)
    assert parts(explained(cluster)) == {"store": 0.5}
    cluster.run()
    assert parts(explained(cluster)) == {"store": 0.5}
    assert explained(cluster).sentence == "0.5 of 0.5 s: the coordinator's store"


def test_votes_that_wait_for_a_rollback() -> None:
    cluster, (trainer, _), ranks = two_ranks()
    trainer.worker.asks.rollback(1)
    cluster.run("store")
    for rank in ranks:
        rank.replicate()
    cluster.run("store")
    cluster.advance(0.5, run=False)
    assert parts(explained(cluster)) == {"others": 0.5}
    cluster.run()
    assert parts(explained(cluster)) == {"others": 0.5}


def test_a_late_coordinator() -> None:
    cluster, (_, reader) = pair("reader")
    reader.update(hold=True)
    cluster.run("hook")
    cluster.advance(2.0, run=False)
    observations(cluster).late(cluster.now, 0.5, is_behind=False)
    cluster.run()
    assert parts(explained(cluster)) == {"before_write": 1.5, "coordinator": 0.5}
    assert explained(cluster).unsure_s == pytest.approx(0.5)


def test_what_a_late_coordinator_says_late() -> None:
    cluster, (_, reader) = pair("reader")
    lease = begin(cluster, reader)
    cluster.advance(1.0, run=False)
    observations(cluster).late(cluster.now, 0.75, is_behind=False)
    cluster.advance(READ_S - 1.0, run=False)
    cluster.run()
    tell(
        cluster,
        reader,
        READ_S + 0.5,
        {"wait": 2.0},
        replace(timing(lease, link_s=2.0), seconds=2.0),
    )
    assert parts(explained(cluster)) == {
        "link": 2.0,
        "coordinator": 0.75,
        "control": 1.0,
        "other": 0.75,
    }


def test_what_a_call_took_beyond_what_the_coordinator_saw() -> None:
    cluster, (_, reader) = pair("reader")
    lease = read(cluster, reader)
    tell(cluster, reader, READ_S + 1.0, {}, timing(lease, link_s=READ_S))
    found = explained(cluster)
    assert parts(found) == {"link": READ_S, "control": 1.0}
    assert (found.seconds, found.unsure_s) == (READ_S + 1.0, 1.0)


def test_a_call_that_is_repeated_is_explained_from_its_beginning() -> None:
    cluster, (trainer, reader) = pair("reader")
    reader.replicate()
    cluster.run(Choice("read", reader.name))
    cluster.advance(2.0, run=False)
    trainer.worker.crash()
    cluster.advance(2 * cluster.options.lease_s)
    again = cluster.handle("trainer2")
    cluster.run()
    again.publish(2)
    cluster.run()
    found = explained(cluster)
    assert (found.version, found.key.sequence) == (2, 1)
    assert found.seconds == cluster.now
    assert {part.name for part in found.parts} == {"link", "source"}
    assert observations(cluster).counters.updates_total == {"again": 1, "committed": 1}


def test_a_value_at_a_bound_is_at_most_that() -> None:
    found = Histogram()
    for value in (SECONDS_BOUNDS[0], SECONDS_BOUNDS[-1], SECONDS_BOUNDS[-1] + 1.0):
        found.add(value)
    assert (found.counts[0], found.counts[-2], found.counts[-1]) == (1, 1, 1)


def test_a_call_that_failed_and_why() -> None:
    cluster, (_, reader) = pair("reader")
    reader.update(at_least=9, timeout_s=3.0)
    cluster.advance(4.0)
    found = explained(cluster)
    assert parts(found) == {"version": 3.0}
    assert found.sentence == "VersionUnavailable: 3 of 3 s: waiting for a version"
    assert observations(cluster).counters.updates_total == {"VersionUnavailable": 1}
    tell(cluster, reader, 3.0, {"resolve": 3.0})
    (row,) = [each for each in observations(cluster).updates(cluster.now, "actor") if each.phases]
    assert row.phases == (("resolve", 3.0),)
    assert not any(each.sum for each in observations(cluster).counters.update_seconds.values())


# ----------------------------------------------------------------------------------------------
# a read


def shared_out(
    own: dict[str, float], phases: dict[str, float] | None = None, **served: Any
) -> dict[str, float]:
    """The parts of a read of READ_S with these timings of the reader and the source."""
    cluster, (trainer, reader) = pair("reader")
    lease = read(cluster, reader)
    if served:
        trainer.worker.say(Served(ServedTiming(lease, SIZE, READ_S, **served)))
    tell(cluster, reader, READ_S, phases, timing(lease, **own))
    return parts(explained(cluster))


def test_what_the_reader_does() -> None:
    own = {"cpu_s": 0.25, "delay_s": 0.25, "gil_s": 0.5, "digest_s": 1.0, "codec_s": 2.0}
    assert shared_out(own) == {"cpu": 0.5, "gil": 0.5, "digest": 1.0, "codec": 2.0}
    phases = {"fence": 0.5, "copy": 0.25, "unpack": 0.25, "room": 1.0, "prepare": 0.5}
    assert shared_out({"link_s": 1.0}, phases) == {
        "fence": 0.5,
        "copy": 0.5,
        "link": 1.0,
        "control": 0.5,
        "other": 1.5,
    }


def test_threads_at_the_same_time_share_the_wall_time() -> None:
    assert shared_out({"link_s": 3 * READ_S, "digest_s": READ_S}) == {
        "link": READ_S * 0.75,
        "digest": READ_S * 0.25,
    }


def test_what_the_source_does_while_the_reader_waits() -> None:
    own = {"link_s": READ_S}
    assert shared_out(own, disk_s=3.0) == {"source disk": 3.0, "link": 1.0}
    assert shared_out(own, delay_s=1.0, gil_s=2.0) == {"source busy": 3.0, "link": 1.0}
    assert shared_out(own, empty_s=3.0) == {"upstream": 3.0, "link": 1.0}
    assert shared_out(own, window_s=3.0, blocked_s=3.5) == {"reader": 3.0, "link": 1.0}
    assert shared_out(own, resent=50, segments=1000) == {"loss": 4.0}
    assert shared_out(own, resent=5, segments=1000) == {"link": 4.0}
    assert shared_out(own, readers=3.0) == {"source busy": 3.0, "link": 1.0}
    assert shared_out(own, disk_s=4.0, blocked_s=4.0) == {"source disk": 2.0, "link": 2.0}
    assert shared_out({"empty_s": 1.0, "link_s": 3.0}, empty_s=1.0) == {
        "upstream": 1.0,
        "link": 3.0,
    }
    assert shared_out({"cpu_s": 1.0}, window_s=2.0) == {"cpu": 1.0, "reader": 2.0, "other": 1.0}


def test_the_sentence_names_both_ends_and_the_rate() -> None:
    cluster, (_, reader) = pair("reader")
    lease = read(cluster, reader)
    assert explained(cluster).sentence.startswith("4 of 4 s: the link from trainer to reader, not")
    tell(cluster, reader, READ_S, {}, timing(lease, link_s=READ_S, site="oslo"))
    rate = SIZE * 8e-9 / READ_S
    assert explained(cluster).sentence == (
        f"4 of 4 s: the link from trainer to reader, {rate:.3g} Gbit/s, from oslo"
    )


def test_a_reader_that_is_slower_than_those_beside_it_has_a_slow_link_of_its_own() -> None:
    cluster, (trainer,) = pair()
    slow, fast = cluster.fetcher("slow"), cluster.fetcher("fast")
    cluster.run()
    leases = [begin(cluster, reader) for reader in (slow, fast)]
    cluster.advance(READ_S, run=False)
    cluster.run()
    for lease in leases:
        trainer.worker.say(Served(ServedTiming(lease, SIZE, READ_S, readers=1.0)))
    tell(cluster, slow, READ_S, {}, timing(leases[0], link_s=READ_S))
    tell(cluster, fast, READ_S, {}, replace(timing(leases[1], link_s=1.0), seconds=1.0))
    assert parts(explained(cluster, group=slow.member.shard.group)) == {"link": READ_S}
    assert parts(explained(cluster, group=fast.member.shard.group))["source busy"] == 0.5


def test_a_reader_is_compared_with_few_others_and_with_those_of_its_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(observing, "BESIDE_MAX", 3)
    looked = 0
    is_beside = Lane.is_beside

    def counted(self: Lane, other: Lane) -> bool:
        nonlocal looked
        looked += 1
        return is_beside(self, other)

    monkeypatch.setattr(Lane, "is_beside", counted)
    lanes = [Lane("s", "i", None, float(at), at + 1.5) for at in range(100)]
    rates = {"i": [(lane, lane.since) for lane in lanes]}
    update = Update(OpKey("m", "g", 1, 1), "update", 1, False, 0.0)
    for lane, beside in ((lanes[50], [49.0, 51.0]), (lanes[0], [1.0]), (lanes[99], [98.0])):
        assert observing._beside(lambda model: rates, update, lane) == beside
    alone = Lane("t", "j", None, 5.0)
    assert observing._beside(lambda model: rates, update, alone) == []
    assert looked <= 3 * 3


def test_the_path_goes_on_at_the_source_that_lacked_chunks() -> None:
    cluster, (_, first, second) = pair("first", "second")
    leases = [begin(cluster, reader) for reader in (first, second)]
    cluster.advance(READ_S, run=False)
    cluster.run()
    lanes = observations(cluster)._lanes
    assert [lanes[lease].source for lease in leases] == ["trainer", "first"]
    lacks = replace(timing(leases[1], link_s=1.0, empty_s=3.0), source="first")
    tell(cluster, second, READ_S, {}, lacks)
    found = explained(cluster, group="second")
    assert [(part.name, part.worker, part.peer, part.seconds) for part in found.parts] == [
        ("link", "first", "trainer", 3.0),
        ("link", "second", "first", 1.0),
    ]
    assert "not divided" in found.sentence  # the first has not told yet
    tell(cluster, first, READ_S, {}, timing(leases[0], digest_s=3.0, link_s=1.0))
    found = explained(cluster, group="second")
    assert [(part.name, part.worker, part.peer, part.seconds) for part in found.parts] == [
        ("digest", "first", "", 2.25),
        ("link", "first", "trainer", 0.75),
        ("link", "second", "first", 1.0),
    ]
    assert found.sentence == "2.25 of 4 s: digests on first"


def reader_of_two(lacked: dict[str, float], sources_end_at: float) -> Explanation:
    """A reader of two sources lacked chunks, of each for so long. All of them have read up to 4.0;
    the groups of the sources end then, or later.
    """
    updates: dict[OpKey, Update] = {}
    sources = {"a": ["origin"], "b": ["origin"], "reader": ["a", "b"]}
    for name, above in sources.items():
        key = OpKey("m", name, 1, 1)
        update = updates[key] = Update(key, "update", 1, False, 0.0)
        rank = update.ranks[0] = Rank(0, name, name, 0.0, False, ())
        rank.leased_at, rank.verified_at, rank.agreed_at = 0.0, 4.0, 4.0
        rank.lanes = {each: Lane(each, each, (OpKey("m", each, 1, 1), 0), 0.0) for each in above}
        links = [
            LinkTiming(each, each, "tcp", "live", 1, 4.0, empty_s=lacked[each])
            if name == "reader"
            else LinkTiming(each, each, "tcp", "live", 1, 4.0, digest_s=4.0)
            for each in above
        ]
        rank.took = Took(key, 0, 4.0, (), tuple(links))
        update.calls, update.info = 1, VersionInfo("m", 1, "c", 1, 1)
        update.bound_at = update.written_at = 0.0
        update.prepared_at = update.ended_at = 4.0 if name == "reader" else sources_end_at
    return explanation(
        updates[OpKey("m", "reader", 1, 1)], 4.0, 0.0, Known(updates.get, (), lambda *about: [])
    )


@pytest.mark.parametrize("sources_end_at", [4.0, 9.0])
@pytest.mark.parametrize("lacked", [{"a": 3.0, "b": 1.0}, {"a": 1.0, "b": 3.0}])
def test_of_two_sources_the_read_of_the_one_that_lacked_more_is_followed(
    lacked: dict[str, float], sources_end_at: float
) -> None:
    found = reader_of_two(lacked, sources_end_at)
    more, less = sorted(lacked, key=lambda name: -lacked[name])
    parts = {(part.name, part.worker, part.peer): part.seconds for part in found.parts}
    assert parts == {("digest", more, ""): 3.0, ("upstream", "reader", less): 1.0}


def test_a_long_chain_is_followed_for_a_few_hops() -> None:
    updates: dict[OpKey, Update] = {}
    for place in range(12):
        key = OpKey("m", f"g{place}", 1, 1)
        update = updates[key] = Update(key, "update", 1, False, 0.0)
        fills = (OpKey("m", f"g{place - 1}", 1, 1), 0)
        rank = Rank(0, f"w{place}", f"i{place}", 0.0, False, ())
        rank.leased_at, rank.verified_at, rank.agreed_at = 0.0, 4.0, 4.0
        rank.lanes["l"] = Lane(f"w{place - 1}", f"i{place - 1}", fills, 0.0)
        link = LinkTiming("l", f"w{place - 1}", "tcp", "live", 1, 4.0, empty_s=4.0)
        rank.took = Took(key, 0, 4.0, (), (link,))
        update.ranks[0], update.calls = rank, 1
        update.bound_at = update.written_at = 0.0
        update.prepared_at = update.ended_at = 4.0
        update.info = VersionInfo("m", 1, "c", 1, 1)
    found = explanation(update, 4.0, 0.0, Known(updates.get, (), lambda *about: []))
    assert [(part.name, part.worker, part.seconds) for part in found.parts] == [
        ("upstream", "w3", 4.0)
    ]
    # two that wait for each other are no way out, either
    first, second = updates[OpKey("m", "g0", 1, 1)], updates[OpKey("m", "g1", 1, 1)]
    first.ranks[0].lanes["l"].fills = second.key, 0
    found = explanation(first, 4.0, 0.0, Known(updates.get, (), lambda *about: []))
    assert sum(part.seconds for part in found.parts) == 4.0


def test_each_hop_of_a_chain_costs_as_much_as_the_one_before(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Also where a reader lacked chunks by its own account, and more by that of its source."""
    scaled = 0

    def counted(part: Part, by: float) -> Part:
        nonlocal scaled
        scaled += 1
        return replace(part, seconds=part.seconds * by)

    monkeypatch.setattr(explaining, "_scaled", counted)
    updates: dict[OpKey, Update] = {}
    for place in range(explaining.HOPS_MAX + 2):
        key = OpKey("m", f"g{place}", 1, 1)
        update = updates[key] = Update(key, "update", 1, False, 0.0)
        fills = (OpKey("m", f"g{place - 1}", 1, 1), 0)
        rank = Rank(0, f"w{place}", f"i{place}", 0.0, False, ())
        rank.leased_at, rank.verified_at, rank.agreed_at = 0.0, 4.0, 4.0
        lane = rank.lanes["l"] = Lane(f"w{place - 1}", f"i{place - 1}", fills, 0.0)
        lane.served = ServedTiming("l", 1, 4.0, empty_s=2.0)
        link = LinkTiming("l", lane.source, "tcp", "live", 1, 4.0, link_s=2.0, empty_s=1.0)
        rank.took = Took(key, 0, 4.0, (), (link,))
        update.ranks[0], update.calls = rank, 1
        update.bound_at = update.written_at = 0.0
        update.prepared_at = update.ended_at = 4.0
    found = explanation(update, 4.0, 0.0, Known(updates.get, (), lambda *about: []))
    assert sum(part.seconds for part in found.parts) == pytest.approx(4.0)
    assert scaled < 60 * (explaining.HOPS_MAX + 1)


def test_what_one_answer_costs_is_bounded_however_often_calls_were_repeated(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    divided = 0

    def counted(*about: object) -> list[Part]:
        nonlocal divided
        divided += 1
        return []

    monkeypatch.setattr(explaining._Path, "_shares", counted)
    kept, lanes = Observations(0.0), observing.LANES_OF_RANK_MAX
    keys = [OpKey("m", "g", 1, number) for number in range(1, 31)]
    kept._of_model["m"] = kept._finished[False]
    for place, key in enumerate(keys):
        update = kept._finished[False][key] = Update(key, "update", 1, False, 0.0)
        rank = update.ranks[0] = Rank(0, "w", "i", place, False, tuple(keys[:place][-16:]))
        rank.leased_at, rank.verified_at, rank.agreed_at = place, place + 1.0, place + 1.0
        links = [LinkTiming(f"{n}", "s", "tcp", "live", 1, 1.0) for n in range(lanes)]
        rank.lanes = {link.lease: Lane("s", "s", None, place) for link in links}
        rank.took = Took(key, 0, 4.0, (), tuple(links))
        update.calls, update.info = 1, VersionInfo("m", 1, "c", 1, 1)
        update.bound_at = update.written_at = update.began_at = place
        update.prepared_at = update.ended_at = place + 1.0
    rows = kept.updates(40.0, "m")
    assert len(rows) == len(keys)
    assert 0 < divided < explaining.LANES_DIVIDED_MAX + lanes


def test_what_is_staged_is_put_in_place_after_the_decision() -> None:
    cluster = stepwise(host_bytes=2 * SIZE)
    trainer, reader = cluster.handle("trainer"), cluster.handle("reader")
    cluster.run()
    trainer.publish(1)
    cluster.run()
    reader.replicate()
    cluster.run()
    trainer.unpublish()
    cluster.run()
    trainer.publish(2)
    cluster.run()
    reader.stage(hold=True)
    cluster.run("hook")
    cluster.advance(1.0, run=False)
    cluster.run()
    assert explained(cluster).version == 2
    tell(cluster, reader, 4.0, {"apply": 1.0, "hook": 1.0, "fence": 0.5})
    assert parts(explained(cluster)) == {
        "before_write": 1.0,
        "fence": 0.5,
        "copy": 1.0,
        "control": 1.5,
    }


def test_every_part_has_a_sentence() -> None:
    assert SENTENCES.keys() == PART_NAMES.keys()


# ----------------------------------------------------------------------------------------------
# which one, bounds, and what is not believed


def test_the_newest_update_and_the_slowest_group_are_chosen() -> None:
    cluster, (trainer, slow, fast) = pair("slow", "fast")
    read(cluster, slow, 2.0)
    read(cluster, fast, 1.0)
    assert explained(cluster).group == "slow"
    assert explained(cluster, group="fast").seconds == 1.0
    trainer.unpublish()
    cluster.run()
    trainer.publish(2)
    cluster.run()
    fast.update()
    cluster.run()
    assert (explained(cluster).group, explained(cluster).version) == ("fast", 2)
    assert explained(cluster, version=1).group == "slow"
    for wrong in ({"version": 3}, {"group": "none"}, {"model": "critic"}):
        with pytest.raises(VersionUnavailable, match="is known to this coordinator"):
            explained(cluster, **wrong)
    rows = observations(cluster).updates(cluster.now, "actor")
    assert [(row.key.group, row.version, row.outcome) for row in rows] == [
        ("fast", 2, "committed"),
        ("fast", 1, "committed"),
        ("slow", 1, "committed"),
    ]
    assert rows[1].sentence == explained(cluster, group="fast", version=1).sentence
    assert (rows[2].longest, rows[2].seconds) == ("link", 2.0)
    assert observations(cluster).updates(cluster.now, None) == rows
    assert observations(cluster).updates(cluster.now, "critic") == ()


def test_an_update_of_which_no_time_is_known_says_so() -> None:
    cluster, (_, reader) = pair("reader")
    begin(cluster, reader)
    assert explained(cluster).sentence == "running: it took no time"
    cluster.run()
    assert explained(cluster).sentence == "it took no time"


def test_what_has_changed_nothing_is_no_update() -> None:
    cluster, (_, reader) = pair("reader")
    read(cluster, reader)
    reader.update()
    cluster.run()
    assert len(observations(cluster).updates(cluster.now, None)) == 1
    assert observations(cluster).counters.updates_total == {"committed": 1, "unchanged": 1}


def test_memory_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(observing, "UPDATES_MAX", {False: (3, 4), True: (1, 1)})
    cluster, (trainer, one, two) = pair("one", "two")
    for number in range(1, 5):
        for reader in (one, two):
            reader.update(at_least=number)
            cluster.run()
        trainer.unpublish()
        cluster.run()
        trainer.publish(number + 1)
        cluster.run()
    kept = observations(cluster)
    assert [row.version for row in kept.updates(cluster.now, None)] == [4, 4, 3]
    assert len(kept._finished[False]) == len(kept._of_model["actor"]) == len(kept._lanes) == 3
    assert not kept._running


def test_of_many_reads_of_one_rank_the_first_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(observing, "LANES_OF_RANK_MAX", 1)
    cluster, (_, reader) = pair("reader")
    first = begin(cluster, reader)
    reader.worker.say(ReadFailed(key_of(cluster, reader), 0, first, "lost", "gone"))
    cluster.run(Choice("read", reader.name))
    cluster.advance(1.0, run=False)  # the source is lent again meanwhile
    cluster.run()
    assert parts(explained(cluster)) == {"source": 0.05, "link": 0.95}
    assert list(observations(cluster)._lanes) == [first]


def test_of_many_ranks_it_is_known_that_one_has_not_called() -> None:
    cluster = stepwise()
    trainers, ranks = cluster.group("trainer", 12), cluster.group("group", 12)
    cluster.run()
    for handle in trainers:
        handle.publish(1)
    for rank in ranks[:-1]:
        rank.replicate(timeout_s=3.0)
    cluster.run()
    cluster.advance(3.0)
    found = explained(cluster)
    assert (parts(found), found.parts[0].text) == ({"ranks": 3.0}, "no call of 1 ranks")


def test_of_many_ranks_the_slowest_and_the_decisive_ones_are_kept() -> None:
    cluster = stepwise()
    trainers, ranks = cluster.group("trainer", 12), cluster.group("group", 12)
    cluster.run()
    for trainer in trainers:
        trainer.publish(1)
    cluster.run()
    for rank in ranks:
        rank.replicate()
        cluster.run("read")
        cluster.advance(0.1, run=False)
    for rank in [*ranks[6:], *ranks[:6]]:
        cluster.run(*[("read", each.name) for each in ranks if each is not rank])
        cluster.advance(1.0, run=False)
    cluster.run()
    key = key_of(cluster, ranks[0])
    kept = observations(cluster)._finished[False][key]
    assert set(kept.ranks) == {0, 11, 10, 1, 2, 3, 4, 5}
    assert kept.others == 4
    assert len(observations(cluster)._lanes) == 8
    assert {part.worker for part in explained(cluster).parts if part.name == "link"} == {"group5"}
    for number, handle in enumerate(ranks):
        for _ in range(2):  # each counts once
            handle.worker.say(Took(key, number, 20.0, (), (replace(timing("?"), nbytes=10),)))
    cluster.run()
    assert (kept.others, kept.bytes_read) == (0, 40)
    assert (
        observations(cluster).counters.update_seconds["total"].counts[SECONDS_BOUNDS.index(30.0)]
        == 12
    )
    assert explained(cluster).seconds == 20.0


WRONG = (math.nan, math.inf, -1.0, 1e300)


def hostile_took(key: OpKey, lease: str) -> list[Took]:
    """What no honest rank says."""
    names = [each.name for each in fields(LinkTiming) if each.type in ("Seconds", "U64")]
    strange = (
        replace(key, model="?"),
        replace(key, group="?"),
        replace(key, epoch=0),
        replace(key, sequence=2**63),
    )
    return [
        *[Took(each, 0, 1.0) for each in strange],
        *[Took(key, rank, 1.0) for rank in (1, 2**20, -1)],
        *[Took(key, 0, seconds, (("wait", seconds), ("?" * 512, seconds))) for seconds in WRONG],
        *[
            Took(key, 0, 1.0, (), (timing(lease, **{name: value}),))
            for name in names
            if name not in ("nbytes", "seconds")
            for value in WRONG
        ],
        *[
            Took(key, 0, 1.0, (), (replace(timing(lease), nbytes=n, seconds=-n),))
            for n in (-1, 2**70)
        ],
    ]


def test_hostile_timings_change_the_row_of_their_sender_only() -> None:
    cluster, (trainer, honest) = pair("honest")
    liar = cluster.fetcher("liar")
    cluster.run()
    mine, theirs = read(cluster, liar), read(cluster, honest)
    tell(cluster, honest, READ_S, {}, timing(theirs, link_s=READ_S))
    trainer.worker.say(Served(ServedTiming(theirs, SIZE, READ_S, disk_s=1.0)))
    cluster.run()
    before = explained(cluster, group="honest")
    key = key_of(cluster, liar)
    for message in hostile_took(key, mine):
        observations(cluster)._find(key).ranks[0].took = None  # type: ignore[union-attr]
        cluster.step(Received(session_of(cluster, liar), message))
        cluster.step(Received(session_of(cluster, liar), Took(key_of(cluster, honest), 0, 99.0)))
        found = explained(cluster, group=liar.member.shard.group)
        assert found.seconds <= 1e6 + READ_S
        ask_all(cluster, liar)
    for wrong in WRONG:
        for name in [each.name for each in fields(ServedTiming) if each.type == "Seconds"]:
            for lease in (mine, theirs, "?"):
                about: dict[str, Any] = {name: wrong}
                lie = replace(ServedTiming(lease, SIZE, 1.0), **about)
                cluster.step(Received(session_of(cluster, liar), Served(lie)))
        ask_all(cluster, liar)
    assert explained(cluster, group="honest") == before
    names = {name for name, _ in observations(cluster).counters.bytes_total}
    assert names == {"tcp"}


def test_what_a_rank_claims_to_have_read_can_be_told() -> None:
    cluster, (_, reader) = pair("reader")
    lease = read(cluster, reader)
    (update,) = observations(cluster)._of_model["actor"].values()
    assert update.info is not None
    update.info = replace(update.info, nbytes=2**62)  # as a publisher may claim
    links = [replace(timing(lease), nbytes=2**64 - 1)] * LINKS_MAX
    tell(cluster, reader, READ_S, {}, *links)
    ask_all(cluster, reader)
    assert update.bytes_read == observing.BYTES_READ_MAX


def session_of(cluster: StepwiseCluster, handle: SimHandle) -> int:
    found = cluster.session_of(handle.worker.incarnation)
    assert found is not None
    return found


def ask_all(cluster: StepwiseCluster, handle: SimHandle) -> None:
    """The answers can be sent."""
    now = cluster.now
    codec.encode(Updates(1, observations(cluster).updates(now, None)))
    codec.encode(Explained(1, explained(cluster, group=handle.member.shard.group)))


def test_a_flood_of_transports_has_few_labels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(observing, "TRANSPORTS_MAX", 2)
    cluster, (_, plain, *readers) = pair(*[f"r{number}" for number in range(5)])
    for number, reader in enumerate(readers):
        link = replace(timing(read(cluster, reader)), transport=f"t{number}", kind=f"k{number}")
        tell(cluster, reader, READ_S, {}, link)
    tell(cluster, plain, READ_S, {}, timing(read(cluster, plain)))
    assert observations(cluster).counters.bytes_total == {
        ("t0", "other"): SIZE,
        ("t1", "other"): SIZE,
        ("other", "other"): 2 * SIZE,
        ("tcp", "live"): SIZE,
    }
    assert set(TRANSPORTS.built_in) == observing.OWN_TRANSPORTS


# ----------------------------------------------------------------------------------------------
# events


def kinds(cluster: StepwiseCluster) -> list[str]:
    return [event.kind for event in observations(cluster).events_after(0)[0]]


def test_there_is_an_event_of_each_kind() -> None:
    cluster = stepwise(manifest=make_manifest(CHUNKS, "xxh3-64"))
    trainer = cluster.handle("trainer")
    reader = cluster.worker("reader", Location(host="far")).register("reader")
    cluster.run()
    trainer.publish(1)
    cluster.run()
    lease = begin(cluster, reader)
    key = key_of(cluster, reader)
    reader.worker.say(ReadFailed(key, 0, lease, "lost", "the line is cut"))
    cluster.advance(3.0)
    assert kinds(cluster)[-1] == "updated"
    assert observations(cluster).counters.retries_total == 1
    reader.update(at_least=7, timeout_s=1.0)
    trainer.worker.asks.retain(2)
    cluster.advance(2.0)
    observations(cluster).late(cluster.now, 2.0, is_behind=True)
    observations(cluster).late(cluster.now, 3.0, is_behind=True)
    trainer.worker.asks.rollback(1)
    cluster.run()
    reader.worker.say(Leave("it is done"))
    cluster.run()
    other = cluster.handle("other")
    cluster.run()
    trainer.worker.crash()
    cluster.advance(2 * cluster.options.lease_s)
    assert other.worker.alive
    found = kinds(cluster)
    assert set(found) == EVENT_KINDS.keys() - {"corrupt", "readable"}
    assert found.count("behind") == 1
    by_kind = {event.kind: event for event in observations(cluster).events_after(0)[0]}
    assert (by_kind["source_failed"].worker, by_kind["lost"].worker) == ("trainer", "trainer")
    assert by_kind["left"].text == "it is done"
    assert by_kind["failed"].text.startswith("update: VersionUnavailable: ")
    assert by_kind["retained"].text == "the newest 2 versions are kept"


def test_wrong_bytes_are_an_event() -> None:
    cluster, (trainer, reader) = pair("reader")
    lease = begin(cluster, reader)
    reader.worker.say(ReadFailed(key_of(cluster, reader), 0, lease, "corrupt", "x", 0))
    cluster.advance(3.0)
    events = [e for e in observations(cluster).events_after(0)[0] if e.kind == "corrupt"]
    assert [(event.worker, event.version) for event in events] == [("trainer", 1)]
    assert observations(cluster).counters.corrupt_total == 1
    assert trainer.worker.alive


def test_events_are_kept_within_bounds_and_told_in_pages() -> None:
    cluster, _ = observed()
    kept = observations(cluster)
    for number in range(2000):
        kept.happened(1.0, "joined", worker=str(number), text="x" * 10_000)
    found, after = list[ClusterEvent](), 0
    while True:
        answer = ask(cluster, GetEvents(1, after))
        assert isinstance(answer, Events)
        assert len(answer.events) <= EVENTS_PAGE_MAX
        found += answer.events
        after = answer.following
        if not answer.more:
            break
    assert [event.number for event in found] == list(range(after - 1023, after + 1))
    assert len(found[0].text) == observing.EVENT_CHARS_MAX
    assert ask(cluster, GetEvents(2, after)) == Events(2, (), after, 1)
    assert ask(cluster, GetEvents(3, 2**64 - 1)) == Events(3, (), after, 1)
    assert ask(cluster, GetUpdates(4)) == Updates(4, ())


def test_people_see_the_time_of_their_clock() -> None:
    kept = Observations(1_700_000_000.0)
    kept.happened(5.0, "serving")
    assert kept.events_after(0)[0][0].at == 1_700_000_005.0
