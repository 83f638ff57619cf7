"""What a coordinator learns of links from what readers say, and what it does not believe."""

from __future__ import annotations

from collections.abc import Callable

from tensorhub.messages import Flow, Progress
from tensorhub.scheduler.links import SUPPOSED_BYTES_PER_S, Distance
from tensorhub.testing import CallRecord, SimHandle, StepwiseCluster
from tensorhub.types import Location

SITE = Distance.SITE


class Readers:
    """A trainer, and readers in other racks of its site that have all been granted a source, and have read nothing."""

    def __init__(self, count: int, *, fetch: bool = False) -> None:
        self.cluster = StepwiseCluster()
        for number in range(count + 1):
            self.cluster.worker(f"w{number}", Location(rack=f"rack {number}", host=f"host {number}"))
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
        while choices := [choice for choice in self.cluster.choices() if choice.kind != "read"]:
            self.cluster.do(choices[0])

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


def test_a_reader_that_had_a_whole_source_for_itself_tells_what_a_link_carries() -> None:
    readers = Readers(1)
    readers.flows(0, 25_000_000, 1.0)
    assert readers.rate == 25e6


def test_only_what_came_since_the_last_word_counts() -> None:
    """A link that has become ten times as slow is found so at once."""
    readers = Readers(1)
    readers.flows(0, 500_000_000, 1.0)
    assert readers.rate == 500e6
    readers.flows(0, 550_000_000, 2.0)
    assert readers.rate == 50e6


def test_readers_that_share_a_source_tell_of_all_that_it_gives() -> None:
    """Fetches have one source only, since they are none themselves."""
    readers = Readers(4, fetch=True)
    assert len(readers.trainer.serving) == 4
    for number in range(4):
        readers.flows(number, 50_000_000, 1.0)
    assert readers.rate == 200e6


def test_who_waits_for_its_source_does_not_tell_of_its_link() -> None:
    readers = Readers(2)
    first, second = readers.handles
    assert [lane.reader for lane in first.serving] == [second]
    readers.flows(1, 1000, 1.0)
    assert readers.rate == SUPPOSED_BYTES_PER_S[SITE]
    readers.flows(0, 25_000_000, 1.0)
    assert readers.rate == 25e6


def test_wild_words_change_nothing() -> None:
    readers = Readers(1)
    readers.tells(0, Flow("nobody's", 1, 1.0), Flow("", 2**64 - 1, 10.0**9))
    readers.flows(0, 1, 0.0)
    assert readers.rate == SUPPOSED_BYTES_PER_S[SITE]
    readers.flows(0, 2**64 - 1, 1.0)
    readers.flows(0, 0, 10.0)
    assert readers.rate == SUPPOSED_BYTES_PER_S[SITE]
    readers.cluster.run()
    assert readers.asked[0].number == 1
