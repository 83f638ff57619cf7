"""The digests of one shard's chunks: a list that is entered run by run, and sent in pages once it
is complete.

Not responsible for which digests count (`testimonies`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from tensorhub.messages import DIGESTS_BYTES_MAX


@dataclass(slots=True, eq=False, kw_only=True)
class DigestList:
    """The list of one shard, or of one selection. It may be absent: not begun yet, or dropped
    again.
    """

    width: int = 0  # bytes of one digest; 0: chunks have none, or the manifest is not known yet
    root: bytes = b""  # of the whole list, once that was complete
    chunks: int = -1  # in the list; -1: there is none
    values: bytearray = field(default_factory=bytearray)  # the list, while some of it is missing
    # meanwhile: 1 for each chunk with a digest in `values`
    known: bytearray = field(default_factory=bytearray)
    missing: int = 0  # always known.count(0)
    pages: tuple[bytes, ...] = ()  # the whole list, as it is sent to each rank that compares
    page_bytes: int = DIGESTS_BYTES_MAX  # of one page, at most

    @property
    def is_there(self) -> bool:
        """Whether the whole list is known here."""
        return self.chunks >= 0 and not self.missing

    def begin(self, chunks: int) -> None:
        """An empty list; a negative number: none."""
        self.chunks, self.missing, self.pages = chunks, max(chunks, 0), ()
        self.values, self.known = bytearray(self.missing * self.width), bytearray(self.missing)

    def enter(self, runs: Sequence[tuple[int, int]], digests: bytes) -> None:
        """Enter digests for these (first, count) runs of chunks. The first digest of a chunk
        counts.
        """
        at = 0
        for first, count in runs:
            for chunk, end in _unknown(self.known, first, first + count):
                told = at + (chunk - first) * self.width
                self.values[chunk * self.width : end * self.width] = digests[
                    told : told + (end - chunk) * self.width
                ]
                self.missing -= self.known.count(0, chunk, end)
                self.known[chunk:end] = b"\1" * (end - chunk)
            at += count * self.width

    def finish(self) -> None:
        """The list is complete and right: cut it into pages."""
        most, values = self.page_chunks * self.width, bytes(self.values)
        self.pages = tuple([values[at : at + most] for at in range(0, len(values), most)]) or (b"",)
        self.values, self.known = bytearray(), bytearray()

    @property
    def page_chunks(self) -> int:
        """How many chunks' digests each page has, but for the last one."""
        return self.page_bytes // self.width

    @property
    def nbytes(self) -> int:
        """The bytes that the list takes."""
        return max(self.chunks, 0) * (self.width + 1)

    def digest(self, chunk: int) -> bytes:
        """The digest that this chunk must have; empty where that is not certain."""
        if not self.root or not self.pages or chunk >= self.chunks:
            return b""
        page, at = divmod(chunk, self.page_chunks)
        return self.pages[page][at * self.width : (at + 1) * self.width]


def _unknown(known: bytearray, start: int, stop: int) -> Iterator[tuple[int, int]]:
    """The runs from `start` to `stop` without known digests."""
    at = known.find(0, start, stop)
    while at >= 0:
        end = known.find(1, at, stop)
        end = stop if end < 0 else end
        yield at, end
        at = known.find(0, end, stop)
