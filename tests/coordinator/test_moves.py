"""Readers that change their source while they read: away from slow and shared ones, slow ones to
the end of the chain.
"""

from __future__ import annotations

from collections.abc import Sequence

from tensorhub.coordinator import readers as rules
from tensorhub.coordinator.entities import RankPart
from tensorhub.messages import Flow, Progress
from tensorhub.scheduler.choice import Load
from tensorhub.scheduler.links import Distance
from tensorhub.scheduler.slowness import Slowness
from tensorhub.testing import CallRecord, SimHandle, StepwiseCluster
from tensorhub.testing.sim.host_copies import CopyRequest
from tensorhub.testing.sim.memory import CHUNK_BYTES, make_manifest
from tensorhub.types import Location

CHUNKS = 64
# chunks in a second: 0.8 GB/s, which is a little less than is supposed, and 0.1
FAST, SLOW = 3.0, 3 / 8


class Chain:
    """A trainer `t`, and readers `a`, `b`, ... which have called one after the other and have read
    nothing. Nobody reads before `run`: what readers say of themselves is said by the test.
    """

    def __init__(
        self, readers: str, places: Sequence[Location] = (), *, only: str | None = None
    ) -> None:
        """`places`: of the trainer, and of each reader; else each has a rack of its own. `only`:
        who calls at once.
        """
        self.cluster = StepwiseCluster(
            manifest=make_manifest(CHUNKS), host_bytes=CHUNKS * CHUNK_BYTES
        )
        for number, name in enumerate("t" + readers):
            place = places[number] if places else Location(rack=f"rack {name}", host=f"host {name}")
            self.cluster.worker(name, place)
        self.trainer = self.cluster.handle("t")
        self.handles: dict[str, SimHandle] = {name: self.cluster.handle(name) for name in readers}
        self.cluster.run()
        self.trainer.publish(1)
        self.cluster.run()
        self.calls: dict[str, CallRecord | CopyRequest] = {}
        self.taken_for: dict[str, int] = {}
        vars(self.cluster.coordinator.cluster.slowness)["of"] = self.of
        for name in readers if only is None else only:
            self.call(name)

    def call(self, name: str) -> None:
        self.calls[name] = self.handles[name].replicate()
        self.settle()

    def prefetch(self, name: str) -> None:
        """From now on this name is the host copy's."""
        self.calls[name] = self.handles[name].prefetch()
        self.settle()
        self.handles[name] = self.handles[name].copy

    def settle(self) -> None:
        self.cluster.run("read")
        self.cluster.coordinator.check_invariants()

    def part(self, name: str) -> RankPart:
        member = self.cluster.coordinator.cluster.members[self.handles[name].id]
        assert member.part is not None
        return member.part

    def says(self, name: str, chunks: int, *, per_s: float) -> None:
        """It has so many chunks, the newest of which came at this rate, from each source, in the
        second since its last word.
        """
        key = self.part(name).operation.key
        leases = [each for each in self.part(name).leases.values() if not each.dropping]
        said, more = [(each.id, each.flow) for each in leases], int(per_s * CHUNK_BYTES)
        flows = tuple(Flow(lease, flow.nbytes + more, flow.seconds + 1.0) for lease, flow in said)
        self.handles[name].worker.say(Progress(key, 0, chunks, chunks * CHUNK_BYTES, flows))
        self.settle()

    def sources(self) -> dict[str, str]:
        """Whom each reads from."""
        found = {}
        for name in self.calls:
            leases = [each for each in self.part(name).leases.values() if not each.dropping]
            found[name] = "".join(each.holding.member.worker.name for each in leases)
        return found

    def slowness(self, name: str) -> int:
        return self.part(name).member.worker.slowness

    def is_taken_for(self, name: str, slowness: int) -> None:
        """From now on, whatever is said."""
        coordinator = self.cluster.coordinator
        worker = coordinator.cluster.members[self.handles[name].id].worker
        self.taken_for[worker.incarnation] = slowness
        coordinator._readers._weigh(worker)
        coordinator.cluster.count()

    def of(self, worker: str, rates: Sequence[float], now: float) -> int:
        found = Slowness.of(self.cluster.coordinator.cluster.slowness, worker, rates, now)
        return self.taken_for.get(worker, found)

    def passes(self, seconds: float) -> None:
        self.cluster.now += seconds

    def finish(self) -> None:
        """All read, and have everything; the world's own judges have seen that nothing was read
        twice.
        """
        self.cluster.run()
        assert {call.number for call in self.calls.values()} == {1}
        assert all(not self.handles[name].pull.missing for name in self.calls)  # type: ignore[union-attr]


def slow_in_the_midst() -> Chain:
    """`b` is slow, and known to be: its source has had more than it could read."""
    chain = Chain("abcd")
    assert chain.sources() == {"a": "t", "b": "a", "c": "b", "d": "c"}
    chain.says("a", 16, per_s=FAST)
    chain.says("b", 2, per_s=SLOW)
    chain.says("b", 4, per_s=SLOW)
    assert {name: chain.slowness(name) for name in "abcd"} == {"a": 0, "b": 3, "c": 0, "d": 0}
    return chain


def test_who_waits_behind_a_slow_reader_leaves_it_and_the_slow_one_reads_at_the_end() -> None:
    chain = slow_in_the_midst()
    chain.says("c", 4, per_s=SLOW)
    assert chain.sources() == {"a": "t", "b": "a", "c": "a", "d": "c"}
    chain.passes(rules.COMPARE_S)
    chain.says("c", 5, per_s=FAST)
    assert chain.sources() == {"a": "t", "b": "d", "c": "a", "d": "c"}
    chain.finish()


def test_nobody_is_sent_behind_a_slow_reader_and_that_takes_little_of_its_source() -> None:
    chain = Chain("abcd", only="ab")
    chain.says("a", 16, per_s=FAST)
    chain.says("b", 2, per_s=SLOW)
    chain.says("b", 4, per_s=SLOW)
    (lease,) = chain.part("b").leases.values()
    assert lease.yields
    assert lease.holding.load == Load(0, 0, 1)
    chain.call("c")
    assert chain.sources()["c"] == "a"
    chain.says("c", 1, per_s=FAST)
    assert chain.sources() == {"a": "t", "b": "c", "c": "a"}
    chain.call("d")
    assert chain.sources()["d"] == "c"
    chain.finish()


def test_of_two_that_share_a_source_one_leaves_it_for_an_idle_one_that_has_more() -> None:
    chain = Chain("ab", only="a")
    chain.is_taken_for("a", 3)
    chain.call("b")
    chain.is_taken_for("a", 0)
    assert chain.sources() == {"a": "t", "b": "t"}
    chain.says("b", 4, per_s=FAST / 2)
    assert chain.sources() == {"a": "t", "b": "t"}
    chain.passes(rules.COMPARE_S)
    chain.says("a", 8, per_s=FAST / 2)
    chain.says("b", 6, per_s=FAST / 2)
    assert chain.sources() == {"a": "t", "b": "a"}
    chain.finish()


def test_nobody_moves_to_what_is_filled_from_it_nor_to_what_has_failed_it() -> None:
    """All that is left is behind `c` itself, so it stays."""
    chain = slow_in_the_midst()
    chain.part("c").attempts.failures.update(
        dict.fromkeys((each.worker.incarnation for each in (chain.trainer, chain.handles["a"])), 1)
    )
    chain.says("d", 20, per_s=FAST)
    chain.says("c", 4, per_s=SLOW)
    assert chain.sources() == {"a": "t", "b": "a", "c": "b", "d": "c"}


HERE_AND_THERE = [
    Location("there" if name in "bcd" else "here", f"rack {name}", f"host {name}")
    for name in "tabcd"
]


def test_nobody_reads_from_another_site_because_that_is_faster() -> None:
    """`c` has `b`, which is slow, in its site, and all others are in another one."""
    chain = Chain("abcd", HERE_AND_THERE)
    assert chain.sources() == {"a": "t", "b": "a", "c": "b", "d": "c"}
    chain.is_taken_for("b", 5)
    for _ in range(3):
        chain.passes(rules.COMPARE_S)
        chain.says("c", 4, per_s=SLOW)
    assert chain.sources()["c"] == "b"


SITES = {"x": "there", "y": "yonder"}
THERE = [Location(SITES.get(name, "here"), f"rack {name}", f"host {name}") for name in "txyabc"]
LEARNT = {Distance.RACK: 0.8e9, Distance.SITE: 0.8e9, Distance.FAR: 0.3e9}  # bytes per second


def with_a_seed(
    readers: str, *, far: float = LEARNT[Distance.FAR], prefetches: bool = True
) -> Chain:
    """`x`, in another site, has begun to fill its host memory from the trainer, or to update; then
    those call.
    """
    chain = Chain("xyabc", THERE, only="")
    vars(chain.cluster.coordinator.cluster.links)["rates"] = lambda now: (
        40e9,
        *(LEARNT | {Distance.FAR: far}).values(),
    )
    if prefetches:
        chain.prefetch("x")
    else:
        chain.call("x")
    for name in readers:
        chain.call(name)
    return chain


def test_who_fills_host_memory_in_another_site_makes_way_for_the_readers_of_its_source_s_site() -> (
    None
):
    """And follows the chain as it grows. Those of that site read as if it was not there."""
    chain = with_a_seed("ab")
    assert chain.sources() == {"x": "t", "a": "t", "b": "a"}
    chain.says("a", 8, per_s=FAST / 2)
    assert chain.sources() == {"x": "b", "a": "t", "b": "a"}
    chain.call("c")
    assert chain.sources()["c"] == "b"
    chain.says("c", 1, per_s=FAST / 2)
    assert chain.sources()["x"] == "b"  # it has had nothing since it was moved
    chain.says("x", 1, per_s=FAST / 4)
    chain.passes(rules.COMPARE_S)
    chain.says("c", 2, per_s=FAST / 2)
    assert chain.sources() == {"x": "c", "a": "t", "b": "a", "c": "b"}
    chain.finish()


def test_a_worker_that_is_found_to_be_slow_is_noted_as_changed() -> None:
    chain = Chain("a")
    noted = chain.cluster.coordinator.cluster.noted
    noted.clear()
    chain.is_taken_for("a", 3)
    assert chain.part("a").member.worker in noted


def test_who_waits_for_its_source_is_not_slow() -> None:
    """`a` has shown more before, and waits for the trainer now: so does `b`, which has as much."""
    chain = Chain("ab")
    chain.says("a", 16, per_s=FAST)
    chain.says("b", 16, per_s=SLOW)
    chain.says("b", 17, per_s=SLOW)
    assert chain.slowness("b") == 0
    chain.says("a", 40, per_s=FAST)
    chain.says("b", 18, per_s=SLOW)
    assert chain.slowness("b") == 0
    chain.says("b", 19, per_s=SLOW)
    assert chain.slowness("b") == 3


def test_a_move_is_told_as_one() -> None:
    chain = slow_in_the_midst()
    chain.cluster.log.clear()
    chain.says("c", 4, per_s=SLOW)
    told = [line for line in chain.cluster.log if "Source" in line]
    assert any("c <- AddSource" in line for line in told)
    assert any("c <- DropSource" in line for line in told)


def test_of_equals_the_publisher_is_read_last_and_released_at_once() -> None:
    """Once others have everything, new readers are sent to them, and who reads from the publisher
    still goes there as soon as it takes its memory back: its call ends before anybody has read
    another byte.
    """
    chain = Chain("abcxy", only="ab")
    chain.finish()
    chain.calls.clear()
    for name in "xyc":
        chain.call(name)
    assert chain.sources() == {"x": "b", "y": "a", "c": "t"}
    left = chain.trainer.unpublish()
    chain.settle()
    assert left.has_ended()
    assert left.error is None
    assert "t" not in "".join(chain.sources().values())
    chain.finish()
