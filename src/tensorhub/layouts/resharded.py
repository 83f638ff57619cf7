"""A manifest with the chunks of a reading: a rank of a layout other than the published one fills and holds it.

Its tensors and regions are those of the rank's own manifest, or of the manifest of the first group of its layout, so that
all holders of that layout agree on the regions. Its chunks are those of the reading, and their digests are made by the
publisher's algorithm.

Responsible for the grid interface of `Manifest`, for this grid: memory, pulls and the machines of a worker take either.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from tensorhub.layouts.arrangement import Coordinates
from tensorhub.layouts.published import Published
from tensorhub.layouts.reading import Part, Reading
from tensorhub.model.manifest import Chunk, Digest, Manifest, TensorSpec
from tensorhub.model.strips import Strip

NOTHING = Reading((), (), ())


@dataclass(frozen=True)
class ReshardedManifest(Manifest):
    """`grid`: names the publication (`of`), the rank and where its pieces lie (`lies`), from all of which the reading
    follows.
    """

    reading: Reading = NOTHING
    grid: str = ""
    lies: Coordinates | None = None
    of: Published | None = None

    @property
    def parts(self) -> tuple[Part, ...]:
        """The reads of each shard class."""
        return self.reading.parts

    def chunks_of(self, shard: int, selection_id: str) -> tuple[int, ...] | None:
        """Which chunks those of that selection of that class are here, in its order. None: nothing is read so."""
        found = (part for part in self.parts if (part.shard, part.selection.selection_id) == (shard, selection_id))
        return next((part.chunks for part in found), None)

    @cached_property
    def nbytes(self) -> int:
        """What a whole read moves. Padding is not read."""
        return self.reading.nbytes

    @cached_property
    def chunk_count(self) -> int:
        return len(self.reading.sizes)

    @cached_property
    def sizes(self) -> tuple[int, ...]:
        return self.reading.sizes

    @cached_property
    def chunks(self) -> tuple[Chunk, ...]:
        raise TypeError("chunks of a resharded manifest are not contiguous: use `places`")

    def places(self, chunk: int) -> tuple[Strip, ...]:
        return self.reading.places[chunk]

    @property
    def grid_id(self) -> str:
        return self.grid

    def tensors_in(self, chunk: int) -> tuple[str, ...]:
        """The names of the tensors that have bytes in this chunk."""
        strips = self.reading.places[chunk]
        regions = dict.fromkeys(region for strip in strips for region, _ in strip.cells())
        return tuple(
            [
                tensor.name
                for region in regions
                for tensor in self.by_region[region]
                if any(strip.touches(region, tensor.offset, self._end_of(tensor)) for strip in strips)
            ]
        )

    def _end_of(self, tensor: TensorSpec) -> int:
        """Behind its last byte: if its rows are padded, it is alone in its region."""
        is_alone = len(self.by_region[tensor.region]) == 1
        return self.regions[tensor.region].nbytes if is_alone else tensor.offset + tensor.nbytes


def parts_of(manifest: Manifest) -> tuple[Part, ...]:
    """The reads of each shard class; empty for the published layout."""
    return manifest.parts if isinstance(manifest, ReshardedManifest) else ()


def counts_of(manifest: Manifest) -> Sequence[tuple[int, int]]:
    """Of how many cells and runs each chunk is made; nothing, where the layout is the published one."""
    return manifest.reading.counts if isinstance(manifest, ReshardedManifest) else ()


def resharded(
    manifest: Manifest,
    digest: Digest,
    chunk_bytes: int,
    reading: Reading,
    grid: str,
    lies: Coordinates | None = None,
    of: Published | None = None,
) -> ReshardedManifest:
    """This manifest's tensors and regions, in the chunks of this reading."""
    own = manifest.tensors, manifest.regions, chunk_bytes, digest, manifest.layout_id, manifest.metadata
    return ReshardedManifest(*own, reading, grid, lies, of)


def publication_in(manifest: Manifest) -> Published | None:
    """What it is read from, where the layout is not the published one."""
    return manifest.of if isinstance(manifest, ReshardedManifest) else None
