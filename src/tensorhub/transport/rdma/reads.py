"""A reader's running reads on one queue pair: groups of chunks, each with a look at the source's
generation word.

Theory of operation ------------------- A *group* is some chunks and, as its last work request, a
read of the source's generation word. That request is *fenced*: it begins when the reads before it
have completed, so that the word is read after the bytes have arrived (R3). A queue pair answers
reads in order, but that would not be enough, because a device may fetch for several of them at a
time. If the word is right, it proves the whole group. Each group's word lands in a slot of its own,
which is zeroed before.

Requests are posted as far as the queue takes them, up to WINDOW_BYTES, one group right behind the
other, so that the wire never waits for this process. The device reports the completion of each
SIGNAL_EVERY-th request and of each group's last one.

Responsible for order, room and the meaning of a completion. Not responsible for waiting, nor for
choosing the reads.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from tensorhub.transport.base import ReadFailure
from tensorhub.transport.generation_words import WORD_BYTES
from tensorhub.transport.rdma.ports import Move, cut, failure_of

WINDOW_BYTES = 16 * 2**20  # of running reads: what a fast network brings while a chunk is digested
SIGNAL_EVERY = 8  # work requests: room in the queue comes back in such portions
CALL_WORKS = 16  # posted by one call


class Posts(Protocol):
    """See `queues.ReaderQueue`."""

    def post(
        self, moves: Sequence[Move], first: int, signaled: frozenset[int], fenced: frozenset[int]
    ) -> None: ...
    def poll(self) -> list[tuple[int, int]]: ...


class Slots(Protocol):
    """See `verbs.Landing`."""

    address: int
    key: int

    def word(self, place: int) -> Any: ...


@dataclass(slots=True)
class Group:
    """Chunks that are named together, or not at all."""

    # (number, digest, bytes); of the last one, if it is read in parts, the last part
    chunks: Sequence[tuple[int, int, int]]
    nbytes: int
    generation: int
    slot: int
    tag: Any  # whatever the caller wants to know of it
    last: int = -1  # the number of its last work request, once that is posted


class Reads:
    """Those of one reader. For one thread."""

    def __init__(self, queue: Posts, slots: Slots, slots_bytes: int, depth: int) -> None:
        """`depth`: work requests that the queue takes; `slots`: for one group more than that."""
        self._queue = queue
        self._slots = slots
        self._slots_bytes = slots_bytes
        self._depth = depth
        self._next_slot = 0
        # not posted yet; with the group whose last it is
        self._todo: deque[tuple[Move, Group | None]] = deque()
        self._groups: deque[Group] = deque()  # that are not proved yet, in their order
        # the bytes of each work request that is posted and not known to be done
        self._under_way: deque[int] = deque()
        self._bytes_under_way = 0
        self._posted = 0  # work requests, ever
        self._done = 0  # of them, up to the last one that was told of

    @property
    def is_hungry(self) -> bool:
        """Whether another group could be posted soon."""
        return len(self._todo) < SIGNAL_EVERY and len(self._groups) < self._depth

    @property
    def done(self) -> int:
        """Grows while bytes come."""
        return self._done

    @property
    def is_idle(self) -> bool:
        """Whether nothing is under way."""
        return not self._groups and not self._todo and self._posted == self._done

    def add(
        self,
        chunks: Sequence[tuple[int, int, int]],
        moves: Sequence[Move],
        word: tuple[int, int],
        generation: int,
        tag: Any = None,
    ) -> None:
        """Read what of these chunks is left by these moves, and the word at that (address, key)
        behind them.
        """
        slot, self._next_slot = self._next_slot, (self._next_slot + WORD_BYTES) % self._slots_bytes
        self._slots.word(slot).value = 0
        group = Group(chunks, sum(move.nbytes for move in moves), generation, slot, tag)
        self._groups.append(group)
        self._todo.extend((move, None) for move in cut(moves))
        self._todo.append(
            (Move(self._slots.address + slot, self._slots.key, *word, WORD_BYTES), group)
        )

    def post(self) -> None:
        """Post what there is room for. OSError."""
        while self._todo and (room := self._depth - (self._posted - self._done)) > 0:
            moves: list[Move] = []
            signaled, fenced = set[int](), set[int]()
            number = self._posted
            while (
                self._todo
                and len(moves) < min(room, CALL_WORKS)
                and self._has_room(self._todo[0][0])
            ):
                move, group = self._todo.popleft()
                self._under_way.append(move.nbytes)
                self._bytes_under_way += move.nbytes
                if group is not None:
                    group.last = number
                    fenced.add(number)
                    signaled.add(number)
                elif (
                    number % SIGNAL_EVERY == SIGNAL_EVERY - 1
                    or len(moves) + 1 == room
                    or not self._has_room(self._todo[0][0])
                ):
                    signaled.add(number)
                moves.append(move)
                number += 1
            if not moves:
                return
            self._queue.post(moves, self._posted, frozenset(signaled), frozenset(fenced))
            self._posted = number

    def _has_room(self, move: Move) -> bool:
        return not self._under_way or self._bytes_under_way + move.nbytes <= WINDOW_BYTES

    def completed(self) -> list[Group]:
        """The groups that are proved by now, perhaps none. ReadFailure."""
        proved: list[Group] = []
        for number, status in self._queue.poll():
            if status:
                raise failure_of(status)
            while self._done <= number:
                self._bytes_under_way -= self._under_way.popleft()
                self._done += 1
        while self._groups and 0 <= self._groups[0].last < self._done:
            group = self._groups.popleft()
            if not group.generation or self._slots.word(group.slot).value != group.generation:
                text = "the memory has changed its generation"
                raise ReadFailure(
                    "refused",
                    text,
                    bytes_discarded=group.nbytes + sum(each.nbytes for each in proved),
                )
            proved.append(group)
        return proved
