"""The budget of a worker's host memory (R5): the bytes that each copy has reserved, and the copies
that must make room.

Responsible for the sum: reservations never exceed the budget, and no memory is allocated without a
reservation. Not responsible for memory itself, nor for ending the copies that must go: the caller
does that, and then asks again.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import inf

from tensorhub.errors import StateError
from tensorhub.machine import demand
from tensorhub.types import Purpose

WORDS = {
    Purpose.USE: "a staged update",
    Purpose.PREFETCH: "prefetch",
    Purpose.RETENTION: "retention",
    Purpose.SEED: "a seed",
    Purpose.ARCHIVE: "an archived version",
}
# The purposes whose memory a purpose may take. A copy that keeps a version, and a staged update
# (USE), for which a caller waits, outrank a copy that is only fetched ahead. An archived version
# can be read from the archive again.
OUTRANKS: dict[Purpose, frozenset[Purpose]] = {
    Purpose.RETENTION: frozenset({Purpose.PREFETCH, Purpose.SEED, Purpose.ARCHIVE}),
    Purpose.USE: frozenset({Purpose.PREFETCH, Purpose.ARCHIVE}),
    Purpose.PREFETCH: frozenset({Purpose.ARCHIVE}),
    Purpose.SEED: frozenset({Purpose.ARCHIVE}),
    Purpose.ARCHIVE: frozenset({Purpose.ARCHIVE}),
}


@dataclass(frozen=True, slots=True)
class Reservation:
    """Bytes that belong to one host copy, from before they are allocated until they are freed."""

    purpose: Purpose
    nbytes: int
    taken: bool  # from the system: it may be allocated


class Budget:
    """`bytes_max`: `Options.host_memory_bytes`."""

    def __init__(self, bytes_max: int) -> None:
        self.bytes_max = bytes_max
        self._reserved: dict[str, Reservation] = {}  # by the copy's id, oldest first
        self._lent: dict[str, int] = {}  # bytes, by registration, oldest first
        # what was lent to that registration is needed, and must be free when this returns
        self.on_recall: Callable[[str], None] = lambda registration: None
        # when an archived version was last asked for
        self.last_used: Callable[[str], float] = lambda ident: 0.0

    def __repr__(self) -> str:
        return (
            f"<Budget {self.reserved_bytes} of {self.bytes_max} bytes "
            f"in {len(self._reserved)} copies>"
        )

    @property
    def reserved_bytes(self) -> int:
        """Never more than `bytes_max`."""
        return sum(reservation.nbytes for reservation in self._reserved.values())

    def reservation(self, ident: str) -> Reservation | None:
        return self._reserved.get(ident)

    def plan(self, ident: str, purpose: Purpose, nbytes: int) -> tuple[str, ...]:
        """The copies that must be gone before `ident` may have `nbytes`: archived versions, the one
        used longest ago first, then the oldest of those that it outranks, and no more than it
        takes. Empty: `reserve` would succeed now.

        Raises StateError, which says how many bytes are needed, if there would be no room without
        them either.
        """
        self._check_possible(purpose, nbytes)
        missing = self._missing(ident, nbytes)
        going: list[str] = []
        for other in sorted(self._reserved, key=self._precedence):
            if missing <= 0:
                break
            reservation = self._reserved[other]
            if other != ident and reservation.purpose in OUTRANKS[purpose]:
                going.append(other)
                missing -= reservation.nbytes
        if missing > 0:
            text = (
                f"{WORDS[purpose]} needs {nbytes} bytes of host memory, and "
                f"{self.reserved_bytes} of the"
            )
            text += (
                f" {self.bytes_max} bytes of Options.host_memory_bytes are in use by copies "
                f"that it does not outrank"
            )
            raise StateError(
                f"{text}: wait until they are gone, or give {self.bytes_max + missing}",
                retryable=True,
            )
        return tuple(going)

    def _precedence(self, ident: str) -> float:
        """Those with less go first; of equals the oldest one."""
        is_archived = self._reserved[ident].purpose is Purpose.ARCHIVE
        return self.last_used(ident) if is_archived else inf

    def _check_possible(self, purpose: Purpose, nbytes: int) -> None:
        if nbytes > self.bytes_max:
            text = (
                f"{WORDS[purpose]} needs {nbytes} bytes of host memory, and "
                f"Options.host_memory_bytes is {self.bytes_max}"
            )
            raise StateError(f"{text}: give {nbytes} or more")

    def _missing(self, ident: str, nbytes: int) -> int:
        mine = self._reserved.get(ident)
        return (
            self.reserved_bytes - (mine.nbytes if mine is not None else 0) + nbytes - self.bytes_max
        )

    def reserve(self, ident: str, purpose: Purpose, nbytes: int, *, taken: bool = False) -> None:
        """Let `ident` have so many bytes from now on, instead of what it may have had. StateError
        if they are not free.
        """
        self._check_possible(purpose, nbytes)
        if self._missing(ident, nbytes) > 0:
            text = (
                f"{WORDS[purpose]} needs {nbytes} bytes of host memory, and "
                f"{self.reserved_bytes} of the"
            )
            raise StateError(
                f"{text} {self.bytes_max} bytes of Options.host_memory_bytes are in use",
                retryable=True,
            )
        self._reserved[ident] = Reservation(purpose, nbytes, taken)
        while self._lent and self.reserved_bytes + self._lent_bytes() > self.bytes_max:
            oldest = next(iter(self._lent))
            del self._lent[oldest]
            self.on_recall(oldest)

    def lend(self, registration: str, nbytes: int) -> bool:
        """Let deltas of that registration take so many bytes, until a copy needs them (`on_recall`)
        or the registration's memory is freed. False: they are not free.
        """
        others = self._lent_bytes() - self._lent.get(registration, 0)
        if self.reserved_bytes + others + nbytes > self.bytes_max:
            return False
        self._lent[registration] = nbytes
        return True

    def _lent_bytes(self) -> int:
        return sum(list(self._lent.values()))  # a copy: another thread may take some back

    def take_back(self, registration: str) -> None:
        """What was lent to it is free again. For any thread."""
        self._lent.pop(registration, None)

    def free(self, ident: str, *, if_taken: bool = True) -> None:
        """The copy's memory is free again; an id that has none is fine. `if_taken` False: memory
        that was taken stays.
        """
        reservation = self._reserved.get(ident)
        if reservation is not None and (if_taken or not reservation.taken):
            del self._reserved[ident]

    def check_invariants(self) -> None:
        """Raise InvariantBroken if more is reserved than there is."""
        used = self.reserved_bytes + self._lent_bytes()
        demand(used <= self.bytes_max, "no more is reserved than there is", self)
