"""Bytes that follow strips, moved within a device between where they lie and contiguous memory of the same device.

Many pieces go by one launch of a kernel, so that a run costs no call. Not responsible for getting bytes to or from the host.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from tensorhub.cuda.copies import copy_pieces
from tensorhub.cuda.device import Device
from tensorhub.memory.strided import blocks, runs
from tensorhub.strips import Strip


def gather(device: Device, strips: Iterable[Strip], addresses: Sequence[int], to: int) -> None:
    """Copy the bytes of these strips to that address, one behind the other. Waits."""
    _copy(device, ((to + at, start, run) for at, start, run in _runs(strips, addresses)))


def scatter(device: Device, strips: Iterable[Strip], addresses: Sequence[int], source: int) -> None:
    """Copy bytes from that address to where those of these strips are. Waits."""
    _copy(device, ((start, source + at, run) for at, start, run in _runs(strips, addresses)))


def _copy(device: Device, pieces: Iterable[tuple[int, int, int]]) -> None:
    queue = device.queue()
    copy_pieces(queue, pieces)
    queue.mark().wait()


def _runs(strips: Iterable[Strip], addresses: Sequence[int]) -> Iterator[tuple[int, int, int]]:
    """(how many bytes come before it, where it begins, its bytes) of each run."""
    at = 0
    for block in blocks(strips, addresses):
        for start in runs(block):
            yield at, start, block.run
            at += block.run
