"""Which host copy has to make room for another one (R5): told from what a worker does, and not from
its budget's books.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from tensorhub.testing.sim.assertion import demand
from tensorhub.types import Purpose

# The purposes whose room a purpose may take. A copy that keeps a version, and a staged update, for
# which a caller waits, come before a copy that is only there ahead of time. A seed gives way to
# nothing but a copy that keeps a version.
MAY_TAKE: Final = {
    Purpose.RETENTION: (Purpose.PREFETCH, Purpose.SEED, Purpose.ARCHIVE),
    Purpose.USE: (Purpose.PREFETCH, Purpose.ARCHIVE),
    Purpose.PREFETCH: (Purpose.ARCHIVE,),
    Purpose.SEED: (Purpose.ARCHIVE,),
}


class Rooms:
    """The room that the host copies and staged updates of one worker have. `bytes_max`: of all
    together.
    """

    def __init__(self, who: str, bytes_max: int) -> None:
        self._who = who
        self._bytes_max = bytes_max
        self._rooms: dict[str, tuple[Purpose, int]] = {}  # by id, oldest first
        # copies that are being made: when they get their room is not seen here
        self._ordered = set[str]()

    def __repr__(self) -> str:
        return f"<Rooms of {self._who}: {self._rooms}>"

    def ordered(self, ident: str) -> None:
        """A copy is to be made, and will have room, or is refused."""
        self._ordered.add(ident)

    def refused(self, ident: str) -> None:
        self._ordered.discard(ident)

    def given(self, ident: str, purpose: Purpose, nbytes: int) -> None:
        """It has room from now on; if it had some, it is as old as that."""
        self._rooms[ident] = purpose, nbytes
        self._ordered.discard(ident)

    def given_back(self, ident: str) -> None:
        """It has none any more."""
        self._rooms.pop(ident, None)
        self._ordered.discard(ident)

    def taken(self, ident: str, memory: Mapping[str, int], *, is_reserved: bool) -> None:
        """Memory is taken for it; `memory`: all that is taken now."""
        demand(
            is_reserved,
            "host copies: {} has taken memory for {} that was not reserved",
            self._who,
            ident,
        )
        demand(
            sum(memory.values()) <= self._bytes_max,
            "host copies: {} has taken more than {} bytes: {}",
            self._who,
            self._bytes_max,
            memory,
        )

    def evicted(self, ident: str, purpose: Purpose, wanted_bytes: int) -> None:
        """Its room is taken from it for something with that purpose: it is the oldest copy that has
        to give way. (A copy that has given its room back by itself meanwhile loses nothing.)
        """
        if ident not in self._rooms:
            return
        told = self._who, ident, purpose.value, self._rooms
        lower = [each for each, (has, _) in self._rooms.items() if has in MAY_TAKE.get(purpose, ())]
        demand(
            ident in lower,
            "host copies: {}: {} has to go for {}, which does not come first, of {}",
            *told,
        )
        demand(
            ident == lower[0],
            "host copies: {}: {} has to go for {}, of {}: {} is older",
            *told,
            lower[0],
        )
        free = self._bytes_max - sum(nbytes for _, nbytes in self._rooms.values())
        # Others that are being made may have theirs already. And versions differ in size in other
        # layouts: what a seed keeps its room for is not seen here.
        has_seeds = any(has is Purpose.SEED for has, _ in self._rooms.values())
        is_needed = free < wanted_bytes or len(self._ordered) > 1 or has_seeds
        demand(
            is_needed,
            "host copies: {}: {} has to go for {}, of {}: {} bytes are free, and {} are wanted",
            *told,
            free,
            wanted_bytes,
        )
