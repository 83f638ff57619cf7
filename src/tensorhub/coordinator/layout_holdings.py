"""Who holds a version in one layout: its shards' holders, and what describes each shard.

A version has one for the layout in which it was published, and one for each other layout in which somebody fills or
holds it. What is published alone decides whether a version is available, and what is retained.

Responsible for the counts of one layout. Not responsible for when they change (`Version.count`).
"""

from __future__ import annotations

from itertools import chain
from typing import TypeVar

from tensorhub.coordinator.shards import Held, Shards
from tensorhub.messages import Need

PARTS = 3  # of a rank: catalogue, arrangement and coordinates

H = TypeVar("H", bound=Held)


class LayoutHoldings(Shards[H]):
    """Those of one version and layout."""

    def __init__(self, layout_id: str) -> None:
        super().__init__()
        self.layout_id = layout_id
        self.manifests: dict[int, bytes] = {}  # by shard; of another layout those of the group that was the first to fill
        # As of `Member`; by shard, of the same shards. In another layout: where what was published lies in its readers'
        # memory, as the first has said; none before that.
        self.parts: dict[int, tuple[bytes, ...]] = {}
        self.needs: dict[
            int, tuple[Need, ...]
        ] = {}  # of another layout: what each shard's readers need, as the first has said
        self._classes: dict[int, tuple[int, ...]] = {}  # see `classes`; empty: to be made anew

    def __repr__(self) -> str:
        return f"<LayoutHoldings {self.layout_id} of {[len(there) for there in self.values()]}>"

    @property
    def has_holders(self) -> bool:
        return any(self.values())

    @property
    def classes(self) -> dict[int, tuple[int, ...]]:
        """Shards with equal parts have equal bytes in equal places. By the first of them; a plain one is alone."""
        if not self._classes:
            found: dict[object, list[int]] = {}
            for shard in self:
                parts = self.parts.get(shard)
                found.setdefault(parts[-1] if parts else shard, []).append(shard)  # the last part names the others
            self._classes = {shards[0]: tuple(shards) for shards in found.values()}
        return self._classes

    def class_of(self, shard: int) -> int:
        """The first shard of its class."""
        return next(first for first, shards in self.classes.items() if shard in shards)

    def takes(self, shard: int, parts: tuple[bytes, ...]) -> bool:
        """Whether, in another layout, who says so of its memory holds that shard as all others here do."""
        return len(parts) == PARTS and self.parts.get(shard) in (None, (), parts)

    def learn(self, shard: int, manifest: bytes, parts: tuple[bytes, ...]) -> None:
        """From now on these describe that shard."""
        self.manifests[shard], self.parts[shard] = manifest, parts
        self._classes = {}

    def unlearn(self) -> list[bytes]:
        """Forget all manifests and parts, which are returned."""
        known = [*self.manifests.values(), *chain(*self.parts.values())]
        self.manifests.clear()
        self.parts.clear()
        self._classes = {}
        return known
