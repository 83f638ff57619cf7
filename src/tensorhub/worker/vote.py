"""A rank's vote for its fill: the roots of its digests, and the chunks that differ from the
published ones.

During a comparison the vote is not repeated, whatever connection is lost: it would count, and may
be void in a moment.

After the vote the coordinator may send the publisher's digests. For a version of the rank's own
layout they are one list, of all chunks. For another layout there is a list for each selection that
the rank reads. Lists and strays have the selection's numbers, and the memory has its own.

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
    """The comparison with one list, which comes in pages. `chunks`: the chunks of the list, in its
    order; None: all.
    """

    def __init__(
        self, selection: str = "", shard: int = 0, manifest: Manifest | None = None
    ) -> None:
        self.selection = selection
        self.shard = shard
        self.chunks = (
            manifest.chunks_of(shard, selection)
            if isinstance(manifest, ReshardedManifest)
            else None
        )
        self.chunk_count = (
            len(self.chunks)
            if self.chunks is not None
            else manifest.chunk_count
            if manifest is not None
            else 0
        )
        self.is_last = False  # the page that is being compared is the last one
        # chunks that are not as published, and their published digests
        self.wrong: dict[int, int] = {}
        # one of each memory from which such chunks came
        self.strays: dict[messages.Origin | None, messages.Stray] = {}

    def takes(self, page: messages.Compare) -> bool:
        """Whether the page belongs to this list, and this rank reads the selection."""
        self.is_last = page.last
        is_its = (page.selection, page.shard) == (self.selection, self.shard)
        return is_its and (not self.selection or self.chunks is not None)

    def found(self, wrong: Sequence[Wrong]) -> None:
        """The wrong chunks of that page, each with its published digest and its origin."""
        for chunk, published, origin in wrong:
            self.wrong[chunk] = published
            if len(self.strays) < messages.STRAYS_MAX:
                number = chunk if self.chunks is None else bisect_left(self.chunks, chunk)
                self.strays.setdefault(origin, messages.Stray(number, origin))


class Vote:
    """The vote of one fill. `operation`: the operation of the fill now."""

    def __init__(self, context: MemberContext, operation: Callable[[], OpKey]) -> None:
        self.root = b""  # of this rank's digests, once all is there
        # the root of each selection, where it reads selections
        self.roots: tuple[messages.SelectionRoot, ...] = ()
        self.is_void = False  # some of it is being read again
        self._compares = False  # a page is being compared, which may make the vote void
        self._is_owed = False  # the vote is to be repeated after that
        self._context = context
        self._operation = operation
        self._comparison = _Comparison()  # with the last list that was sent

    def made(self, root: bytes, roots: tuple[messages.SelectionRoot, ...]) -> None:
        """All chunks are in place, with these roots."""
        self.root, self.roots, self.is_void = root, roots, False
        self._compares = self._is_owed = False

    def say(self) -> None:
        if self._compares:
            self._is_owed = True
            return
        self._context.say(
            messages.Prepared(self._operation(), self._context.shard.rank, self.root, self.roots)
        )

    def compare(
        self, page: messages.Compare, manifest: Manifest, generation: int, *, staged: bool
    ) -> None:
        """The roots are not the published ones: find the wrong chunks."""
        if not page.first:
            self._comparison = _Comparison(page.selection, page.shard, manifest)
        if self._comparison.takes(page):
            self._compares, of = True, (page.first, page.digests, self._comparison.chunks)
            self._context.act(CompareDigests(manifest, generation, staged, *of))

    def compared(self, following: int, wrong: Sequence[Wrong]) -> bool:
        """See `Filling.compared`. True: this was the last page, and chunks are wrong."""
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
        """The wrong chunks are read again. Say so, with their origins."""
        self.is_void = True
        self._say_compared(self._comparison.chunk_count, tuple(self._comparison.strays.values()))

    def take_wrong(self) -> dict[int, int]:
        """The chunks that are wrong, each with its published digest."""
        wrong, self._comparison.wrong = self._comparison.wrong, {}
        return wrong

    def _say_compared(self, following: int, strays: tuple[messages.Stray, ...] = ()) -> None:
        of, rank = self._comparison, self._context.shard.rank
        said = messages.Compared(
            self._operation(), rank, following, strays, self.is_void, of.selection, of.shard
        )
        self._context.say(said)
