"""What ranks of different shards publish alike: which parts, under which numbers, and where they
lie.
"""

from __future__ import annotations

from collections.abc import Mapping
from random import Random

import numpy as np
import pytest

import tensorhub
from tensorhub.layouts import shared
from tensorhub.layouts.arrangement import arrange
from tensorhub.layouts.pieces import packed
from tensorhub.layouts.publication import Publication
from tensorhub.layouts.shared import Share, shares_of
from tensorhub.model.strips import Strip
from tests.layouts.worlds import LocalTensor, pieces_of

W = tensorhub.source("w", shape=(8, 6))
NORM = tensorhub.source("norm", shape=(10,))
SHAPES = {"w": (8, 6), "norm": (10,)}


def published(*ranks: Mapping[str, tuple[tuple[int, ...], object]]) -> Publication:
    """Of each rank: its tensors' shapes, and what they hold."""
    made = []
    for rank, tensors in enumerate(ranks):
        found = [
            LocalTensor(name, "float32", shape, packed(shape, 4), region)
            for region, (name, (shape, _)) in enumerate(tensors.items())
        ]
        sources = {name: view for name, (_, view) in tensors.items()}
        made.append(arrange(pieces_of(found, rank=rank, world_size=len(ranks), sources=sources)))
    return Publication(tuple(made)).check()


def memory_of(
    publication: Publication, rank: int, whole: dict[str, np.ndarray]
) -> dict[int, bytearray]:
    """Its regions, with what the whole tensors have there."""
    regions: dict[int, bytearray] = {}
    for piece in publication.ranks[rank].pieces():
        part = whole[piece.name][tuple(slice(s.start, s.last + 1, s.step) for s in piece.box)]
        need = piece.offset + piece.nbytes
        room = regions.setdefault(piece.region, bytearray())
        room.extend(bytes(max(0, need - len(room))))
        view = np.ndarray(part.shape, np.float32, room, piece.offset, piece.strides)
        view[...] = part
        del view
    return {region: bytearray(room) for region, room in regions.items()}


def bytes_of(strip: Strip, regions: dict[int, bytearray]) -> bytes:
    starts = [strip.offset]
    for times, apart in strip.loops:
        starts = [start + n * apart for start in starts for n in range(times)]
    return b"".join(bytes(regions[strip.region][start : start + strip.run]) for start in starts)


def told(
    publication: Publication, rank: int, whole: dict[str, np.ndarray]
) -> dict[int, list[bytes]]:
    """By number, what a rank would digest."""
    regions = memory_of(publication, rank, whole)
    found = shares_of(publication, rank)
    return {
        share.number: [bytes_of(strip, regions) for strip in share.chunks] for share in found or ()
    }


def test_shards_and_replicas_of_shards_have_nothing_in_common() -> None:
    rows = [{"w": ((4, 6), W[0:4])}, {"w": ((4, 6), W[4:8])}, {"w": ((4, 6), W[0:4])}]
    assert shares_of(published(*rows), 0) is None


def test_what_is_whole_on_ranks_of_different_shards_is_shared() -> None:
    made = published(
        *({"norm": ((10,), NORM), "w": ((4, 6), W[r * 4 : r * 4 + 4])} for r in range(2))
    )
    assert shares_of(made, 0) == (Share(0, "'norm'", (Strip(0, 0, 0, 0, 1, (), 40),)),)
    assert shares_of(made, 1) == shares_of(made, 0)


def test_parts_are_met_and_who_shares_nothing_has_none() -> None:
    made = published({"w": ((5, 6), W[0:5])}, {"w": ((5, 6), W[3:8])}, {"norm": ((10,), NORM)})
    assert shares_of(made, 0) == (Share(0, "'w' [3:5, 0:6]", (Strip(0, 72, 0, 0, 1, (), 48),)),)
    assert shares_of(made, 1) == (Share(0, "'w' [3:5, 0:6]", (Strip(0, 0, 0, 0, 1, (), 48),)),)
    assert shares_of(made, 2) == ()


def test_many_parts_make_few_shares_with_equal_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared, "SHARES_MAX", 2)
    tensors = {f"n{n}": ((10,), tensorhub.source(f"n{n}", shape=(10,))) for n in range(5)}
    made = published(tensors | {"w": ((4, 6), W[0:4])}, tensors | {"w": ((4, 6), W[4:8])})
    found = shares_of(made, 0)
    assert found is not None
    assert [(share.what, len(share.chunks)) for share in found] == [
        ("'n0' or 2 parts that follow", 3),
        ("'n3' or 1 parts that follow", 2),
    ]
    assert [share.number for share in found] == [share.number for share in shares_of(made, 1) or ()]


@pytest.mark.parametrize("seed", range(60))
def test_whoever_shares_says_the_same_bytes_wherever_they_lie(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Columns, rows and steps; and each shared byte is compared with somebody's."""
    monkeypatch.setattr(shared, "CHUNK_BYTES", 16)
    random = Random(seed)
    ranks: list[Mapping[str, tuple[tuple[int, ...], object]]] = [{"w": ((8, 6), W[:])}]
    for _ in range(random.randint(1, 3)):
        rows = slice(random.randint(0, 3), random.randint(5, 8), random.choice((1, 1, 2)))
        columns = slice(random.randint(0, 2), random.randint(3, 6), random.choice((1, 1, 3)))
        shape = np.empty((8, 6))[rows, columns].shape
        ranks.append({"norm": ((10,), NORM), "w": (shape, W[rows, columns])})
    random.shuffle(ranks)
    made = published(*ranks)
    whole = {
        name: np.arange(1, 1 + np.prod(shape), dtype=np.float32).reshape(shape)
        for name, shape in SHAPES.items()
    }
    said = [told(made, rank, whole) for rank in range(len(ranks))]
    by_number: dict[int, list[bytes]] = {}
    for each in said:
        for number, parts in each.items():
            assert by_number.setdefault(number, parts) == parts
    holders: dict[bytes, int] = {}
    for shard in made.classes:
        for piece in shard.coordinates.pieces():
            if piece.name == "w":
                part = whole["w"][tuple(slice(s.start, s.last + 1, s.step) for s in piece.box)]
                for value in part.flat:
                    holders[value.tobytes()] = holders.get(value.tobytes(), 0) + 1
    compared = b"".join(b"".join(parts) for parts in by_number.values())
    words = {compared[at : at + 4] for at in range(0, len(compared), 4)}
    assert {word for word, count in holders.items() if count > 1} <= words
