"""Which chunks fills have verified, as seen from outside: no record of the reader's own is believed
(G8, R9).

The judge remembers cells, so that it does not mistake a user's later write for a read.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass, field

from tensorhub.model.manifest import Manifest
from tensorhub.testing.sim.assertion import demand
from tensorhub.testing.sim.layouts import is_laid_out_anew
from tensorhub.testing.sim.memory import Cells
from tensorhub.types import RegistrationId


@dataclass(slots=True)
class _Filled:
    content_id: str
    grid: Manifest
    cells: dict[int, str] = field(default_factory=dict)  # that were verified, by chunk


class VerifiedChunks:
    """What each memory of a cluster, staging memory included, has verified of the content that it
    was filled with last.
    """

    def __init__(self) -> None:
        self._filled: dict[RegistrationId, _Filled] = {}

    def begins(
        self,
        memory: RegistrationId,
        content_id: str,
        cells: Cells,
        kept: Collection[int],
        grid: Manifest,
    ) -> None:
        """It is to be filled with that, in chunks of that grid; `kept`: the chunks that it has
        already. Unchanged chunks that a broken fill of this content has verified in that grid must
        be kept.
        """
        before = self._filled.get(memory)
        if before is not None and before.content_id == content_id:
            there = {} if is_laid_out_anew(before.grid, grid) else before.cells
            lost = [
                chunk for chunk, cell in there.items() if cells[chunk] == cell and chunk not in kept
            ]
            demand(
                not lost,
                "partial fills: {} forgets the chunks {} of {}, which it had verified",
                memory,
                lost,
                content_id,
            )
        self._filled[memory] = _Filled(content_id, grid, {chunk: cells[chunk] for chunk in kept})

    def holds(self, memory: RegistrationId, content_id: str) -> None:
        """It is opened as that: earlier chunks are of no use any more."""
        before = self._filled.get(memory)
        if before is not None and before.content_id != content_id:
            del self._filled[memory]

    def forget(self, memory: RegistrationId) -> None:
        """It is freed."""
        self._filled.pop(memory, None)

    def revoked(self, memory: RegistrationId, chunks: Iterable[int]) -> None:
        """These were verified against their source only, and differ from the publication."""
        filled = self._filled.get(memory)
        if filled is not None:
            for chunk in chunks:
                filled.cells.pop(chunk, None)

    def writes(self, memory: RegistrationId, chunk: int) -> None:
        """A lane writes that chunk of a fill."""
        filled = self._filled.get(memory)
        demand(
            filled is None or chunk not in filled.cells,
            "resume: {} reads chunk {} again, which it had verified",
            memory,
            chunk,
        )

    def arrived(self, memory: RegistrationId, cells: Iterable[tuple[int, str]]) -> None:
        """These chunks have their digests."""
        filled = self._filled.get(memory)
        if filled is not None:
            filled.cells.update(cells)
