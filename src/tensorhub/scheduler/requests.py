"""One lane's requests: what it has asked its source for, and which of what arrives is good.

Responsible for how far a lane asks ahead, and for entering its answers into the `Pull`. Not responsible for which chunks a
lane is given (`scheduler.pull`), nor for locks: whoever guards the pull guards this.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from tensorhub.scheduler.pull import Pull, Runs
from tensorhub.types import LeaseId

BATCHES_OPEN = 2  # of one lane: the next is asked for before the last has arrived

Named = tuple[int, int | None]
"""A chunk, and the digest that its source says it has."""


class Requests:
    """Those of one lane."""

    def __init__(self, pull: Pull, lease: LeaseId) -> None:
        self.asked: list[set[int]] = []  # of each open batch, what has not arrived; none is empty
        self._pull = pull
        self._lease = lease

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
        return batches

    def lacked(self, chunks: Iterable[int], has: Runs) -> None:
        """The source lacks these chunks: another source may bring them. If nobody has them, they are waited for here."""
        self._answered(set(chunks))
        self._pull.lacks(self._lease, chunks, has)

    def arrived(self, good: Iterable[Named], bad: Iterable[int]) -> None:
        """These are in the destination, with their digests or with others."""
        right = [chunk for chunk, _ in good]
        self._answered({*right, *bad})
        for chunk in right:
            self._pull.arrived(self._lease, chunk, ok=True)
        for chunk in bad:
            self._pull.arrived(self._lease, chunk, ok=False)

    @staticmethod
    def sort_out(
        arrived: Iterable[Named], made: Mapping[int, int], published: Mapping[int, int], *, is_digested: bool
    ) -> tuple[list[Named], list[int]]:
        """Which of these chunks have their digest, and which have not. `made`: the digests of what is in the destination;
        `published`: what some chunks must have as digest, whatever their source says.
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
