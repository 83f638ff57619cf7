"""Catalogue, arrangement and coordinates: what ranks have in common once, and what is refused.
(`test_reading` sends them through their encodings.)
"""

from __future__ import annotations

import tracemalloc
from collections.abc import Callable, Sequence
from typing import Any

import msgpack
import pytest
from hypothesis import given, settings, strategies as st

from tensorhub.errors import ManifestMismatch, ProtocolError, RegistrationError
from tensorhub.layouts import (
    Arrangement,
    Catalogue,
    Coordinates,
    Kind,
    Piece,
    arrange,
    at,
    catalogue as catalogues,
    source,
)
from tensorhub.layouts.boxes import Span
from tensorhub.layouts.catalogue import catalogue_of, merged, numbers_in
from tensorhub.layouts.columns import pack
from tensorhub.layouts.pieces import packed
from tensorhub.layouts.sharding import Cut, cut
from tests.layouts.worlds import LocalTensor, pieces_of

Decode = Callable[[bytes], Any]


def local(name: str, *shape: int, region: int = 0, dtype: str = "uint8") -> LocalTensor:
    size = {"uint8": 1, "bfloat16": 2, "qint8": 1}[dtype]
    quantization = (0.5, 3) if dtype == "qint8" else None
    return LocalTensor(name, dtype, shape, packed(shape, size), region, 0, quantization)


def sharded(rank: int, ranks: int) -> Coordinates:
    shapes = {"a": (12, 4), "b": (12, 4), "norm": (12,), "w": (24, 2)}
    shardings = {name: cut(shape, [Cut(0, ranks, rank)]) for name, shape in shapes.items()}
    locals_ = [
        local(name, shape[0] // ranks, *shape[1:], region=n)
        for n, (name, shape) in enumerate(shapes.items())
    ]
    return arrange(pieces_of(locals_, rank=rank, world_size=ranks, shardings=shardings))


def test_like_ranks_have_turns_of_their_own_and_equal_ones_the_same() -> None:
    assert [sharded(rank, 4).turn for rank in range(4)] == [0, 1, 2, 3]
    assert sharded(2, 4).turn == sharded(2, 4).turn
    assert arrange(pieces_of([local("w", 6)], rank=0)).turn == arrange([]).turn == 0


def test_what_ranks_have_in_common_is_said_once() -> None:
    ranks = [sharded(rank, 4) for rank in range(4)]
    assert len({each.arrangement.arrangement_id for each in ranks}) == 1
    assert len({each.coordinates_id for each in ranks}) == 4
    assert [each.boxes[0] for each in ranks] == [
        (Span(3 * rank, 3), Span(0, 4)) for rank in range(4)
    ]
    assert len(ranks[0].boxes) == 3  # a and b are cut alike


def test_strides_are_said_where_memory_is_not_contiguous() -> None:
    def with_strides(*strides: int, rows: int = 4) -> Coordinates:
        return arrange(
            [Piece("w", Kind("uint8", (4, 6)), (Span(0, rows), Span(0, 6)), 0, 0, strides)]
        )

    assert with_strides(6, 1).arrangement.stride_sets == ()
    assert with_strides(8, 1).arrangement.stride_sets == ((8, 1),)
    assert with_strides(99, 1, rows=1).arrangement.stride_sets == ()  # of one row nobody can tell
    assert with_strides(99, 2, rows=1).arrangement.stride_sets == ((0, 2),)
    assert [piece.strides for piece in with_strides(8, 1).pieces()] == [(8, 1)]


def test_the_bytes_of_all_pieces_are_counted_tied_ones_each_time() -> None:
    made = arrange(
        pieces_of([local("a", 4, 6), local("b", 4, 6), local("c", 5, region=1, dtype="bfloat16")])
    )
    assert [piece.nbytes for piece in made.pieces()] == [24, 24, 10]
    assert made.nbytes == 58


# --------------------------------------------------------------------------------------------------
# hostile bytes


def decoders() -> tuple[tuple[bytes, Decode], ...]:
    """A blob of each sort that is right, and what reads it."""
    made = arrange(
        pieces_of(
            [
                local("w", 4, 6),
                local("mine", 3, 8, region=1),
                local("q", 5, dtype="qint8", region=2),
            ],
            rank=1,
            world_size=2,
            sources={"mine": [(at[:, 0:4], source("v", shape=(9, 4))[0:9:3])]},
        )
    )
    return (
        (made.catalogue.encode(), Catalogue.decode),
        (made.arrangement.encode(), lambda blob: Arrangement.decode(blob, made.catalogue)),
        (made.encode(), lambda blob: Coordinates.decode(blob, made.arrangement)),
    )


DECODERS = decoders()


def decodes_or_refuses(blob: bytes, decode: Decode) -> None:
    """Never another error; and what is accepted is the one encoding of what it says."""
    try:
        found = decode(blob)
    except ProtocolError:
        return
    assert found.encode() == blob


@settings(max_examples=300)
@given(st.sampled_from(DECODERS), st.data())
def test_changed_bytes_are_refused_or_right(
    case: tuple[bytes, Decode], data: st.DataObject
) -> None:
    blob, decode = case
    changed = bytearray(blob)
    for _ in range(data.draw(st.integers(1, 3))):
        changed[data.draw(st.integers(0, len(blob) - 1))] = data.draw(st.integers(0, 255))
    decodes_or_refuses(bytes(changed), decode)
    decodes_or_refuses(bytes(changed[: data.draw(st.integers(0, len(blob)))]), decode)


def said(number: int, **changes: object) -> tuple[bytes, Decode]:
    """One of the three with some of its parts replaced, by their places."""
    blob, decode = DECODERS[number]
    parts = msgpack.unpackb(blob)
    for place, part in changes.items():
        parts[int(place[1:])] = part if isinstance(part, str | int) else pack(part)  # type: ignore[arg-type]
    return msgpack.packb(parts), decode


CATALOGUE, ARRANGEMENT, COORDINATES = 0, 1, 2
# DECODERS' catalogue: w, v and q, of 3 kinds: rank-local (2, 4, 6), (9, 4), rank-local (2, 5) with
# a scale.


@pytest.mark.parametrize(
    ("case", "fault"),
    [
        (said(CATALOGUE, _0=9), "form 9 is unknown"),
        (said(CATALOGUE, _1="wvqx"), "lengths do not add up"),
        (said(CATALOGUE, _1="wvqv", _3=[1] * 4, _4=[0, 1, 2, 1]), "two tensors have one name"),
        (said(CATALOGUE, _1="wq", _3=[1, 0, 1]), "a name is a string"),
        (said(CATALOGUE, _2="uint8 float3"), "unknown to this version"),
        (said(CATALOGUE, _3=[1, 1]), "columns disagree"),
        (said(CATALOGUE, _5=[0, 0]), "columns of kinds disagree"),
        (said(CATALOGUE, _4=[0, 1, 3]), "kind is not there"),
        (said(CATALOGUE, _4=[0, 1, 1]), "no tensor is of it"),
        (said(CATALOGUE, _5=[0, 0, 2]), "dtype is not listed"),
        (said(CATALOGUE, _6=[3, 2, 3]), "dimensions do not add up"),
        (said(CATALOGUE, _8=[3, 0, 2]), "local to 3 ranks"),
        (said(CATALOGUE, _9=[0, 0, 0]), "its scale 0.0 is not a positive"),
        (said(ARRANGEMENT, _1="0" * 32), "another catalogue"),
        (said(ARRANGEMENT, _2=[0, 1, 3]), "a tensor is not in the catalogue"),
        (said(ARRANGEMENT, _3=[0, 1, 2**16]), "more than 65536 boxes"),
        (said(ARRANGEMENT, _4=[0, 1, 2**20]), "more than 1048576 regions"),
        (said(ARRANGEMENT, _5=[0, 0]), "different pieces"),
        (said(ARRANGEMENT, _6=[0, 2, 0]), "strides are not there"),
        (said(ARRANGEMENT, _6=[1, 1, 0]), "other dimensions than their tensor"),
        (said(ARRANGEMENT, _7=[1]), "do not add up"),
        (said(COORDINATES, _1="0" * 32), "another arrangement"),
        (said(COORDINATES, _2=[3, 2]), "other boxes"),
        (said(COORDINATES, _2=[2, 3, 2]), "dimensions"),
        (said(COORDINATES, _3=[2, 0, 0, 0, 0, 1, 0]), "not within"),
        (said(COORDINATES, _4=[1, 0, 6, 3, 4, 1, 5]), "empty"),
        (said(COORDINATES, _4=[1, 4, 6, 2**62, 4, 1, 5]), "not within"),
        (said(COORDINATES, _5=[1, 1, 1, 0, 1, 1, 1]), "not within"),
        # a step where there is one index
        (said(COORDINATES, _5=[2, 1, 1, 3, 1, 1, 1]), "not within"),
    ],
)
def test_what_cannot_be_is_refused_by_name(case: tuple[bytes, Decode], fault: str) -> None:
    blob, decode = case
    with pytest.raises(ProtocolError, match=f"^bad (catalogue|arrangement|coordinates): .*{fault}"):
        decode(blob)


@pytest.mark.parametrize("number", [CATALOGUE, ARRANGEMENT, COORDINATES])
def test_another_encoding_of_the_same_is_refused(number: int) -> None:
    """Else two ids could name one layout."""
    blob, decode = DECODERS[number]
    parts = msgpack.unpackb(blob)
    narrow = next(
        place
        for place, part in enumerate(parts)
        if isinstance(part, bytes) and part[:1] == b"\1" and len(part) > 1
    )
    parts[narrow] = b"\2" + b"".join(bytes([number, 0]) for number in parts[narrow][1:])
    with pytest.raises(ProtocolError, match="not the one encoding"):
        decode(msgpack.packb(parts))


def test_pieces_that_end_beyond_all_memory_are_refused() -> None:
    made = sharded(0, 4)
    blob = msgpack.unpackb(made.arrangement.encode())
    blob[5] = pack([2**63 - 8, 0, 0, 0])
    arrangement = Arrangement.decode(msgpack.packb(blob), made.catalogue)
    coordinates = msgpack.unpackb(made.encode())
    coordinates[1] = arrangement.arrangement_id
    with pytest.raises(ProtocolError, match="may end 2"):
        Coordinates.decode(msgpack.packb(coordinates), arrangement)


@pytest.mark.heavy
def test_a_few_hostile_bytes_cost_no_great_memory() -> None:
    many = range(2**17)
    cases = [
        said(CATALOGUE, _3=many, _4=many),
        said(CATALOGUE, _7=many),
        said(ARRANGEMENT, _2=many, _3=many, _4=many, _5=many),
    ]
    cases += [said(ARRANGEMENT, _7=[2**50]), said(COORDINATES, _2=many, _3=many, _4=many, _5=many)]
    for blob, decode in cases:
        assert len(blob) < 400
        tracemalloc.start()
        try:
            with pytest.raises(ProtocolError):
                decode(blob)
            assert tracemalloc.get_traced_memory()[1] < 4 * 2**20
        finally:
            tracemalloc.stop()


# --------------------------------------------------------------------------------------------------
# building


def test_one_name_of_two_kinds_is_no_catalogue() -> None:
    with pytest.raises(RegistrationError, match=r"'a' is said to be uint8 \(3,\) and uint8 \(4,\)"):
        catalogue_of(
            [("a", Kind("uint8", (3,))), ("b", Kind("uint8", (3,))), ("a", Kind("uint8", (4,)))]
        )


def test_ranks_that_disagree_do_not_make_one_model() -> None:
    one, other = (catalogue_of([("a", Kind("uint8", (size,)))]) for size in (3, 4))
    with pytest.raises(ManifestMismatch, match="do not make one model: ") as caught:
        merged({0: one, 1: one, 2: other})
    assert caught.value.differences == (
        "tensor 'a' is uint8 (3,) on rank 0, and uint8 (4,) on rank 2",
    )


def test_ranks_that_describe_too_much_together_hear_why(monkeypatch: pytest.MonkeyPatch) -> None:
    one, other = (catalogue_of([(name, Kind("uint8", (3,)))]) for name in "ab")
    monkeypatch.setattr(catalogues, "ENCODED_BYTES_MAX", len(one.encode()))
    with pytest.raises(ManifestMismatch, match="one model: these tensors take more than"):
        merged({0: one, 1: other})


def test_rank_local_tensors_of_different_shapes_are_different_tensors() -> None:
    one, other = (catalogue_of([("a", Kind("uint8", (2, size), None, 2))]) for size in (3, 4))
    assert merged({0: one, 1: other}).names == ("a", "a")
    assert numbers_in(other, merged({0: one, 1: other})) == [1]
    assert numbers_in(other, one) == [-1]
    assert numbers_in(one, one) is None


def test_a_tensor_is_found_in_another_catalogue_by_its_name_and_kind() -> None:
    one, other = (
        catalogue_of([(name, Kind("uint8", (size,))) for name, size in sizes.items()])
        for sizes in ({"a": 3, "b": 3, "c": 4}, {"b": 3, "c": 5, "d": 3})
    )
    assert numbers_in(one, other) == [-1, 0, -1]
    assert numbers_in(one, catalogue_of([])) == [-1, -1, -1]


@pytest.mark.parametrize(
    ("pieces", "fault"),
    [
        ([("w", "uint8", (4, 6))], "'w' is bfloat16 .* at the source and uint8 .* at the reader"),
        (
            [("w", "bfloat16", (4, 7))],
            r"'w' is bfloat16 \(4, 6\) at the source and bfloat16 \(4, 7\) at the reader",
        ),
        (
            [("v", "uint8", (4, 7)), ("u", "uint8", (1,))],
            "'v' is unknown to the source.*\n.*'u' is unknown",
        ),
        (
            [("mine", "uint8", (3,))],
            "'mine' is local to the source's ranks, so only the same rank of an equal layout",
        ),
    ],
)
def test_every_difference_from_the_publication_is_named(
    pieces: Sequence[tuple[str, str, tuple[int, ...]]], fault: str
) -> None:
    catalogue = catalogue_of(
        [("w", Kind("bfloat16", (4, 6))), ("mine", Kind("uint8", (2, 3), None, 2))]
    )
    readers = [
        local(name, *shape, dtype=dtype, region=n) for n, (name, dtype, shape) in enumerate(pieces)
    ]
    with pytest.raises(ManifestMismatch, match=f"(?s){fault}") as caught:
        arrange(pieces_of(readers), catalogue)
    assert len(caught.value.differences) == len(pieces)


def test_a_plain_tensor_of_one_rank_of_several_is_refused_with_advice() -> None:
    catalogue = catalogue_of([("w", Kind("uint8", (4, 6)))])
    with pytest.raises(
        ManifestMismatch, match=r"one of the reader's 2 ranks.*sources=\{'w': source\('w'\)"
    ):
        arrange(pieces_of([local("w", 2, 6)], rank=1, world_size=2), catalogue)
