"""What an operation does between its first call and its end: one handler for publishes, one for fills.

`operations` pairs the ranks' calls, and `decisions` ends an operation, whatever it is for. What happens in between is the
handler's: `publishes`, or `fills` (replicate, update, prefetch and fetch).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from tensorhub.coordinator.actions import Entry
from tensorhub.coordinator.entities import Operation, RankPart
from tensorhub.errors import TensorHubError


@dataclass(frozen=True, slots=True)
class Blame:
    """Why an operation is aborted. `rank` None: no single rank is to blame, and all get `error` itself."""

    error: TensorHubError
    rank: int | None = None
    others: tuple[int, ...] = ()  # ranks that are as much to blame
    again: bool = False  # its ranks make the same call again by themselves


class OperationHandler(Protocol):
    """The steps of an operation, in their order. None of them ends it: where it cannot go on, they say what is to blame."""

    def called(self, part: RankPart) -> Blame | None:
        """One more rank has called, and its part is a part of the operation."""

    def advance(self, operation: Operation) -> Blame | None:
        """Every rank has called, and not every rank has voted: do whatever the facts allow now."""

    def may_commit(self, operation: Operation) -> bool:
        """Every rank has voted: whether it may be decided now. What the ranks still hold is given up with that."""

    def entry(self, operation: Operation) -> Entry | None:
        """Every rank has voted: what must be durable before any rank hears of a commit, if anything must."""

    def commit(self, operation: Operation) -> None:
        """It is decided: make true what it was for."""

    def abort(self, operation: Operation) -> None:
        """It is decided: undo what was begun."""
