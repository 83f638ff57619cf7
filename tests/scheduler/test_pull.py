"""The reader's books: one writer per chunk, nothing verified is asked for again, everything arrives
in the end.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from random import Random
from typing import Any

import pytest
from hypothesis import given, strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from tensorhub.machine import IllegalStep
from tensorhub.scheduler.pull import CHUNKS_PER_BATCH_MAX, Pull
from tensorhub.types import LeaseId

A, B = LeaseId("a"), LeaseId("b")


def pull_from(*leases: LeaseId, sizes: tuple[int, ...] = (10,) * 6) -> Pull:
    pull = Pull(sizes)
    for lease in leases:
        pull.add_source(lease, complete=True)
    return pull


def test_batches_ascend_from_the_lowest_wanted_chunk_and_keep_to_their_bytes() -> None:
    pull = pull_from(A)
    assert pull.next_batch(A, 25) == (0, 1)
    assert pull.next_batch(A, 1) == (2,)  # one at least
    assert pull.next_batch(A, 1000) == (3, 4, 5)
    assert pull.next_batch(A, 1000) == ()


def test_a_batch_names_no_more_chunks_than_a_frame() -> None:
    pull = pull_from(A, sizes=(1,) * 3000)
    assert pull.next_batch(A, 10**9) == tuple(range(CHUNKS_PER_BATCH_MAX))


def test_chunks_of_a_dropped_source_are_wanted_again_only_when_its_lane_has_ended() -> None:
    pull = pull_from(A, B)
    assert pull.next_batch(A, 30) == (0, 1, 2)
    pull.drop_source(A)
    assert pull.next_batch(A, 30) == ()
    assert pull.next_batch(B, 1000) == (3, 4, 5)
    pull.arrived(A, 1, ok=True)  # its lane was still writing, and the bytes are right
    assert pull.lane_ended(A) == (0, 2)
    assert pull.next_batch(B, 1000) == (0, 2)
    assert pull.retries == 2


def test_a_source_that_lacks_a_chunk_is_asked_for_what_it_has() -> None:
    pull = pull_from(A, B)
    assert pull.next_batch(A, 1000) == (0, 1, 2, 3, 4, 5)
    assert pull.next_batch(B, 1000) == ()
    # runs of a source that speaks of more than there is harm nobody
    pull.lacks(A, range(6), [(1, 1), (4, 9)])
    assert pull.is_patchy
    assert pull.next_batch(A, 20) == (1, 4)
    assert pull.next_batch(B, 10) == (0,)
    assert pull.next_batch(A, 1000) == (5,)
    assert pull.next_batch(A, 1000) == ()  # B may have the rest
    assert pull.next_batch(B, 1000) == (2, 3)
    assert pull.retries == 0


def test_what_nobody_has_is_waited_for_at_a_source_in_turns() -> None:
    pull = pull_from(A, B)
    pull.next_batch(A, 30)
    pull.next_batch(B, 1000)
    pull.lacks(A, (0, 1, 2), ())
    pull.lacks(B, (3, 4, 5), ())
    assert pull.next_batch(B, 1000) == ()  # A was asked longer ago
    assert pull.next_batch(A, 30) == (0, 1, 2)
    assert pull.next_batch(A, 30) == ()  # one request at a time
    assert pull.next_batch(B, 1000) == (3, 4, 5)
    pull.lacks(B, (3, 4, 5), [(0, 1)])
    pull.lacks(A, (0, 1, 2), [(3, 1)])
    assert pull.next_batch(A, 1000) == (3,)
    assert pull.next_batch(B, 1000) == (0,)


def test_a_source_that_has_not_been_asked_yet_keeps_no_other_one_waiting() -> None:
    pull = pull_from(A)
    pull.next_batch(A, 1000)
    pull.lacks(A, range(6), ())
    pull.add_source(B, complete=True)
    assert pull.next_batch(A, 10) == (0,)
    assert pull.next_batch(B, 10) == (1,)
    pull.lacks(A, (0,), ())
    assert pull.next_batch(A, 10) == ()
    pull.drop_source(B)
    assert pull.next_batch(A, 10) == (0,)


def test_a_source_is_waited_for_with_what_no_other_one_has() -> None:
    pull = pull_from(A, B)
    assert pull.next_batch(A, 1000) == (0, 1, 2, 3, 4, 5)
    pull.lacks(A, range(6), ())
    assert pull.next_batch(B, 1000) == (0, 1, 2, 3, 4, 5)
    pull.lacks(B, range(6), [(1, 2), (4, 1)])
    assert pull.next_batch(A, 1000) == (0, 3, 5)
    assert pull.next_batch(B, 1000) == (1, 2, 4)


def test_what_a_source_brings_is_waited_for_there_although_it_lacks_it_now() -> None:
    pull = pull_from(A)
    pull.add_source(B, complete=True, brings=[0, 1, 2])
    assert pull.next_batch(B, 1000) == (0, 1, 2)
    assert pull.next_batch(A, 1000) == (3, 4, 5)
    pull.lacks(B, (0,), [(1, 2)])
    pull.lacks(A, (3, 4, 5), ())
    assert pull.next_batch(A, 1000) == (3, 4, 5)
    assert pull.next_batch(B, 1000) == (0,)


def test_what_a_source_lacked_of_what_it_brings_is_asked_of_it_again() -> None:
    pull = Pull([10] * 4)
    pull.add_source(A, complete=True, brings=[0, 1, 3])
    assert [pull.next_batch(A, 10) for _ in range(2)] == [(0,), (1,)]
    pull.lacks(A, (0,), [(1, 1), (3, 1)])
    assert [pull.next_batch(A, 10) for _ in range(3)] == [(0,), (3,), ()]


def test_illegal_steps_tell_the_story() -> None:
    pull = pull_from(A)
    with pytest.raises(IllegalStep, match=r"(?s)chunk 3 is not in flight at a.*source a complete"):
        pull.arrived(A, 3, ok=True)
    with pytest.raises(IllegalStep, match="was a source before"):
        pull.add_source(A, complete=True)
    with pytest.raises(IllegalStep, match="no source"):
        pull.next_batch(B, 1)
    pull.next_batch(A, 10)
    pull.lane_ended(A)
    with pytest.raises(IllegalStep, match="not in flight"):
        pull.arrived(A, 0, ok=True)


def test_a_source_is_through_when_all_that_it_brings_is_verified_wherever_that_came_from() -> None:
    pull = Pull([10] * 4, verified=[1])
    pull.add_source(A, complete=True, brings=[0, 1, 2])
    pull.add_source(B, complete=True)
    assert pull.next_batch(A, 10) == (0,)
    assert pull.next_batch(B, 1000) == (2, 3)
    pull.arrived(A, 0, ok=True)
    assert not pull.is_through(A)
    pull.arrived(B, 2, ok=False)
    assert pull.next_batch(A, 1000) == (2,)
    pull.arrived(A, 2, ok=True)
    assert pull.is_through(A)
    assert not pull.is_through(B)
    pull.arrived(B, 3, ok=True)
    assert pull.is_through(B)
    assert "all verified" in str(pull.story)


SIZES = st.lists(st.integers(1, 50), min_size=1, max_size=12)


class PullMachine(RuleBasedStateMachine):
    """Lanes as a model: each writes the chunks that it was given until it ends, also after its
    source was dropped.
    """

    def __init__(self) -> None:
        super().__init__()
        self.pull: Any = None  # a Pull, once started
        self.sizes: list[int] = []
        self.lanes: dict[LeaseId, set[int]] = {}  # of each running lane, what it may write
        self.dropped: set[LeaseId] = set()
        self.verified: set[int] = set()
        self.known: dict[LeaseId, set[int]] = {}  # what a source has told that it has
        self.asked: set[LeaseId] = set()  # whose lane runs, and has asked
        self.leases = 0
        self.brings: dict[LeaseId, set[int]] = {}  # what each source can bring
        self.takes_turns: set[LeaseId] = set()  # sources that can bring everything

    @precondition(lambda self: self.pull is None)
    @rule(sizes=SIZES, data=st.data())
    def start(self, sizes: list[int], data: st.DataObject) -> None:
        self.verified = data.draw(st.sets(st.integers(0, len(sizes) - 1)))
        self.sizes = sizes
        self.pull = Pull(sizes, self.verified)

    @precondition(lambda self: self.pull is not None and len(self.lanes) < 4)
    @rule(complete=st.booleans(), data=st.data())
    def add(self, complete: bool, data: st.DataObject) -> None:
        lease = LeaseId(str(self.leases))
        self.leases += 1
        chunks = range(len(self.sizes))
        brings = data.draw(st.none() | st.sets(st.sampled_from(chunks)))
        self.pull.add_source(lease, complete, None if brings is None else sorted(brings))
        self.brings[lease] = set(chunks if brings is None else brings)
        self.lanes[lease] = set()
        if brings is None:
            self.takes_turns.add(lease)

    @precondition(lambda self: self.lanes)
    @rule(data=st.data(), bytes_max=st.integers(1, 100))
    def ask(self, data: st.DataObject, bytes_max: int) -> None:
        lease = data.draw(st.sampled_from(sorted(self.lanes)))
        batch = self.pull.next_batch(lease, bytes_max)
        writing = set().union(*self.lanes.values())
        assert not writing & set(batch), "two lanes write one chunk"
        assert not self.verified & set(batch), "a verified chunk is asked for again"
        assert list(batch) == sorted(batch)
        assert lease not in self.dropped or not batch
        assert set(batch) <= self.brings[lease], "it cannot bring that"
        wanted = self.brings[lease] - writing - self.verified
        known = self.known.get(lease)
        if known is None:
            assert batch or lease in self.dropped or not wanted
        elif batch and not set(batch) <= known:
            assert not wanted & known, "what it has comes first"
            others = [
                self.known.get(each, self.brings[each])
                for each in self.asked - self.dropped - {lease}
            ]
            assert not any(other & set(batch) for other in others), "another one has it"
        self.asked.add(lease)
        self.lanes[lease] |= set(batch)

    @precondition(lambda self: any(self.lanes.values()))
    @rule(data=st.data())
    def lack(self, data: st.DataObject) -> None:
        lease = data.draw(
            st.sampled_from(sorted(lease for lease, chunks in self.lanes.items() if chunks))
        )
        chunks = data.draw(st.sets(st.sampled_from(sorted(self.lanes[lease])), min_size=1))
        has = (
            data.draw(st.sets(st.integers(0, len(self.sizes) - 1))) & self.brings[lease]
        ) - chunks
        self.pull.lacks(lease, sorted(chunks), [(chunk, 1) for chunk in sorted(has)])
        if lease in self.takes_turns:
            self.known[lease] = has
        self.lanes[lease] -= chunks

    @precondition(lambda self: any(self.lanes.values()))
    @rule(data=st.data(), ok=st.booleans())
    def arrive(self, data: st.DataObject, ok: bool) -> None:
        lease = data.draw(
            st.sampled_from(sorted(lease for lease, chunks in self.lanes.items() if chunks))
        )
        chunk = data.draw(st.sampled_from(sorted(self.lanes[lease])))
        self.pull.arrived(lease, chunk, ok)
        self.lanes[lease].discard(chunk)
        if lease in self.known and chunk not in self.known[lease]:
            del self.known[lease]
        if ok:
            self.verified.add(chunk)

    @precondition(lambda self: self.lanes)
    @rule(data=st.data())
    def drop(self, data: st.DataObject) -> None:
        lease = data.draw(st.sampled_from(sorted(self.lanes)))
        self.pull.drop_source(lease)
        self.dropped.add(lease)

    @precondition(lambda self: self.lanes)
    @rule(data=st.data())
    def end(self, data: st.DataObject) -> None:
        lease = data.draw(st.sampled_from(sorted(self.lanes)))
        assert set(self.pull.lane_ended(lease)) == self.lanes.pop(lease)
        self.asked.discard(lease)
        assert self.pull.lane_ended(lease) == ()

    @invariant()
    def books_agree(self) -> None:
        if self.pull is None:
            return
        self.pull.check_invariants()
        assert self.pull.chunks_verified == len(self.verified)
        assert self.pull.done == (len(self.verified) == len(self.sizes))
        for lease, chunks in self.lanes.items():
            assert self.pull.in_flight(lease) == chunks

    def teardown(self) -> None:
        """Once faults stop, one good source is enough."""
        if self.pull is None:
            return
        for lease in self.lanes:
            self.pull.lane_ended(lease)
        good = LeaseId("good")
        self.pull.add_source(good, complete=True)
        while batch := self.pull.next_batch(good, 60):
            for chunk in batch:
                self.pull.arrived(good, chunk, ok=True)
        assert self.pull.done
        self.pull.check_invariants()


TestPullMachine = PullMachine.TestCase


@dataclass
class Reader:
    """One of several readers that have no source but one another. `lanes`: what it has asked of
    whom.
    """

    pull: Pull
    lanes: dict[int, tuple[int, ...]] = field(default_factory=dict)

    def has(self, chunk: int) -> bool:
        return self.pull.verified[chunk] == 1


@given(st.integers(1, 8), st.integers(1, 4), st.randoms(use_true_random=True))
def test_sources_that_bring_some_chunks_complete_a_reader(
    chunks: int, count: int, random: Random
) -> None:
    """Also where two sources bring one chunk, and where a source says that it lacks a chunk. (True
    random numbers: a search for bad ones would never let some lane move.)
    """
    ranks = [Reader(Pull([1] * chunks)) for _ in range(count)]
    of = [sorted(random.sample(range(chunks), random.randint(0, chunks))) for _ in ranks]
    missing = set(range(chunks)).difference(*of)
    of[0] = sorted({*of[0], *missing})
    reader = Reader(Pull([1] * chunks))
    for number, rank in enumerate(ranks):
        rank.pull.add_source(LeaseId("origin"), complete=True)
        reader.pull.add_source(LeaseId(str(number)), complete=False, brings=of[number])
    for _ in range(400 * chunks * count):
        if reader.pull.done:
            return
        rank = random.choice(ranks)
        for chunk in rank.pull.next_batch(LeaseId("origin"), 1):
            rank.pull.arrived(LeaseId("origin"), chunk, ok=True)
        number = random.randrange(count)
        let_lane_move(reader, number, ranks[number], random, of[number])
    raise AssertionError(f"it waits for ever: {reader.pull}")


@given(st.integers(1, 6), st.integers(2, 5), st.randoms(use_true_random=True))
def test_readers_that_together_hold_everything_complete_one_another(
    chunks: int, count: int, random: Random
) -> None:
    """Each reads from all others: per chunk nobody waits for itself, so that all end, whoever is
    how fast (R9).
    """
    held = [{chunk for chunk in range(chunks) if random.random() < 0.3} for _ in range(count)]
    for chunk in range(chunks):
        held[random.randrange(count)].add(chunk)
    readers = [Reader(Pull([1] * chunks, sorted(each))) for each in held]
    for me, reader in enumerate(readers):
        for other in range(count):
            if other != me:
                reader.pull.add_source(LeaseId(str(other)), complete=False)
    for _ in range(200 * chunks * count):
        if all(reader.pull.done for reader in readers):
            return
        me = random.randrange(count)
        other = random.choice([number for number in range(count) if number != me])
        let_lane_move(readers[me], other, readers[other], random)
    raise AssertionError(f"they wait for ever: {[reader.pull for reader in readers]}")


def let_lane_move(
    reader: Reader, other: int, source: Reader, random: Random, brings: list[int] | None = None
) -> None:
    """One step of the lane that reads `source`: ask, or take what is there, or hear that nothing
    is.
    """
    lease = LeaseId(str(other))
    asked = reader.lanes.get(other) or reader.pull.next_batch(lease, random.randint(1, 6))
    there = [chunk for chunk in asked if source.has(chunk)]
    if there:
        reader.pull.arrived(lease, there[0], ok=True)
        asked = tuple(chunk for chunk in asked if chunk != there[0])
    elif asked and random.random() < 0.5:
        runs = [
            (chunk, 1)
            for chunk in (range(len(source.pull.verified)) if brings is None else brings)
            if source.has(chunk)
        ]
        reader.pull.lacks(lease, asked, runs)
        # before any other lane wakes up
        asked = reader.pull.next_batch(lease, random.randint(1, 6))
    reader.lanes[other] = asked
    reader.pull.check_invariants()
