"""What a version's publisher has published, so that a reader of another layout can find all of it:
ids of every rank's parts.

`Start.publication` is the id of this value's encoding. A reader asks for it, then for the parts
that it does not know yet. Most ranks share their catalogue and their arrangement, so each id is in
the encoding once.

Responsible for the value and its one encoding. Not responsible for what the parts say (`joining`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import accumulate, pairwise
from typing import get_args

import msgpack

from tensorhub.layouts.columns import expect, pack_all, unpack_all
from tensorhub.model.manifest import CHUNK_BYTES_MAX, CHUNK_BYTES_MIN, Digest, id_of

FORM = 1
# grows with each change of readings, so that workers with other readings have another grid
GRID = 5
SHARDS_MAX = 2**20
PUBLISHED_BYTES_MAX = 2**24
ID_MAX = 64  # characters
_COLUMNS = ("chunk_bytes", "id lengths", "ids of a shard", "ids")


@dataclass(frozen=True)
class Published:
    """`shards[i]`: of rank i, the ids of its catalogue, arrangement and coordinates; or only that
    of its manifest, if its tensors are plain: whole ones of one rank, rank-local ones of several.
    """

    digest: Digest
    chunk_bytes: int
    shards: tuple[tuple[str, ...], ...]

    @cached_property
    def part_ids(self) -> tuple[str, ...]:
        """Each id once, in order of first use."""
        return tuple(dict.fromkeys(each for shard in self.shards for each in shard))

    @cached_property
    def _encoded(self) -> bytes:
        numbers = {each: number for number, each in enumerate(self.part_ids)}
        columns = (
            [self.chunk_bytes],
            map(len, self.part_ids),
            map(len, self.shards),
            [numbers[each] for shard in self.shards for each in shard],
        )
        return pack_all(FORM, [self.digest, "".join(self.part_ids)], columns)

    def encode(self) -> bytes:
        """The canonical encoding of this value."""
        return self._encoded

    @cached_property
    def publication_id(self) -> str:
        return id_of(self._encoded)

    @classmethod
    def decode(cls, blob: bytes) -> Published:
        """The value that `blob` encodes; ProtocolError, naming the fault, for anything else. Few
        bytes may hold many shards.
        """
        what = "publication"
        (digest, text), (sizes, lengths, counts, numbers) = unpack_all(
            what, FORM, 2, _COLUMNS, blob, bytes_max=PUBLISHED_BYTES_MAX, count_max=3 * SHARDS_MAX
        )
        expect(
            digest in get_args(Digest),
            what,
            f"digest {digest[:64]!r} is unknown to this version of TensorHub",
        )
        expect(
            len(sizes) == 1 and CHUNK_BYTES_MIN <= sizes[0] <= CHUNK_BYTES_MAX,
            what,
            "its chunk_bytes is no such size",
        )
        expect(0 < len(counts) <= SHARDS_MAX, what, f"it has no shard, or more than {SHARDS_MAX}")
        expect(
            all(count in (1, 3) for count in counts), what, "a shard has neither one id nor three"
        )
        expect(sum(counts) == len(numbers), what, "the shards' ids do not add up")
        expect(bool(lengths) and sum(lengths) == len(text), what, "the ids' lengths do not add up")
        expect(
            0 < min(lengths) <= max(lengths) <= ID_MAX,
            what,
            f"an id does not have 1 to {ID_MAX} characters",
        )
        expect(text.isprintable(), what, "an id is not printable")
        expect(max(numbers) < len(lengths), what, "an id is not there")
        ends = list(accumulate(lengths, initial=0))
        ids = [text[first:end] for first, end in pairwise(ends)]
        shards = tuple(_shards(ids, counts, numbers))
        made = cls(digest, sizes[0], shards)  # type: ignore[arg-type]  # checked above
        expect(made.encode() == blob, what, "this is not the one encoding of what it says")
        return made


@lru_cache(maxsize=4)
def decoded(description: bytes) -> Published:
    """The value of an encoding that was checked before. Many versions of one layout share it."""
    return Published.decode(description)


def grid_id(publication_id: str, coordinates_id: str, rank: int) -> str:
    """The name of the chunk grid in which the rank with these coordinates reads that
    publication.
    """
    return id_of(msgpack.packb([GRID, publication_id, coordinates_id, rank]))


def _shards(
    ids: Sequence[str], counts: Sequence[int], numbers: Sequence[int]
) -> Iterator[tuple[str, ...]]:
    at = 0
    for count in counts:
        yield tuple([ids[number] for number in numbers[at : at + count]])
        at += count
