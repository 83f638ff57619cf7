"""Which host copies one worker has, and what they hold: where a fill finds bytes that need no network.

Responsible for that question only. Not responsible for what the copies are for or when they end, nor for copying.
"""

from __future__ import annotations

from tensorhub.worker.calls import LocalCopy
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

    def find(self, content_id: str, shard: int) -> list[LocalCopy]:
        """Where (some of) this content's chunks of that shard are, whole copies first.

        Those of a fill that is going on, and of one that was broken off, have what was verified there.
        """
        found = []
        for registration, holding in self._holdings.items():
            content = holding.readable
            if content is not None and content.version.content_id == content_id and holding.shard_number == shard:
                found.append((holding.version is None, LocalCopy(registration, content.generation)))
        return [copy for _, copy in sorted(found, key=lambda pair: pair[0])]
