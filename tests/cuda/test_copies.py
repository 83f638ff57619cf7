"""Copies for a device, joined where that is possible."""

from __future__ import annotations

import random
from contextlib import closing

import pytest

from tensorhub.cuda.copies import PIECES_COPIED_APART, copy_pieces
from tensorhub.transport.staging import Staging
from tests.cuda.double import Double

CONTENT = random.Random(1).randbytes(600)


@pytest.mark.parametrize("sizes", [(600,), (100, 200, 300), (1, 598, 1)])
@pytest.mark.parametrize("others", [(600,), (150, 150, 300)])
@pytest.mark.parametrize("count", [3, 2 * PIECES_COPIED_APART])
def test_no_copy_is_in_two_allocations(
    sizes: tuple[int, ...], others: tuple[int, ...], count: int
) -> None:
    device = Double()
    source, target = device.side_by_side(CONTENT, sizes), device.side_by_side(bytes(600), others)
    each = 600 // count
    ends = [(target[0].address, source[0].address)]
    pieces = [
        (to + at, there + at, min(each, 600 - at))
        for to, there in ends
        for at in range(0, 600, each)
    ]
    queue = device.queue()
    copy_pieces(queue, pieces, by_kernel=False)
    queue.mark().wait()
    assert b"".join(bytes(each.storage) for each in target) == CONTENT  # type: ignore[call-overload]
    assert device.copies <= len(sizes) + len(others)  # they were joined, where they could be


def test_staged_pieces_are_not_in_two_allocations() -> None:
    device, sizes = Double(), (100, 200, 300)
    source, target = device.side_by_side(CONTENT, sizes), device.side_by_side(bytes(600), sizes)
    out, into = Staging(device, 256), Staging(device, 256)
    with (
        closing(out.outgoing([(each.address, each.nbytes) for each in source])) as outgoing,
        closing(into.incoming([(each.address, each.nbytes) for each in target])) as incoming,
    ):
        for room, piece in zip(incoming, outgoing, strict=True):
            room[:] = piece
    assert b"".join(bytes(each.storage) for each in target) == CONTENT  # type: ignore[call-overload]
