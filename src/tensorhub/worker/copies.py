"""Which host copies one worker has, and what they hold: where a fill finds bytes that need no network.

Responsible for that question only. Not responsible for what the copies are for or when they end, nor for copying.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from tensorhub.types import HandleState, Purpose
from tensorhub.worker.calls import LocalCopy
from tensorhub.worker.enrolment import Shard
from tensorhub.worker.holding import Holding


class Copies:
    """One worker's registrations in host memory, in the order in which they were made. Its handles share it."""

    def __init__(self) -> None:
        self._holdings: dict[str, Holding] = {}  # by registration

    def __repr__(self) -> str:
        return f"<Copies: {len(self._holdings)}>"

    def add(self, registration: str, holding: Holding) -> None:
        self._holdings[registration] = holding

    def remove(self, registration: str) -> None:
        self._holdings.pop(registration, None)

    def beside(self, shard: Shard) -> Beside:
        """What one registration asks about the others: only copies of its shard are of use to it."""
        return Beside(self, shard)

    def readable(self, content_id: str, shard: Shard) -> Iterator[tuple[str, Holding, int]]:
        """Those that have (some of) this content: registration, holding, and under which generation it can be copied."""
        for registration, holding in self._holdings.items():
            content, is_other = holding.readable, registration != shard.registration
            is_it = content is not None and content.version.content_id == content_id
            if content is not None and is_it and is_other and holding.shard.number == shard.number:
                yield registration, holding, content.generation


@dataclass(frozen=True, slots=True)
class Beside:
    """The other copies of one registration's shard."""

    copies: Copies
    shard: Shard

    def find(self, content_id: str) -> list[LocalCopy]:
        """Where (some of) this content's chunks are, whole copies first.

        Those of a fill that is going on, and of one that was broken off, have what was verified there.
        """
        found = [
            (holding.version is None, LocalCopy(registration, generation))
            for registration, holding, generation in self.copies.readable(content_id, self.shard)
        ]
        return [copy for _, copy in sorted(found, key=lambda pair: pair[0])]

    def keep(self, content_id: str) -> bool:
        """Whether one holds all of it, and stays when the handle's memory is written (R4): a retention copy does, unless it
        is on its way out itself.
        """
        return any(
            holding.state is HandleState.READY and holding.shard.purpose is Purpose.RETENTION
            for _, holding, _ in self.copies.readable(content_id, self.shard)
        )
