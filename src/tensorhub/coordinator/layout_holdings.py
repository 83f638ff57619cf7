"""Who holds a version in one layout: its shards' holders, and what describes each shard.

A version has one for the layout in which it was published, and one for each other layout in which somebody fills or
holds it. Chunks of such a layout follow from that layout and from the published one.

Responsible for the counts of one layout. Not responsible for when they change (`Cluster.count`), nor for which layouts a
reader may read (`ways`).
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
        # As of `Member`; by shard, of those of which somebody has said them. Of another layout: where what was published
        # lies in its readers' memory, as the first has said.
        self.parts: dict[int, tuple[bytes, ...]] = {}
        # What each shard's readers need of published shards, as the first has said.
        self.needs: dict[int, tuple[Need, ...]] = {}
        # Of what is held where (`Published`), once a reader of another layout has needed that, or a holder of another layout
        # has said it after a restart; and the id of that.
        self.description: bytes = b""
        self.described_as = ""
        self.abandoned = False  # the last of its sources left on purpose, and none has come since
        self._classes: dict[int, tuple[int, ...]] = {}  # see `classes`; empty: to be made anew
        self._first: dict[int, int] = {}  # of each shard's class, as of `_classes`

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
            self._first = {shard: first for first, shards in self._classes.items() for shard in shards}
        return self._classes

    def class_of(self, shard: int) -> int:
        """The first shard of its class."""
        return self._first[shard] if self.classes else shard

    def takes(self, shard: int, parts: tuple[bytes, ...]) -> bool:
        """Whether, in another layout, who says so of its memory holds that shard as all others here do."""
        return len(parts) == PARTS and self.parts.get(shard, parts) == parts

    @property
    def is_described(self) -> bool:
        """Whether readers of other layouts can be told what is held where."""
        return len(self.manifests) == len(self.parts) == len(self) > 0

    def has_each_class(self) -> bool:
        """Whether of each class some shard is held, complete and committed, by a replica that takes readers."""
        return self.have_sources() or all(any(self.of(s).sources for s in shards) for shards in self.classes.values())

    def can_each_class_be_read(self) -> bool:
        """The same, of workers that are heard of now."""
        return all(any(self.of(shard).live_sources for shard in shards) for shards in self.classes.values())

    def is_left(self) -> bool:
        """Whether of each class of shards some shard has a holder."""
        return all(any(self[shard] for shard in shards) for shards in self.classes.values())

    def is_class_whole(self, first: int) -> bool:
        """Whether somebody holds all of a shard of that class, committed or not."""
        return any(map(self.is_whole, self.classes[first]))

    def learn_parts(self, shard: int, parts: tuple[bytes, ...]) -> None:
        """From now on these say which part of the model that shard is."""
        self.parts[shard] = parts
        self._classes = {}

    def unlearn(self) -> list[bytes]:
        """Forget all manifests and parts, and the description, which are returned."""
        known = [*self.manifests.values(), *chain(*self.parts.values()), self.description]
        self.description, self.described_as = b"", ""
        self.manifests.clear()
        self.parts.clear()
        self._classes = {}
        return known
