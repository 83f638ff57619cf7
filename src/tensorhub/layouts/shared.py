"""Bytes that ranks of several shards publish: norms of tensor-parallel ranks, key-value heads.

Readers of other layouts take such bytes from any of these ranks. So they must be equal. Each rank
digests what it shares, in the order of the tensor's indices, which does not depend on where that
lies in memory. A `Share` has one number on all ranks that have it, and its digest is compared by
that.

Responsible for the shared boxes, and for where they lie on one rank. Not responsible for digests,
nor for comparing them. Replicas of one shard (`Publication.classes`) are compared by their chunks
instead.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from tensorhub.layouts.boxes import Box, Span, meet, shown, volume, whole
from tensorhub.layouts.pieces import within
from tensorhub.layouts.publication import Publication, places
from tensorhub.model.strips import Strip, shortest

SHARES_MAX = 1024  # of one publication, about: where more is shared, several parts make one share
CHUNK_BYTES = 4 * 2**20  # that are digested at once


@dataclass(frozen=True, slots=True)
class Share:
    """`what`: for an error. `chunks`: where its bytes lie on this rank, cut at equal indices on all
    ranks.
    """

    number: int
    what: str
    chunks: tuple[Strip, ...]


def shares_of(publication: Publication, rank: int) -> tuple[Share, ...] | None:
    """Those of this rank. None: no ranks of different shards have anything in common."""
    overlaps = publication.overlaps
    if not overlaps:
        return None
    mine = next(number for number, each in enumerate(publication.classes) if rank in each.ranks)
    together: dict[frozenset[int], list[tuple[int, Box]]] = {}  # by holders
    for tensor, box, holders in overlaps:
        together.setdefault(holders, []).append((tensor, box))
    at_once = -(-len(overlaps) // SHARES_MAX)
    groups = [
        (holders, parts[at : at + at_once])
        for holders, parts in together.items()
        for at in range(0, len(parts), at_once)
    ]
    coordinates = publication.classes[mine].coordinates
    shared = {tensor for tensor, _, _ in overlaps}
    # by tensor: region, offset and form of each piece of this rank
    pieces: dict[int, list[tuple[int, int, int]]] = {}
    for tensor, *place in places(coordinates, publication.catalogue):
        if tensor in shared:
            pieces.setdefault(tensor, []).append((place[0], place[1], place[2]))

    def chunks(parts: list[tuple[int, Box]]) -> Iterator[Strip]:
        for tensor, box in parts:
            for region, offset, form in pieces[tensor]:
                kind, its, strides = coordinates.geometry[form]
                if meet(box, its) != box:
                    continue  # it is within another piece, as `Publication.overlaps` has met them
                for part in _cut(box, kind.itemsize):
                    begin, steps = within(part, its, strides)
                    loops = tuple([(times, apart) for times, apart in steps if times > 1])
                    yield shortest(Strip(region, offset + begin, 0, 0, 1, loops, kind.itemsize))
                break

    return tuple(
        [
            Share(number, _named(publication, parts), tuple(chunks(parts)))
            for number, (holders, parts) in enumerate(groups)
            if mine in holders
        ]
    )


def _named(publication: Publication, parts: list[tuple[int, Box]]) -> str:
    tensor, box = parts[0]
    name, kind = publication.catalogue.names[tensor], publication.catalogue.kind(tensor)
    first = repr(name) if box == whole(kind.shape) else f"{name!r} {shown(box)}"
    return first if len(parts) == 1 else f"{first} or {len(parts) - 1} parts that follow"


def _cut(box: Box, itemsize: int) -> Iterator[Box]:
    """The box's indices in order, in boxes of at most CHUNK_BYTES."""
    if volume(box) * itemsize <= CHUNK_BYTES:
        yield box
        return
    dimension = next(number for number, each in enumerate(box) if each.size > 1)
    its = box[dimension]
    at_once = max(1, CHUNK_BYTES * its.size // (volume(box) * itemsize))
    for at in range(0, its.size, at_once):
        taken = its.take(Span(at, min(at_once, its.size - at)))
        yield from _cut((*box[:dimension], taken, *box[dimension + 1 :]), itemsize)
