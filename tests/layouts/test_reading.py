"""Readings: random layouts arrive as gathering and slicing would have it, each byte once, in chunks
of one shard class; selections travel, and hostile ones are refused.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from itertools import pairwise
from random import Random

import pytest
from hypothesis import given, settings, strategies as st

from tensorhub.errors import ProtocolError, RegistrationError
from tensorhub.layouts import (
    Arrangement,
    Catalogue,
    Coordinates,
    Publication,
    Reading,
    Selection,
    arrange,
    at,
    reading,
    reading_of,
    source,
)
from tensorhub.layouts.columns import pack_all
from tensorhub.layouts.pieces import packed
from tensorhub.layouts.sharding import Cut, cut
from tensorhub.model.strips import Strip, straight
from tests.layouts.test_plan import locals_of
from tests.layouts.worlds import LocalTensor, World, experts, pieces_of, wanted, world

SMALL = st.sampled_from([1, 7, 16, 64, 4096])

# -------------------------------------------------------------------------------------------------
# random layouts


def gathered(strips: Sequence[Strip], regions: Sequence[bytearray]) -> bytes:
    runs = [
        bytes(regions[region][at : at + strip.run])
        for strip in strips
        for region, at in strip.places()
    ]
    return b"".join(runs)


def scattered(strips: Sequence[Strip], regions: Sequence[bytearray], content: bytes) -> None:
    done = 0
    for strip in strips:
        for region, first in strip.places():
            regions[region][first : first + strip.run] = content[done : done + strip.run]
            done += strip.run
    assert done == len(content)


def check_reading(made: World, chunk_bytes: int) -> None:
    found = reading_of(made.publication, made.reader, chunk_bytes=chunk_bytes)
    counts = [bytearray(len(region)) for region in made.memory.regions]
    for part in found.parts:
        assert part.ranks == next(
            each.ranks for each in made.publication.classes if part.shard in each.ranks
        )
        for rank in part.ranks:  # from any of them
            regions = made.memories[rank].regions
            assert part.selection.fault([len(region) for region in regions]) is None
            for number, strips in zip(part.chunks, part.selection.chunks, strict=True):
                content = gathered(strips, regions)
                assert 0 < len(content) == found.sizes[number] <= chunk_bytes
                scattered(found.places[number], made.memory.regions, content)
        for number in part.chunks:
            for strip in found.places[number]:
                for region, first in strip.places():
                    for byte in range(first, first + strip.run):
                        counts[region][byte] += 1
    assert [bytes(region) for region in made.memory.regions] == made.expected
    assert counts == wanted(made)
    assert (
        found.nbytes == sum(map(sum, counts)) == sum(part.selection.nbytes for part in found.parts)
    )
    assert sorted(number for part in found.parts for number in part.chunks) == list(
        range(len(found.sizes))
    )
    assert all(first < second for part in found.parts for first, second in pairwise(part.chunks))
    firsts = [min(place for strip in strips for place in strip.places()) for strips in found.places]
    assert firsts == sorted(set(firsts))


@given(st.randoms(use_true_random=False), SMALL)
def test_a_reading_moves_what_gathering_and_slicing_would(random: Random, chunk_bytes: int) -> None:
    check_reading(world(random), chunk_bytes)


@given(st.randoms(use_true_random=False), SMALL)
def test_a_reading_of_many_like_tensors_does_so_too(random: Random, chunk_bytes: int) -> None:
    check_reading(experts(random), chunk_bytes)


@settings(max_examples=30)
@given(st.randoms(use_true_random=False), SMALL, st.booleans())
def test_who_has_heard_of_the_same_has_the_same_numbers(
    random: Random, chunk_bytes: int, many: bool
) -> None:
    made = (experts if many else world)(random)
    again = Publication(tuple(map(heard, made.publication.ranks)))
    found = reading_of(made.publication, made.reader, chunk_bytes=chunk_bytes)
    assert reading_of(again, heard(made.reader), chunk_bytes=chunk_bytes) == found
    for part in found.parts:
        decoded = Selection.decode(part.selection.encode())
        assert decoded == part.selection
        assert decoded.sizes == part.selection.sizes
        assert decoded.selection_id == part.selection.selection_id


def heard(rank: Coordinates) -> Coordinates:
    arrangement = Arrangement.decode(
        rank.arrangement.encode(), Catalogue.decode(rank.catalogue.encode())
    )
    again = Coordinates.decode(rank.encode(), arrangement)
    assert (again, again.coordinates_id, list(again.pieces())) == (
        rank,
        rank.coordinates_id,
        list(rank.pieces()),
    )
    return again


# --------------------------------------------------------------------------------------------------
# chunks


def stacked(
    count: int, *, shape: tuple[int, int] = (8, 4), reverse: bool = False
) -> tuple[Publication, Coordinates]:
    """A tensor of bytes for each expert, in regions of their own; a reader that stacks them."""
    names = [f"experts.{n}.w2" for n in range(count)]
    shapes: dict[str, tuple[int, ...]] = dict.fromkeys(names, shape)
    apart = arrange(pieces_of(bytes_of(shapes)))
    sources = {
        "w2": [
            (at[n], source(name)) for n, name in enumerate(reversed(names) if reverse else names)
        ]
    }
    pieces = pieces_of(bytes_of({"w2": (count, *shape)}), sources=sources, shape_of=shapes.get)
    return Publication((apart,)).check(), arrange(pieces, apart.catalogue)


def bytes_of(shapes: dict[str, tuple[int, ...]]) -> list[LocalTensor]:
    return [
        LocalTensor(name, "uint8", its, packed(its, 1), region)
        for region, (name, its) in enumerate(shapes.items())
    ]


def test_small_cells_share_chunks_and_follow_one_rule() -> None:
    publication, reader = stacked(16)
    found = reading_of(publication, reader, chunk_bytes=100)
    (part,) = found.parts
    assert found.sizes == (96, 96, 96, 96, 96, 32)  # three experts each
    assert found.places[1] == (straight(0, 96, 96),)
    assert part.selection.chunks[1] == (Strip(3, 0, 1, 0, 3, (), 32),)
    assert part.chunks == (0, 1, 2, 3, 4, 5)


def test_a_longer_cell_is_cut_at_rows_and_a_longer_row_within() -> None:
    publication, reader = stacked(2, shape=(8, 4))
    # one run of 32 each
    assert reading_of(publication, reader, chunk_bytes=13).sizes == (13, 13, 6, 13, 13, 6)
    sources = {"m": source("experts.0.w2")[:, 1:3]}
    shape_of = {"experts.0.w2": (8, 4)}.get
    columns = arrange(
        pieces_of(bytes_of({"m": (8, 2)}), sources=sources, shape_of=shape_of),
        publication.catalogue,
    )
    found = reading_of(publication, columns, chunk_bytes=7)
    assert found.sizes == (6, 6, 4)
    assert found.parts[0].selection.chunks == (
        (Strip(0, 1, 0, 0, 1, ((3, 4),), 2),),
        (Strip(0, 13, 0, 0, 1, ((3, 4),), 2),),
        (Strip(0, 25, 0, 0, 1, ((2, 4),), 2),),
    )
    assert reading_of(publication, columns, chunk_bytes=1).sizes == (1,) * 16


def test_more_chunks_than_there_may_be_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    publication, reader = stacked(16)
    monkeypatch.setattr(reading, "CHUNKS_MAX", 5)
    with pytest.raises(RegistrationError, match="6 chunks are more than 5"):
        reading_of(publication, reader, chunk_bytes=100)


def test_more_strips_than_a_request_can_say_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    publication, reader = stacked(16)
    monkeypatch.setattr(reading, "STRIPS_MAX", 5)
    with pytest.raises(RegistrationError, match="6 patterns of 16 parts"):
        reading_of(publication, reader, chunk_bytes=100)


def test_a_chunk_has_no_more_runs_than_its_source_allows(monkeypatch: pytest.MonkeyPatch) -> None:
    publication, reader = stacked(4)
    monkeypatch.setattr(reading, "RUNS_MAX", 3)
    assert reading_of(publication, reader, chunk_bytes=4096).sizes == (96, 32)
    monkeypatch.setattr(reading, "CHUNK_CELLS_MAX", 2)
    assert reading_of(publication, reader, chunk_bytes=4096).sizes == (64, 64)


def test_so_it_has_fewer_cells_of_several_runs_each(monkeypatch: pytest.MonkeyPatch) -> None:
    publication, _ = stacked(4, shape=(8, 4))
    names = publication.catalogue.names
    columns = arrange(
        pieces_of(
            bytes_of({"m": (4, 8, 2)}),
            sources={"m": [(at[n], source(name)[:, 1:3]) for n, name in enumerate(names)]},
            shape_of=dict.fromkeys(names, (8, 4)).get,
        ),
        publication.catalogue,
    )
    monkeypatch.setattr(reading, "RUNS_MAX", 24)
    assert reading_of(publication, columns, chunk_bytes=4096).sizes == (48, 16)


# -------------------------------------------------------------------------------------------------
# worked example
#
# One layer of Llama-3-8B in bfloat16, with one of its norms, in chunks of 16 MiB.

KIB, MIB = 2**10, 2**20
HIDDEN, KEY_VALUE, INNER = 4096, 1024, 14_336
LLAMA = {
    "q": (HIDDEN, HIDDEN),
    "k": (KEY_VALUE, HIDDEN),
    "v": (KEY_VALUE, HIDDEN),
    "o": (HIDDEN, HIDDEN),
    "gate": (INNER, HIDDEN),
    "up": (INNER, HIDDEN),
    "down": (HIDDEN, INNER),
    "norm": (HIDDEN,),
}


def by_rows(ranks: int) -> Publication:
    """FSDP2: each tensor cut by rows."""
    made = []
    for rank in range(ranks):
        shardings = {name: cut(shape, [Cut(0, ranks, rank)]) for name, shape in LLAMA.items()}
        shapes = {
            name: tuple(sum(run.size for run in runs) for runs in its.runs)
            for name, its in shardings.items()
        }
        made.append(
            arrange(pieces_of(locals_of(shapes), rank=rank, world_size=ranks, shardings=shardings))
        )
    return Publication(tuple(made)).check()


def first_of_two() -> Coordinates:
    """Tensor parallelism with fused tensors, as an inference engine has them."""
    q, k, v, o, gate, up, down, norm = map(source, LLAMA)
    shapes = {
        "qkv": (HIDDEN // 2 + KEY_VALUE, HIDDEN),
        "gate_up": (INNER, HIDDEN),
        "o": (HIDDEN, HIDDEN // 2),
        "down": (HIDDEN, INNER // 2),
        "norm": (HIDDEN,),
    }
    sources: dict[str, object] = {
        "qkv": [q[: HIDDEN // 2], k[: KEY_VALUE // 2], v[: KEY_VALUE // 2]],
        "gate_up": [gate[: INNER // 2], up[: INNER // 2]],
        "o": o[:, : HIDDEN // 2],
        "down": down[:, : INNER // 2],
        "norm": norm,
    }
    return arrange(pieces_of(locals_of(shapes), world_size=2, sources=sources, shape_of=LLAMA.get))


def taken(found: Reading) -> list[Strip]:
    return [strip for part in found.parts for chunk in part.selection.chunks for strip in chunk]


def runs_at_the_sources(found: Reading) -> Counter[int]:
    """How many runs there are of each length."""
    counts: Counter[int] = Counter()
    for strip in taken(found):
        counts[strip.run] += strip.runs
    return counts


def test_eight_ranks_by_rows_to_two_tensor_parallel_ones() -> None:
    found = reading_of(by_rows(8), first_of_two(), chunk_bytes=16 * MIB)
    assert found.nbytes == 208 * MIB + 8 * KIB
    # Of the first four sources: q, k and v together; gate; up and o; down and the norm. The others
    # have no qkv of this rank.
    assert [part.chunks for part in found.parts[:2]] == [(0, 4, 8, 16), (1, 5, 9, 17)]
    assert [part.selection.sizes for part in found.parts[:4]] == [
        (6 * MIB, 14 * MIB, 16 * MIB, 7 * MIB + KIB)
    ] * 4
    assert len({part.selection.chunks for part in found.parts[:4]}) == 1  # the same part of each
    assert len({part.selection.selection_id for part in found.parts}) == 8  # but of another shard
    assert found.places[0] == (
        straight(0, 0, 4 * MIB),
        straight(0, 16 * MIB, MIB),
        straight(0, 20 * MIB, MIB),
    )
    runs = {4 * MIB: 4, MIB: 8, 14 * MIB: 8, 4 * KIB: 8 * 512, 14 * KIB: 8 * 512, KIB: 8}
    assert runs_at_the_sources(found) == runs
    assert sum(runs.values()) == 8220
    # whole rows
    assert {strip.loops for strip in taken(found) if strip.loops} == {
        ((512, 8 * KIB),),
        ((512, 28 * KIB),),
    }
    assert all(place.is_contiguous for places in found.places for place in places)


# --------------------------------------------------------------------------------------------------
# hostile

GOOD = [[1], [0], [0], [0], [0], [1], [1], [4], [2], [8]]


def with_columns(**changed: list[int]) -> bytes:
    names = (
        "strips regions offsets region_steps offset_steps lengths loops runs times apart".split()
    )
    return pack_all(
        1, ["of"], [changed.get(name, column) for name, column in zip(names, GOOD, strict=True)]
    )


def test_the_columns_that_the_refused_ones_differ_from_are_a_selection() -> None:
    found, same = Selection.decode(with_columns()), ((Strip(0, 0, 0, 0, 1, ((2, 8),), 4),),)
    assert found == Selection(same, "of")
    assert hash(found.chunks) == hash(same)


@pytest.mark.parametrize(
    ("changed", "says"),
    [
        ({"strips": [0]}, "do not add up"),
        ({"strips": [1, 0]}, "do not add up"),
        ({"offsets": [0, 0]}, "different strips"),
        ({"loops": [2]}, "loops do not add up"),
        ({"lengths": [0]}, "a strip is empty"),
        ({"runs": [0]}, "a strip is empty"),
        ({"times": [1]}, "less than twice"),
        ({"lengths": [2**21 + 1]}, "more than 2097152 cells"),
        ({"region_steps": [2]}, "one cell has a step"),
        ({"loops": [65], "times": [2] * 65, "apart": [8] * 65}, "more than 64 loops"),
        ({"runs": [2**30]}, "more than 1073741824 bytes"),
        ({"times": [2**62], "apart": [0]}, "more than 1073741824 bytes"),
        ({"times": [2**23], "runs": [1]}, "more than 4194304 runs"),
        ({"lengths": [2**14 + 1]}, "more than 16384 cells"),
    ],
)
def test_what_is_no_selection_is_refused(changed: dict[str, list[int]], says: str) -> None:
    with pytest.raises(ProtocolError, match=says):
        Selection.decode(with_columns(**changed))


@pytest.mark.parametrize("of", ["two\nlines", "x" * 1000])
def test_a_selection_of_a_shard_that_has_no_such_name_is_refused(of: str) -> None:
    with pytest.raises(ProtocolError, match=r"^bad selection: it is of a shard that has no such"):
        Selection.decode(pack_all(1, [of], GOOD))


def test_other_bytes_for_the_same_selection_are_refused() -> None:
    good = with_columns()
    for position in range(len(good)):
        for bad in (
            good[:position],
            good + b"\0",
            good[:position] + bytes([good[position] ^ 1]) + good[position + 1 :],
        ):
            try:
                decoded = Selection.decode(bad)
            except ProtocolError:
                continue
            assert decoded.encode() == bad


@pytest.mark.parametrize(
    ("strip", "fits"),
    [
        (Strip(0, 88, 0, 0, 1, ((2, 8),), 4), True),
        (Strip(0, 89, 0, 0, 1, ((2, 8),), 4), False),
        (Strip(2, 0, 0, 0, 1, (), 1), False),
        (Strip(0, 0, 1, 0, 2, (), 50), True),
        (Strip(0, 0, 1, 0, 2, (), 51), False),  # the second region is smaller
        (Strip(1, 0, -1, 0, 2, (), 50), True),
        (Strip(1, 0, -1, 0, 3, (), 1), False),
        (Strip(0, 0, 1, 0, 3, (), 1), False),
        (Strip(0, 60, 1, -30, 2, (), 20), True),
        (Strip(0, 20, 1, -30, 2, (), 1), False),
        (Strip(0, 0, 0, 30, 3, (), 40), True),
        (Strip(0, 0, 0, 30, 3, (), 41), False),
        (Strip(0, 60, 0, -30, 3, (), 40), True),
        (Strip(0, 60, 0, -30, 3, (), 41), False),
        (Strip(0, 60, 0, -31, 3, (), 1), False),
        (Strip(0, 2**63 - 1, 0, 0, 1, ((2, 2**63 - 1),), 2**29), False),
        (Strip(0, 0, 2**61, 2**61, 2, (), 1), False),
    ],
)
def test_a_strip_that_is_not_within_the_memory_is_a_fault(strip: Strip, fits: bool) -> None:
    found = Selection(((straight(0, 0, 1),), (strip,))).fault([100, 50])
    assert found == (None if fits else "chunk 1 is not within the shard's memory")
