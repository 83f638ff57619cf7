"""A reader that reads from several complete sources together, since each of them is slow and nobody else reads there."""

from __future__ import annotations

from collections.abc import Sequence

from tensorhub.coordinator import readers as rules
from tensorhub.coordinator.source_choice import STRIPES_MAX
from tensorhub.messages import ReadFailed
from tensorhub.types import Location
from tests.coordinator.test_moves import SLOW, Chain

SLOWNESS = 3


class Slow(Chain):
    """Of all that was published only the copies of slow workers are left. Then others call."""

    def __init__(self, slow: str, readers: str = "", places: Sequence[Location] = (), *, published: bool = False) -> None:
        super().__init__(slow + readers, places, only=slow)
        for name in slow:
            self.is_taken_for(name, SLOWNESS)
        self.finish()
        if not published:
            self.trainer.unpublish()
            self.cluster.run()
        self.calls.clear()
        for name in readers:
            self.call(name)

    def reads(self, name: str, chunks: int) -> None:
        """As slowly as from its sources, and some time has passed."""
        self.passes(rules.COMPARE_S)
        self.says(name, chunks, per_s=SLOW)

    def after_a_word(self) -> str:
        """Whom `x` reads from then."""
        self.reads("x", 1)
        return self.sources()["x"]

    def fetch(self, name: str) -> None:
        self.cluster.worker(name, Location(rack=f"rack {name}", host=f"host {name}"))
        self.handles[name] = self.cluster.fetcher(name)
        self.settle()
        self.calls[name] = self.handles[name].fetch()
        self.settle()

    def call(self, name: str) -> None:
        if name not in self.handles:
            self.cluster.worker(name, Location(rack=f"rack {name}", host=f"host {name}"))
            self.handles[name] = self.cluster.handle(name)
            self.settle()
        super().call(name)


def test_slow_sources_that_nobody_reads_are_read_together() -> None:
    cluster = Slow("ab", "x")
    assert cluster.sources() == {"x": "b"}
    cluster.reads("x", 1)
    assert cluster.sources() == {"x": "ba"}
    holding = cluster.part("x").holding
    assert holding is not None
    assert (holding.depth, holding.slowness) == (1, SLOWNESS - 1)  # twice as fast as one of them
    cluster.finish()


def test_only_so_many() -> None:
    cluster = Slow("abcdef", "x")
    cluster.reads("x", 1)
    assert len(cluster.sources()["x"]) == STRIPES_MAX
    cluster.finish()


def test_no_more_than_its_own_link_takes() -> None:
    cluster = Slow("abcd", "x")
    cluster.is_taken_for("x", SLOWNESS - 1)
    cluster.reads("x", 1)
    assert cluster.sources() == {"x": "dc"}
    cluster.is_taken_for("x", SLOWNESS)
    cluster.finish()


def test_who_is_as_slow_as_its_source_reads_there_alone() -> None:
    cluster = Slow("ab", "x")
    cluster.is_taken_for("x", SLOWNESS)
    cluster.reads("x", 1)
    assert cluster.sources() == {"x": "b"}


def test_a_fast_source_is_better_than_several_slow_ones() -> None:
    cluster = Slow("ab", "x", published=True)
    assert cluster.sources() == {"x": "t"}
    cluster.reads("x", 1)
    assert cluster.sources() == {"x": "t"}


def test_who_reads_from_several_slow_ones_leaves_them_for_a_fast_one() -> None:
    cluster = Slow("cab", "x")
    cluster.is_taken_for("c", 5)
    cluster.reads("x", 1)
    assert cluster.sources() == {"x": "ba"}, "a third one that brings little is not worth it"
    cluster.is_taken_for("c", 0)
    cluster.reads("x", 2)
    assert cluster.sources() == {"x": "c"}
    cluster.finish()


def fetching() -> Slow:
    """`x` holds nothing that others could read."""
    cluster = Slow("ab")
    cluster.fetch("x")
    cluster.reads("x", 1)
    assert cluster.sources() == {"x": "ba"}
    return cluster


def test_who_comes_to_one_of_them_has_it_alone() -> None:
    cluster = fetching()
    cluster.call("y")
    assert cluster.sources() == {"x": "a", "y": "b"}
    cluster.reads("x", 2)
    assert cluster.sources() == {"x": "a", "y": "b"}
    cluster.finish()


def test_a_source_that_others_read_is_not_taken_besides() -> None:
    cluster = Slow("ab")
    for name in "xy":
        cluster.fetch(name)
    assert cluster.sources() == {"x": "b", "y": "a"}
    for name in "xy":
        cluster.reads(name, 1)
    assert cluster.sources() == {"x": "b", "y": "a"}


def test_who_shares_its_source_takes_no_further_one() -> None:
    """`a` would bring it as much as its half of what `b` brings."""
    cluster = Slow("ab")
    cluster.is_taken_for("b", SLOWNESS - 1)
    for name in "xy":
        cluster.fetch(name)
    assert cluster.sources() == {"x": "b", "y": "b"}
    cluster.reads("x", 1)
    assert cluster.sources() == {"x": "b", "y": "b"}


def test_a_worker_that_others_read_from_is_not_idle() -> None:
    """What they read there is of another model, over the same link."""
    cluster = Slow("ab")
    other = cluster.cluster.workers["a"].register("critic of a", 0, 1, model="critic")
    cluster.cluster.run()
    other.publish(1)
    cluster.cluster.run()
    reader = cluster.cluster.worker("r").register("critic of r", 0, 1, model="critic")
    cluster.cluster.run()
    reader.replicate()
    cluster.call("x")
    assert cluster.cluster.coordinator.cluster.members[other.id].holding.active_readers == 1  # type: ignore[union-attr]
    cluster.reads("x", 1)
    assert cluster.sources() == {"x": "b"}


def test_no_source_in_another_site_is_taken_besides() -> None:
    t, a, x = (Location("here", f"rack {name}", f"host {name}") for name in "tax")
    there = Location("there", "rack", "host")
    assert Slow("ab", "x", [t, a, there, x]).after_a_word() == "a"
    assert Slow("ab", "x", [there, there, there, x]).after_a_word() == "b"


def test_of_two_workers_in_one_host_nobody_takes_the_other_ones_memory_besides() -> None:
    host = Location(rack="r", host="h")
    assert len(Slow("ab", "x", [host] * 4).after_a_word()) == 1


def test_when_one_of_them_leaves_its_owner_waits_for_nobody() -> None:
    cluster = Slow("ab", "x")
    cluster.reads("x", 1)
    left = cluster.handles["b"].unpublish()
    cluster.settle()
    assert left.has_ended()
    assert cluster.sources() == {"x": "a"}
    holding = cluster.part("x").holding
    assert holding is not None
    assert holding.slowness == SLOWNESS
    cluster.finish()


def test_when_both_leave_the_last_one_is_read_on() -> None:
    cluster = Slow("ab", "x")
    cluster.reads("x", 1)
    for name in "ba":
        cluster.handles[name].unpublish()
        cluster.settle()
    assert cluster.sources() == {"x": "a"}
    cluster.finish()


def test_when_one_of_them_dies_the_other_one_brings_the_rest() -> None:
    cluster = Slow("ab", "x")
    cluster.reads("x", 1)
    cluster.handles["b"].worker.crash()
    cluster.finish()


def test_what_has_failed_is_left_and_not_taken_besides_again() -> None:
    cluster = Slow("ab", "x")
    cluster.reads("x", 1)
    part = cluster.part("x")
    key = part.operation.key
    (lease,) = (each for each in part.leases.values() if each.holding.member.worker.name == "b")
    cluster.handles["x"].worker.say(ReadFailed(key, 0, lease.id, "corrupt", ""))
    cluster.settle()
    assert cluster.sources() == {"x": "a"}
    cluster.reads("x", 2)
    assert cluster.sources() == {"x": "a"}


def test_who_updates_is_left() -> None:
    """`b` takes the next version, and waits for nobody who reads the former one."""
    cluster = Slow("ab", "x")
    cluster.reads("x", 1)
    cluster.trainer.publish(2)
    cluster.settle()
    update = cluster.handles["b"].update(2)
    cluster.settle()
    assert cluster.sources() == {"x": "a"}
    cluster.finish()
    cluster.cluster.run()
    assert update.number == 2
