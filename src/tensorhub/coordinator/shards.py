"""The shards of one version: who holds each of them, and what that means for the version as a whole.

What has changed of a holding is counted once, before the next question, however much of it has changed.

Responsible for when holdings are counted. Not responsible for what one counts as (`Held.counted`), nor for the counts and
the order of one shard (`Holders`).
"""

from __future__ import annotations

from typing import Protocol, TypeVar

from tensorhub.coordinator.holders import Counted, Holders, Numbered


class Held(Numbered, Protocol):
    """What holds a shard."""

    @property
    def shard(self) -> int: ...

    @property
    def counted(self) -> Counted: ...


H = TypeVar("H", bound=Held)


class Shards(dict[int, Holders[H]]):
    """By shard; none until every rank has published."""

    def __init__(self) -> None:
        super().__init__()
        # As of what is counted: shards without a source, and those that nobody holds all of.
        self.sourceless = self.broken = 0
        # Holdings of which something has changed since they were counted; none between two steps.
        self.uncounted: dict[H, None] = {}
        self.has_grown = False  # what is counted since the last wake shows more to read from; never so between two steps

    def lay_out(self, world_size: int) -> None:
        """Every rank has published: from now on the shards are held. (Who only says that there are many has said little.)"""
        self.update((shard, Holders()) for shard in range(world_size))
        self.sourceless = self.broken = world_size

    # -- changing

    def add(self, holding: H, nbytes: int, chunks: int) -> None:
        """It may be read from now on."""
        self[holding.shard].add(holding, nbytes, chunks)
        self.uncounted[holding] = None

    def remove(self, holding: H) -> None:
        """It takes no readers any more."""
        there = self[holding.shard]
        sources, complete = there.sources, there.complete
        self.uncounted.pop(holding, None)
        there.remove(holding)
        self._changed(there, sources, complete)

    def count(self) -> None:
        """Count anew what has changed."""
        for holding in self.uncounted:
            there = self[holding.shard]
            sources, complete = there.sources, there.complete
            self.has_grown = there.count(holding, holding.counted) or self.has_grown
            self._changed(there, sources, complete)
        self.uncounted.clear()

    def _changed(self, there: Holders[H], sources: int, complete: int) -> None:
        """A shard had so many sources, and complete holdings, before."""
        self.sourceless += bool(sources) - bool(there.sources)
        self.broken += bool(complete) - bool(there.complete)

    # -- questions

    def of(self, shard: int) -> Holders[H]:
        """Those of this shard, counted."""
        if self.uncounted:
            self.count()
        return self[shard]

    def is_whole(self, shard: int) -> bool:
        """Whether somebody holds all of this shard, committed or not."""
        return self.of(shard).complete > 0

    def are_whole(self) -> bool:
        """The same of every shard."""
        if self.uncounted:
            self.count()
        return not self.broken

    def have_sources(self) -> bool:
        """Whether every shard is held, complete and committed, by a replica that takes readers."""
        if self.uncounted:
            self.count()
        return not self.sourceless

    def missing(self) -> list[int]:
        """The shards of which it is not so."""
        return [] if self.have_sources() else [shard for shard in self if not self.of(shard).sources]

    def copies(self) -> int:
        """How many complete copies can be read now: of each shard so many at least."""
        return min((self.of(shard).live_sources for shard in self), default=0)
