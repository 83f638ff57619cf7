"""Where the pieces of a chunk are at a source whose memory a reader copies by itself.

The reader knows the strips: they are its selection's, or its own grid's. The source says where its regions are. Both
together give addresses, from which the reader only reads. A source that lies gives other bytes than have the digest, or an
error.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import chain

from tensorhub.errors import ProtocolError
from tensorhub.memory.strided import Block, Stream, blocks
from tensorhub.model.strips import Strip
from tensorhub.transport.base import Destination
from tensorhub.transport.dialect import REGIONS_MAX, FindRegions, RegionsAre
from tensorhub.transport.read_client import ReadClient

RUN_BYTES_MIN = (
    2048  # on average: where each run costs something, shorter ones come faster over the connection, packed by their owner
)


class StridedSource:
    """Of one channel."""

    def __init__(self, client: ReadClient, destination: Destination) -> None:
        """Ask where the regions are. Raises as `ReadClient.ask`."""
        selection = client.right.selection
        numbers = range(len(destination.sizes))
        strips = map(destination.strips, numbers) if selection is None else selection.chunks
        self._strips: Sequence[Sequence[Strip]] = tuple(strips)
        self._regions = _regions(client, chain.from_iterable(self._strips))

    def __repr__(self) -> str:
        return f"<StridedSource of {len(self._strips)} chunks in {len(self._regions)} regions>"

    @property
    def run_bytes(self) -> float:
        """Of a run, on average."""
        found = [strip for strips in self._strips for strip in strips]
        return sum([strip.nbytes for strip in found]) / max(1, sum([strip.runs for strip in found]))

    def stream(self, chunk: int) -> Stream:
        """The bytes of a chunk, by the source's addresses."""
        return Stream(blocks(self._strips[chunk], self._regions))

    def blocks(self, chunks: Sequence[int], nbytes_max: int) -> Iterator[Block]:
        """All bytes of these chunks, in order, by the source's addresses, in blocks of `nbytes_max` at most."""
        return blocks(chain.from_iterable([self._strips[chunk] for chunk in chunks]), self._regions, nbytes_max)


def _regions(client: ReadClient, strips: Iterable[Strip]) -> list[int]:
    """The addresses of the regions in which strips are."""
    pages: set[int] = set()
    last = -1
    for strip in strips:
        ends = sorted((strip.region, strip.region + (strip.length - 1) * strip.region_step))
        pages.update(range(ends[0] // REGIONS_MAX, ends[1] // REGIONS_MAX + 1))
        last = max(last, ends[1])
    found = [0] * (last + 1)
    for page in sorted(pages):
        first = page * REGIONS_MAX
        said = client.ask(FindRegions(client.right.registration, client.right.generation, first), RegionsAre).addresses
        wanted = min(REGIONS_MAX, last + 1 - first)
        if len(said) < wanted:
            raise ProtocolError(f"a source with {first + len(said)} regions has chunks in {last + 1}")
        found[first : first + wanted] = said[:wanted]
    return found
