"""One leadership of a simulated coordinator after another, and the store, which only the newest may
write.

`FencedStore` promises what `runtime.control.election` asks of an engine. Not responsible for when
a term begins or ends: the driver decides that.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from math import inf
from typing import Any

from tensorhub.coordinator import Coordinator, Entry, Persist
from tensorhub.testing.sim.network import Link, Process


class Deposed(OSError):
    """Another term has begun: the writer's term may write nothing."""


class FencedStore(list[Entry]):
    """All durable entries, in their order. It survives every coordinator."""

    epoch = 0  # of the newest term

    def __init__(self) -> None:
        super().__init__()
        self._found: dict[int, int] = {}  # by epoch: how many entries its term has found

    def begin(self) -> tuple[int, list[Entry]]:
        """Begin a term: its epoch, and what it finds. No earlier term writes from now on."""
        self.epoch += 1
        self._found[self.epoch] = len(self)
        return self.epoch, list(self)

    def go_back(self, entries: int) -> None:
        """It is an older copy of itself from now on, of so many entries."""
        del self[entries:]
        self.epoch = max(epoch for epoch, found in self._found.items() if found <= entries)

    def write(self, epoch: int, entry: Entry) -> None:
        """Make it durable for that term. Raises Deposed."""
        if epoch != self.epoch:
            raise Deposed(f"epoch {epoch} is over")
        self.append(entry)

    def crash(self, writing: Entry | None = None) -> bool:
        """The process that has it open dies while it writes that, or at rest. Whether that is
        durable.
        """
        return False


@dataclass(eq=False)
class Term:
    """One leadership, also of a coordinator that has not noticed that another one leads."""

    epoch: int
    core: Coordinator
    party: Process  # where it runs
    # its connections, but those that it has seen end; the first of each pair is a SimWorker
    links: dict[int, tuple[Any, Link]] = field(default_factory=dict)
    unstored: dict[int, Persist] = field(default_factory=dict)
    # of `unstored`: durable already, and it has not heard so
    durable: set[int] = field(default_factory=set)
    # by incarnation: the newest connection over which it has welcomed it
    joined: dict[str, int] = field(default_factory=dict)
    lease_ends: float = inf  # by its own clock: it takes no event afterwards
    is_clock_wrong: bool = False  # its lease was over before that
    is_cut_off: bool = False  # nothing passes between it and the store
    tick_at: float | None = None
    stored_at: float = 0.0  # when the store is done with what it has
    unheard_until: float = 0.0  # a reply was lost: it hears of no later write before

    def __repr__(self) -> str:
        return f"<Term {self.epoch} of {self.party.name}, {len(self.links)} links>"
