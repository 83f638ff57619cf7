"""The kernels' source, and what their tables are like. cupy compiles them, on first use."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from math import prod
from pathlib import Path

SOURCE = Path(__file__).with_name("kernels.cu")
THREADS = 256  # of a thread block; see THREADS_MAX there
TILE_BYTES = 8 * 2048  # of the two versions that are compared; see TILE_UNITS there
# of a row of a table of pieces: larger ones are cut, so that all of the device takes part
ROW_BYTES = 64 * 2**10


def cut_rows(
    pieces: Iterable[tuple[int, int, int]], row_bytes: int = ROW_BYTES
) -> Iterator[tuple[int, int, int]]:
    """(address, offset, bytes) in rows of `row_bytes` at most (a multiple of 16, which keeps
    alignments); none is empty.
    """
    for address, offset, nbytes in pieces:
        for at in range(0, nbytes, row_bytes):
            yield address + at, offset + at, min(row_bytes, nbytes - at)


LOOPS_MAX = 3  # of a row of a table of runs; see LOOPS there
# of such a row: all rows of a launch have as many thread blocks, so none is to be much larger
SPREAD_BYTES_MAX = 4 * 2**20
PART_BYTES = 64 * 2**10  # for each of these thread blocks
_NO_LOOP = (1, 0)


def spread_rows(
    offset: int, cells: Iterable[int], loops: Sequence[tuple[int, int]], run: int
) -> Iterator[tuple[int, ...]]:
    """Rows of a table of runs: cells that begin at these addresses, each of them loops around runs,
    which are one behind the other from that offset on. A cell has SPREAD_BYTES_MAX at most.
    """
    outer, kept = loops[:-LOOPS_MAX], loops[-LOOPS_MAX:]
    flat = [number for loop in (*[_NO_LOOP] * (LOOPS_MAX - len(kept)), *kept) for number in loop]
    nbytes = prod([times for times, _ in kept]) * run
    starts = list(cells)
    for times, apart in outer:
        starts = [at + n * apart for at in starts for n in range(times)]
    for start in starts:
        yield (offset, start, run, *flat)
        offset += nbytes


def straight_rows(offset: int, address: int, nbytes: int) -> Iterator[tuple[int, ...]]:
    """Rows of a table of runs for bytes that are together in both places."""
    for at in range(0, nbytes, SPREAD_BYTES_MAX):
        yield (offset + at, address + at, min(SPREAD_BYTES_MAX, nbytes - at), 1, 0, 1, 0, 1, 0)


def parts_of(rows: Sequence[Sequence[int]]) -> int:
    """How many thread blocks are to share each of these rows."""
    nbytes = sum([row[2] * row[3] * row[5] * row[7] for row in rows])
    return max(1, nbytes // len(rows) // PART_BYTES)
