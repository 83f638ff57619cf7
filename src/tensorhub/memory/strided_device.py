"""Bytes that follow strips, moved within a device between strided and contiguous memory.

All of them go by one launch of a kernel, which knows loops: so neither a run nor a chunk costs a
call, and the CPU's work is per strip. Not responsible for getting bytes to or from the host.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import accumulate

from tensorhub.cuda.device import Spread
from tensorhub.cuda.kernels import spread_rows
from tensorhub.memory.strided import Block

# of chunks that go at a time: to start them and wait for them costs as much as 100 MiB do
BATCH_BYTES = 64 * 2**20


def rows_of_blocks(made: Iterable[Block]) -> list[Spread]:
    """The bytes of these blocks, in order, for `Device.relay`; none of the blocks is larger than
    SPREAD_BYTES_MAX.
    """
    rows: list[Spread] = []
    offset = 0
    for cells, loops, run, nbytes in made:
        rows += spread_rows(offset, cells, loops, run)
        offset += nbytes
    return rows


def batches(chunks: Iterable[int], sizes: Sequence[int]) -> Iterator[list[int]]:
    """These chunks in their order, BATCH_BYTES at a time, or a single larger chunk."""
    batch: list[int] = []
    room = BATCH_BYTES
    for chunk in chunks:
        if batch and room < sizes[chunk]:
            yield batch
            batch, room = [], BATCH_BYTES
        batch.append(chunk)
        room -= sizes[chunk]
    if batch:
        yield batch


def together(chunks: Iterable[int], sizes: Sequence[int], at: int) -> list[tuple[int, int]]:
    """The (address, bytes) of these chunks, which lie without gaps from that address on."""
    its = [sizes[chunk] for chunk in chunks]
    return list(zip(accumulate(its, initial=at), its, strict=False))


def batch_bytes_max(sizes: Sequence[int]) -> int:
    """Of any batch of chunks of these sizes."""
    return max(min(BATCH_BYTES, sum(sizes)), max(sizes, default=0))
