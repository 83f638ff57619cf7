"""A version in windows: room in the address space for all of it, of which one fetch fills one
window.

A window is a run of bytes, and the chunks that have bytes in it have none in another. So a window
is filled, verified and given back by itself. A window has at most so many bytes, where the grid of
chunks can be parted there.

Responsible for that memory. Not responsible for which windows are filled (`tensorhub.fs`).
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import accumulate, pairwise

from tensorhub.memory.on_demand import give_back, reserve
from tensorhub.memory.regions import FilledMemory, MappedRegions, mismatch
from tensorhub.model.manifest import Manifest, TensorSpec

ADVICE = "free some, or raise the limit of this process (ulimit -v)"


@dataclass(frozen=True, slots=True)
class Window:
    """The bytes from `start` to `stop` of all regions, laid end to end. `chunks`: that have
    them; empty if it is the only window.
    """

    start: int
    stop: int
    chunks: tuple[int, ...]


class Windows:
    """Memory for the regions of `manifest`, laid end to end, in windows of at most
    `window_bytes`.
    """

    def __init__(self, manifest: Manifest, window_bytes: int) -> None:
        """StateError: there is no room in the address space."""
        starts = tuple(accumulate([region.nbytes for region in manifest.regions], initial=0))
        nbytes = starts[-1]
        self._bytes = reserve(nbytes, ADVICE) if nbytes else None
        self._view = memoryview(self._bytes if self._bytes is not None else bytearray())
        self._regions = tuple([self._view[start:stop] for start, stop in pairwise(starts)])
        self._chunk_count = manifest.chunk_count
        self._tensors = manifest.tensors
        self.windows = (
            (Window(0, nbytes, ()),)
            if nbytes <= window_bytes
            else tuple(_cut(manifest, starts, window_bytes))
        )
        self._firsts = [window.start for window in self.windows]

    def number(self, at: int) -> int:
        """The window that has this byte."""
        return bisect_right(self._firsts, at) - 1

    def view(self, start: int, stop: int) -> memoryview:
        """These bytes, which are valid where their windows are filled."""
        return self._view[start:stop]

    def memory(self, number: int, names: tuple[str, ...] | None) -> FilledMemory:
        """What a fetch fills: that window. `names`: of the manifest's tensors; None: all that the
        version has.
        """
        others: list[int] = []
        if len(self.windows) > 1:
            wanted = set(self.windows[number].chunks)
            others = [chunk for chunk in range(self._chunk_count) if chunk not in wanted]
        mapped = MappedRegions(self._regions, (), left_out=others)
        return _WindowMemory(self._tensors, mapped, names)

    def give_back(self, number: int) -> None:
        """Give that window's memory back to the system; nothing may read or fill it now."""
        if self._bytes is not None:
            give_back(self._bytes, self.windows[number].start, self.windows[number].stop)


class _WindowMemory(FilledMemory):
    def __init__(
        self,
        tensors: tuple[TensorSpec, ...],
        mapped: MappedRegions,
        names: tuple[str, ...] | None,
    ) -> None:
        self._tensors = tensors
        self._mapped = mapped
        self.patterns = names

    def map(self, manifest: Manifest) -> MappedRegions:
        """ManifestMismatch: this is another version's."""
        if manifest.tensors != self._tensors:
            raise mismatch("another version has this number now: open the file again")
        return self._mapped


def _cut(manifest: Manifest, starts: tuple[int, ...], most: int) -> Iterator[Window]:
    """The windows, in order."""
    spans = [_span(manifest, starts, chunk) for chunk in range(manifest.chunk_count)]
    chunks: list[int] = []
    begin = end = 0
    for start, stop, chunk in sorted(spans):
        if chunks and start >= end and stop - begin > most:
            yield Window(begin, start, tuple(chunks))
            chunks, begin = [], start
        chunks.append(chunk)
        end = max(end, stop)
    if chunks:
        yield Window(begin, starts[-1], tuple(chunks))


def _span(manifest: Manifest, starts: tuple[int, ...], chunk: int) -> tuple[int, int, int]:
    """From the first byte of a chunk to its last one."""
    ends = [
        (starts[region] + offset, starts[region] + offset + strip.extent)
        for strip in manifest.places(chunk)
        for region, offset in strip.cells()
    ]
    return min(ends)[0], max(stop for _, stop in ends), chunk
