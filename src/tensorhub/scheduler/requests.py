"""One lane's requests: what it has asked its source for, and which of what arrives is good.

Responsible for how far a lane asks ahead, for entering its answers into the `Pull`, and for giving
up a source that never gets what it lacks. Not responsible for which chunks a lane is given
(`scheduler.pull`), nor for locks.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from math import inf

from tensorhub.scheduler.pull import Pull, Runs
from tensorhub.types import LeaseId

BATCHES_OPEN = 2  # of one lane: the next is asked for before the last has arrived

Named = tuple[int, int | None]
"""A chunk, and the digest that its source says it has."""


def patience_s(stall_timeout_s: float) -> float:
    """How long a source may lack what is asked for, and get none of it. A source notices in half of
    that time that its own source has stalled.
    """
    return 2 * stall_timeout_s


class Requests:
    """The requests of one lane. `patience_s`: a source that lacks the remaining chunks for so long,
    and gets none of them meanwhile, is given up, unless all other sources lack them as well.
    """

    def __init__(self, pull: Pull, lease: LeaseId, patience_s: float = inf) -> None:
        self.asked: list[set[int]] = []  # of each open batch, what has not arrived; none is empty
        self._pull = pull
        self._lease = lease
        self._patience_s = patience_s
        # since when its source has had nothing of what it was asked for, again and again
        self._lacks_since = inf

    def __repr__(self) -> str:
        return f"<Requests of {self._lease}: {self.asked}>"

    def ask(self, batch_bytes: int) -> list[tuple[int, ...]]:
        """Batches to ask for now."""
        batches: list[tuple[int, ...]] = []
        while len(self.asked) < BATCHES_OPEN:
            batch = self._pull.next_batch(self._lease, batch_bytes)
            if not batch:
                break
            self.asked.append(set(batch))
            batches.append(batch)
        if not self.asked:
            self._lacks_since = inf  # another source has its turn
        return batches

    def lacked(self, chunks: Iterable[int], has: Runs, now: float) -> str:
        """The source lacks these chunks: another source may bring them. If no source has them, they
        are waited for here.

        Returns why the source is given up, or nothing.
        """
        self._answered(set(chunks))
        self._pull.lacks(self._lease, chunks, has)
        self._lacks_since = min(self._lacks_since, now)
        given_up = now > self._lacks_since + self._patience_s
        return (
            f"it has lacked the rest for {self._patience_s:g} s, and has got none of it"
            if given_up
            else ""
        )

    def arrived(
        self, good: Iterable[Named], bad: Iterable[int], came: Mapping[int, int] | None = None
    ) -> None:
        """These chunks are in the destination, `good` with the right digests and `bad` with wrong
        ones. `came`: the bytes that came for a chunk, where that is not its size.
        """
        sizes = came or {}
        self._lacks_since = inf
        right = [chunk for chunk, _ in good]
        self._answered({*right, *bad})
        for chunk in right:
            self._pull.arrived(self._lease, chunk, True, sizes.get(chunk))
        for chunk in bad:
            self._pull.arrived(self._lease, chunk, False, sizes.get(chunk))

    @staticmethod
    def sort_out(
        arrived: Iterable[Named],
        made: Mapping[int, int],
        published: Mapping[int, int],
        *,
        is_digested: bool,
    ) -> tuple[list[Named], list[int]]:
        """Which of these chunks have their digest, and which have not. `made`: the digests of the
        bytes in the destination; `published`: the digests that some chunks must have, whatever
        their source says.
        """
        good: list[Named] = []
        bad: list[int] = []
        for chunk, digest in arrived:
            found = made.get(chunk)
            if found != (digest if is_digested else None) or published.get(chunk, found) != found:
                bad.append(chunk)
            else:
                good.append((chunk, digest))
        return good, bad

    def _answered(self, chunks: set[int]) -> None:
        self.asked = [left for batch in self.asked if (left := batch - chunks)]
