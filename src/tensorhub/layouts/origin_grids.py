"""The own chunks of ranks that have read an origin from another layout.

Nobody's word is taken for them: they follow from what those ranks were read from and from where each has its pieces. Whoever
reads a rank with its own chunks (`transport.enclosing`) plans them anew.

Responsible for that plan. Not responsible for what says how either layout lies: it is given.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from tensorhub.layouts.arrangement import Coordinates
from tensorhub.layouts.joining import publication_of
from tensorhub.layouts.published import Published, grid_id
from tensorhub.layouts.reading import reading_of
from tensorhub.layouts.resharded import ReshardedManifest


@dataclass(frozen=True)
class OriginGrids:
    """`ranks[i]`: what rank i of the origin holds. `of`: what these have read, whose parts are among `parts`, by id; None:
    the coordinator did not know it.
    """

    ranks: Sequence[Coordinates]
    of: Published | None
    parts: Mapping[str, bytes]
    _found: dict[str, ReshardedManifest] = field(default_factory=dict)  # by grid

    def find(self, grid: str, ranks: Sequence[int]) -> ReshardedManifest | None:
        """That one of these ranks' grids, without tensors and regions; None: none of them has it. It takes up to seconds.
        ProtocolError, ManifestMismatch: what they have read is no publication, or not all of what they hold.
        """
        of = self.of
        if of is None:
            return None
        for rank in ranks:
            lies = self.ranks[rank]
            if grid not in self._found and grid_id(of.publication_id, lies.coordinates_id, rank) == grid:
                publication = publication_of(of, self.parts)
                reading = reading_of(publication, lies, chunk_bytes=of.chunk_bytes)
                self._found[grid] = ReshardedManifest((), (), of.chunk_bytes, of.digest, "", b"", reading, grid)
        return self._found.get(grid)
