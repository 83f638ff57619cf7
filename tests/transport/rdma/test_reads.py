"""The order of a reader's work requests, and what their completions prove."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import pytest

from tensorhub.transport.base import ReadFailure
from tensorhub.transport.generation_words import WORD_BYTES
from tensorhub.transport.rdma.ports import Move
from tensorhub.transport.rdma.reads import Reads

WORD = (9000, 5)
SLOTS = 8


class Slots:
    def __init__(self) -> None:
        self._words = (ctypes.c_uint64 * SLOTS)()
        self.address, self.key = 5000, 6

    def word(self, place: int) -> ctypes.c_uint64:
        return ctypes.c_uint64.from_buffer(self._words, place)


class Queue:
    """Completes what it is told to, in order, as a device does: those that are signaled are told
    of.
    """

    def __init__(self, slots: Slots, generation: int, depth: int) -> None:
        self.posted: list[Move] = []
        # None: it says that it has read the word, and has written nothing
        self.generation: int | None = generation
        self._slots = slots
        self._depth = depth
        self._flags: list[tuple[bool, bool]] = []
        self._done = 0
        self._told: list[tuple[int, int]] = []
        self._room = depth

    def post(
        self, moves: Sequence[Move], first: int, signaled: frozenset[int], fenced: frozenset[int]
    ) -> None:
        assert first == len(self.posted)
        self.posted += moves
        self._flags += [
            (number in signaled, number in fenced) for number in range(first, first + len(moves))
        ]
        self._room -= len(moves)
        assert self._room >= 0, "the queue takes no more"

    def is_word(self, number: int) -> bool:
        return self.posted[number].there == WORD[0]

    def complete(self, count: int, status: int = 0) -> None:
        for number in range(self._done, min(self._done + count, len(self.posted))):
            is_signaled, is_fenced = self._flags[number]
            assert is_fenced == self.is_word(number)
            assert is_signaled or not is_fenced
            if is_fenced and self.generation is not None:
                self._slots.word(
                    self.posted[number].here - self._slots.address
                ).value = self.generation
            if is_signaled or status:
                self._told.append((number, status))
            self._done += 1

    def poll(self) -> list[tuple[int, int]]:
        found, self._told = self._told, []
        if found:
            self._room = self._depth - (len(self.posted) - found[-1][0] - 1)
        return found


def rig(depth: int = 64, generation: int = 7) -> tuple[Reads, Queue]:
    slots = Slots()
    queue = Queue(slots, generation, depth)
    return Reads(queue, slots, SLOTS * WORD_BYTES, depth), queue


def add(reads: Reads, chunk: int, pieces: int, nbytes: int = 100) -> None:
    """A chunk that is read in so many pieces, which are no neighbours."""
    moves = [Move(chunk * 10**6 + n * 1000, 1, n * 5000, 2, nbytes) for n in range(pieces)]
    reads.add([(chunk, 0, pieces * nbytes)], moves, WORD, 7)


def proved(reads: Reads) -> list[int]:
    return [chunk for group in reads.completed() for chunk, *_ in group.chunks]


def test_a_group_is_proved_by_its_word_alone() -> None:
    reads, queue = rig()
    add(reads, 1, 3)
    add(reads, 2, 1)
    reads.post()
    assert [queue.is_word(number) for number in range(6)] == [
        False,
        False,
        False,
        True,
        False,
        True,
    ]
    queue.complete(3)
    assert proved(reads) == []
    queue.complete(1)
    assert proved(reads) == [1]
    assert not reads.is_idle
    queue.complete(2)
    assert proved(reads) == [2]
    assert reads.is_idle


@pytest.mark.parametrize("depth", [1, 2, 7, 16, 64])
def test_the_queue_is_never_asked_for_more_than_it_takes(depth: int) -> None:
    reads, queue = rig(depth)
    found: list[int] = []
    chunk = 0
    while len(found) < 20:
        while chunk < 20 and reads.is_hungry:
            add(reads, chunk, chunk % 5)
            chunk += 1
        reads.post()
        queue.complete(3)
        found += proved(reads)
    assert found == list(range(20))
    assert reads.is_idle


@pytest.mark.parametrize("generation", [0, 6, 8])
def test_another_word_discards_what_came_with_it(generation: int) -> None:
    reads, queue = rig(generation=generation)
    add(reads, 1, 2)
    reads.post()
    queue.complete(3)
    with pytest.raises(ReadFailure) as caught:
        reads.completed()
    assert (caught.value.reason, caught.value.bytes_discarded) == ("refused", 200)


def test_a_word_that_has_not_come_is_not_the_last_one() -> None:
    """Slots are used again, zeroed: what is in them is never of an earlier group."""
    reads, queue = rig()
    for chunk in range(SLOTS + 1):
        add(reads, chunk, 1)
        reads.post()
        if chunk == SLOTS:
            queue.generation = None
        queue.complete(2)
        if chunk < SLOTS:
            assert proved(reads) == [chunk]
    with pytest.raises(ReadFailure, match="changed its generation"):
        reads.completed()


def test_a_generation_of_zero_is_never_valid() -> None:
    reads, queue = rig(generation=0)
    reads.add([(1, 0, 1)], [], WORD, 0)
    reads.post()
    queue.complete(1)
    with pytest.raises(ReadFailure, match="changed its generation"):
        reads.completed()


def test_a_failed_request_fails_the_read() -> None:
    reads, queue = rig()
    add(reads, 1, 2)
    reads.post()
    queue.complete(1, status=10)
    with pytest.raises(ReadFailure, match="not registered"):
        reads.completed()
