"""A rank's vote for what it has filled: the roots of its digests, and which of its chunks were published with others.

While it compares, the vote is not said again, whatever connection is lost: it would count, and may be void in a moment.

What it is told of the publisher's digests after its vote is one list, of all chunks, where the version is of its own layout.
Of another layout there is a list for each selection that the rank reads. Lists and strays have the selection's numbers, and
the memory has its own.

Not responsible for what follows (`filling`), nor for comparing (`chunk_reports`).
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from typing import TypeAlias

from tensorhub import messages
from tensorhub.layouts.reading import ReshardedManifest
from tensorhub.model.manifest import Manifest
from tensorhub.types import OpKey
from tensorhub.worker.calls import CompareDigests
from tensorhub.worker.member_context import MemberContext

Wrong: TypeAlias = "tuple[int, int, messages.Origin | None]"
"""A chunk that is to be read again, the digest that it must have, and where it came from."""


class _Comparison:
    """Of one list, which comes in pages. `chunks`: those that it is about, in its order; None: all."""

    def __init__(self, selection: str = "", shard: int = 0, manifest: Manifest | None = None) -> None:
        self.selection = selection
        self.shard = shard
        self.chunks = manifest.chunks_of(shard, selection) if isinstance(manifest, ReshardedManifest) else None
        self.chunk_count = (
            len(self.chunks) if self.chunks is not None else manifest.chunk_count if manifest is not None else 0
        )
        self.is_last = False  # the page that is being compared is the last one
        self.wrong: dict[int, int] = {}  # chunks that are not as was published, and their published digests
        self.strays: dict[messages.Origin | None, messages.Stray] = {}  # one of each memory from which such chunks came

    def takes(self, page: messages.Compare) -> bool:
        """Whether it is a page of this list, of something that is read."""
        self.is_last = page.last
        is_its = (page.selection, page.shard) == (self.selection, self.shard)
        return is_its and (not self.selection or self.chunks is not None)

    def found(self, wrong: Sequence[Wrong]) -> None:
        """Which chunks of that page are not as was published, which digests they must have, and where they were read."""
        for chunk, published, origin in wrong:
            self.wrong[chunk] = published
            if len(self.strays) < messages.STRAYS_MAX:
                number = chunk if self.chunks is None else bisect_left(self.chunks, chunk)
                self.strays.setdefault(origin, messages.Stray(number, origin))


class Vote:
    """That of one fill. `operation`: which one the fill belongs to now."""

    def __init__(self, context: MemberContext, operation: Callable[[], OpKey]) -> None:
        self.root = b""  # of this rank's digests, once all is there
        self.roots: tuple[messages.SelectionRoot, ...] = ()  # the same, of each selection; where it reads selections
        self.is_void = False  # some of it is being read again
        self._compares = False  # it is not known yet whether that page makes it void
        self._is_owed = False  # it is to be said again once that is known
        self._context = context
        self._operation = operation
        self._comparison = _Comparison()  # of the last list that it was sent

    def made(self, root: bytes, roots: tuple[messages.SelectionRoot, ...]) -> None:
        """All is there, with these roots."""
        self.root, self.roots, self.is_void = root, roots, False
        self._compares = self._is_owed = False

    def say(self) -> None:
        if self._compares:
            self._is_owed = True
            return
        self._context.say(messages.Prepared(self._operation(), self._context.shard.rank, self.root, self.roots))

    def compare(self, page: messages.Compare, manifest: Manifest, generation: int, *, staged: bool) -> None:
        """It has not the digests that were published: find out where, of what was read."""
        if not page.first:
            self._comparison = _Comparison(page.selection, page.shard, manifest)
        if self._comparison.takes(page):
            self._compares, of = True, (page.first, page.digests, self._comparison.chunks)
            self._context.act(CompareDigests(manifest, generation, staged, *of))

    def compared(self, following: int, wrong: Sequence[Wrong]) -> bool:
        """See `Filling.compared`. True: that was the last page, and not all is as it was published."""
        self._compares = False
        self._comparison.found(wrong)
        if self._comparison.is_last and self._comparison.wrong:
            return True
        self._say_compared(following)
        if self._is_owed:
            self._is_owed = False
            self.say()
        return False

    def say_void(self) -> None:
        """What is wrong is read again, and where that came from."""
        self.is_void = True
        self._say_compared(self._comparison.chunk_count, tuple(self._comparison.strays.values()))

    def take_wrong(self) -> dict[int, int]:
        """The chunks that are wrong, each with its published digest."""
        wrong, self._comparison.wrong = self._comparison.wrong, {}
        return wrong

    def _say_compared(self, following: int, strays: tuple[messages.Stray, ...] = ()) -> None:
        of, rank = self._comparison, self._context.shard.rank
        said = messages.Compared(self._operation(), rank, following, strays, self.is_void, of.selection, of.shard)
        self._context.say(said)
