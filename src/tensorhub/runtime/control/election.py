"""Which coordinator of a cluster leads, as far as the shell is concerned: two protocols.

Responsible for the promises between a coordinator's shell and the engine that elects. Not
responsible for an engine, nor for what a leader does.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from tensorhub.runtime.control.store import Store


class Deposed(OSError):
    """This coordinator may write nothing more: another one leads, or its own term has ended. It
    is unknown whether the last write is durable: the next term reads it, or does not.
    """


class Term(Protocol):
    """One leadership."""

    store: Store  # fenced: `write` raises Deposed once the term has ended

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
