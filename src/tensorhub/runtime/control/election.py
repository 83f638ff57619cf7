"""What a coordinator's shell asks of the engine that keeps its state and elects a leader: the
protocols `Store` and `Election`.

Responsible for the promises between both. Not responsible for an engine (`store`, `etcd_store`,
`elections`), nor for what a leader does.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from tensorhub.coordinator import Durable, Entry

STOPPED = "this process was stopped, or its machine slept"  # if nothing else is known


class Store(Protocol):
    """Where a coordinator's entries are kept. `cluster` and `epoch` are set once it is open."""

    cluster: str
    epoch: int
    blocks: bool  # whether `write` waits, and is called in a thread of the loop's

    def read(self) -> Durable:
        """All entries that still count. Blocks. Raises StateError if they cannot be read."""
        ...

    def write(self, entries: Sequence[Entry]) -> None:
        """Make all of them durable, or none. Blocks. Raises OSError if none is durable; Deposed if
        the term has ended, and nothing is known of them.
        """
        ...

    def begin_anew(self) -> None:
        """Keep the entries, under the id of a new cluster: those who know more of the present one
        are told that numbers may go back. Blocks. Raises as `write`. `read` by the next term.
        """
        ...

    def close(self) -> None:
        """Let go of it. A second call does nothing."""
        ...


class Deposed(OSError):
    """This coordinator may write nothing more: another one leads, or its own term has ended. It
    is unknown whether the last write is durable: the next term reads it, or does not.
    """


class Term(Protocol):
    """One leadership."""

    store: Store  # fenced: `write` raises Deposed once the term has ended

    @property
    def left_s(self) -> float:
        """How long no other candidate can lead, by this machine's own clock. The shell asks before
        each event: what a stopped process finds unread may be younger than another leader.
        """
        ...

    @property
    def why(self) -> str:
        """Why no time is left, as far as this term knows."""
        ...

    async def lost(self) -> str:
        """Keep the leadership. Returns why it has ended, before another candidate can lead, by
        this machine's own clock. The shell runs this for as long as it leads.
        """
        ...

    async def resign(self) -> None:
        """Give the leadership back at once, and let go of the store. Bounded in time, and never
        raises for an engine that is away; called once, also after `lost`.
        """
        ...


class Election(Protocol):
    """A candidate's side of an engine."""

    async def campaign(self, address: str, stands_by: Callable[[str], None]) -> Term:
        """Wait until this candidate leads. `address`: where workers reach it.

        `stands_by` is called each time that this candidate finds another leader, with the
        leader's address ("" if the engine does not know it). Raises StateError or OSError if the
        engine cannot be used: `serve` raises that of the first campaign, and tries again after a
        later one.
        """
        ...

    async def aclose(self) -> None:
        """Leave the candidates."""
        ...
