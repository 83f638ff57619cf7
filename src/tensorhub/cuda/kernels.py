"""The kernels' source, and what their tables are like. cupy compiles them, on first use."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path

SOURCE = Path(__file__).with_name("kernels.cu")
THREADS = 256  # of a thread block; see THREADS_MAX there
ROW_BYTES = 64 * 2**10  # of a row of a table of pieces: larger ones are cut, so that all of the device takes part


def cut_rows(pieces: Iterable[tuple[int, int, int]], row_bytes: int = ROW_BYTES) -> Iterator[tuple[int, int, int]]:
    """(address, offset, bytes) in rows of `row_bytes` at most (a multiple of 16, which keeps alignments); none is empty."""
    for address, offset, nbytes in pieces:
        for at in range(0, nbytes, row_bytes):
            yield address + at, offset + at, min(row_bytes, nbytes - at)
