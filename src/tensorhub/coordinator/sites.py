"""In which sites the shards of one layout can be read: counted, so that nobody has to look at their holders.

Responsible for counts. Not responsible for when they change (`Shards`), nor for what follows from them (`ways`, `gates`).
"""

from __future__ import annotations

from collections import Counter

from tensorhub.coordinator.holders import Place


class Sites:
    """By site, of how many shards there is a source, and of how many there is anybody who can be read."""

    def __init__(self) -> None:
        self.arrived: set[str] = set()  # where a shard has its first one, since the last wake; empty between two steps
        self._holders: Counter[tuple[int, Place]] = Counter()  # of each shard; a source can be read, too
        self._shards: Counter[Place] = Counter()

    def __repr__(self) -> str:
        return f"<Sites {dict(self._shards)}>"

    def move(self, shard: int, before: Place | None, after: Place | None) -> None:
        """A holder of that shard was there, and is here."""
        if before == after:
            return
        for place in _counts_as(after):
            self._holders[shard, place] += 1
            if self._holders[shard, place] == 1:
                self._shards[place] += 1
                self.arrived.add(place.site)
        for place in _counts_as(before):
            self._holders[shard, place] -= 1
            if not self._holders[shard, place]:
                del self._holders[shard, place]
                self._shards[place] -= 1
                if not self._shards[place]:
                    del self._shards[place]

    def shards(self, place: Place) -> int:
        """How many can be read there, of sources or of anybody."""
        return self._shards[place]

    def has(self, shard: int, place: Place) -> bool:
        """Whether that one can be."""
        return (shard, place) in self._holders

    def counts(self) -> tuple[Counter[tuple[int, Place]], Counter[Place]]:
        """All of them."""
        return self._holders, self._shards


def _counts_as(place: Place | None) -> tuple[Place, ...]:
    if place is None:
        return ()
    return (place, Place(place.site, False)) if place.is_source else (place,)
