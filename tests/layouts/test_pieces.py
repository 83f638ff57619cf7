"""Which part of which global tensor lies where: of whole, rank-local, sharded and described
tensors.
"""

from __future__ import annotations

from typing import Any

import pytest

from tensorhub.errors import RegistrationError
from tensorhub.layouts import Kind, Piece, at, source
from tensorhub.layouts.arrangement import arrange
from tensorhub.layouts.boxes import Span, whole
from tensorhub.layouts.pieces import packed
from tensorhub.layouts.sharding import Cut, cut
from tests.layouts.worlds import LocalTensor, pieces_of

SHAPES: dict[str, tuple[int, ...]] = {
    "q": (8, 4),
    "k": (2, 4),
    "v": (2, 4),
    "gate": (6, 4),
    "up": (6, 4),
    "embed": (10, 4),
    "wide": (4, 6),
    "o": (8, 6),
}


def local(
    name: str, *shape: int, strides: tuple[int, ...] | None = None, offset: int = 0
) -> LocalTensor:
    return LocalTensor(name, "float16", shape, strides or packed(shape, 2), 3, offset)


def read(tensor: LocalTensor, entry: object) -> list[Piece]:
    return pieces_of([tensor], world_size=2, sources={tensor.name: entry}, shape_of=SHAPES.get)


def test_a_plain_tensor_of_one_of_several_ranks_is_local_to_it() -> None:
    (piece,) = pieces_of([local("q", 8, 4, offset=64)], rank=1, world_size=3)
    assert piece == Piece(
        "q", Kind("float16", (3, 8, 4), None, 3), (Span(1, 1), *whole((8, 4))), 3, 64, (0, 8, 2)
    )


def test_a_dtensor_with_several_runs_is_several_pieces() -> None:
    sharding = cut((13, 4), [Cut(0, 3, 2, split=2), Cut(0, 2, 0)])
    pieces = pieces_of([local("w", 2, 4)], world_size=6, shardings={"w": sharding})
    assert [(piece.box, piece.offset) for piece in pieces] == [
        ((Span(6, 1), Span(0, 4)), 0),
        ((Span(11, 1), Span(0, 4)), 8),
    ]


def test_ranks_without_a_part_hold_nothing() -> None:
    sharding = cut((3, 4), [Cut(0, 4, 3)])
    assert pieces_of([local("w", 0, 4)], world_size=4, shardings={"w": sharding}) == []
    # its rank is not on the mesh
    assert pieces_of([local("w", 2, 4)], world_size=4, shardings={"w": None}) == []


def test_a_tensor_without_elements_is_known_on_every_rank_though_nobody_holds_a_byte_of_it() -> (
    None
):
    kind = Kind("float16", (0, 4))
    for tensors in (
        pieces_of([local("w", 0, 4)], world_size=2, shardings={"w": cut((0, 4), [Cut(0, 2, 1)])}),
        pieces_of([local("w", 0, 4)], world_size=2, sources={"w": source("w", shape=(0, 4))}),
        pieces_of([local("w", 0, 4)]),
    ):
        coordinates = arrange(tensors)
        assert (coordinates.catalogue.names, coordinates.catalogue.kinds) == (("w",), (kind,))
        assert (coordinates.nbytes, list(coordinates.pieces())) == (0, [])


def test_a_callable_gives_entries_or_none() -> None:
    pieces = pieces_of(
        [local("mine.q", 8, 4), local("q", 8, 4)],
        sources=lambda name: (
            source(name.removeprefix("mine.")) if name.startswith("mine.") else None
        ),
        shape_of=SHAPES.get,
    )
    assert [piece.name for piece in pieces] == ["q", "q"]


@pytest.mark.parametrize(
    ("entry", "fault"),
    [
        (
            source("q"),
            r"sources of 't': source\('q'\) has shape \(8, 4\), and the tensor has \(6, 4\); take",
        ),
        (
            source("q")[0:6].T,
            (
                r"has shape \(4, 6\), and the tensor has \(6, 4\); take .* "
                r"or write `.T` behind the view"
            ),
        ),
        (
            source("wide"),
            r"has shape \(4, 6\), and the tensor has \(6, 4\); write `.T` behind the view",
        ),
        (
            source("o")[0:4],
            (
                r"\(4, 6\), and the tensor has \(6, 4\); take a part of the other dimension, such as "
                r"\[0:6, 0:4\]; or"
            ),
        ),
        (
            source("q")[0:5],
            r"where the rest is padding, write pairs: `\[\(at\[0:5, 0:4\], view\)\]`",
        ),
        ([source("q")[0:3], source("k")[0:2]], "the list has 5 rows, and the tensor 6"),
        ([source("q")[0:6], source("k")[0:2]], "the list has 8 rows, and the tensor 6"),
        (
            [source("q")[0:3], source("k")[0:2, 0:3]],
            r"has shape \(2, 3\), and the tensor's is \(6, 4\)",
        ),
        ([source("q")[0], source("k")], r"has shape \(4,\), and the tensor's"),
        (
            [(at[0:3], source("q")[0:4])],
            r"has shape \(4, 4\), and its place at\[0:3\] has \(3, 4\)",
        ),
        (
            [(at[0:7], source("q")[0:7])],
            r"sources of 't': at\[0:7\]: slice 0:7 is not within the size there, 6",
        ),
        (
            [(at[0:4], source("q")[0:4]), (at[3:6], source("q")[4:7])],
            "at.0:4. .* and at.3:6. .* overlap",
        ),
        (source("nothing"), "'nothing' is not published"),
        (
            source("q", shape=(8, 5)),
            r"'q' is said to have shape \(8, 5\), and it is published with \(8, 4\)",
        ),
        (
            source("q")[0:9],
            r"sources of 't': source\('q'\)\[0:9\]: slice 0:9 is not within the size there, 8",
        ),
        (
            [source("q")[0:4], source("k")[0:9]],
            r"sources of 't': source\('k'\)\[0:9\]: slice 0:9 is not within",
        ),
        ("q", "give a view"),
    ],
)
def test_what_does_not_fit_is_named(entry: Any, fault: str) -> None:
    with pytest.raises(RegistrationError, match=fault):
        read(local("t", 6, 4), entry)


def test_tensors_that_share_memory_are_filled_in_the_same_places_or_one_of_them() -> None:
    q, k, v = source("q"), source("k"), source("v")

    def faults(one: object, other: object) -> str:
        tensors = [local("one", 4, 4), local("other", 4, 4), local("apart", 4, 4, offset=32)]
        sources = {"one": one, "other": other, "apart": q[0:4]}
        try:
            pieces_of(tensors, world_size=2, sources=sources, shape_of=SHAPES.get)
        except RegistrationError as error:
            return str(error)
        return ""

    assert not faults(q[0:4], q[0:4])
    assert not faults(q[0:4], [])
    assert not faults([k, v], [(at[2:4], v), (at[0:2], k)])
    assert not faults([(at[0::2], k), (at[1::2], v)], [(at[0::2], k), (at[1::2], v)])
    # the stride of a single row leads nowhere
    rows = [local("one", 1, 4), local("other", 1, 4, strides=(2, 2))]
    same = {"one": q[0:1], "other": q[0:1]}
    assert pieces_of(rows, world_size=2, sources=same, shape_of=SHAPES.get)
    text = "tensors 'one' and 'other' share memory, and different parts of it are to be filled"
    assert text in faults(q[0:4], [(at[2:4], k)])
    assert text in faults([(at[0:2], k)], [(at[1:3], v)])
    assert text in faults([(at[0::2], k)], [(at[0:2], k)])


def test_a_publishers_tensors_that_share_memory_may_hold_different_parts_of_it() -> None:
    """It fills nothing."""
    tensors = [local("one", 4, 4), local("other", 4, 4)]
    found = pieces_of(tensors, sources={"other": [(at[2:4], source("k", shape=(2, 4)))]})
    assert [(piece.name, piece.offset, piece.nbytes) for piece in found] == [
        ("one", 0, 32),
        ("k", 16, 16),
    ]


def test_a_publisher_says_how_large_the_whole_is() -> None:
    tensor = local("mine", 4, 4)
    with pytest.raises(RegistrationError, match=r"source\('q', shape=...\)"):
        pieces_of([tensor], sources={"mine": source("q")[0:4]})
    (piece,) = pieces_of([tensor], sources={"mine": source("q", shape=(8, 4))[0:4]})
    assert piece.box == (Span(0, 4), Span(0, 4))


def test_every_fault_is_in_one_error() -> None:
    sharding = cut((8, 4), [Cut(0, 2, 0)])
    with pytest.raises(RegistrationError) as caught:
        pieces_of(
            [local("q", 3, 4), local("a", 1), local("b", 1)],
            world_size=2,
            shardings={"q": sharding},
            sources={"a": 3, "b": source("k"), "c": source("k")},
            shape_of=SHAPES.get,
        )
    text = str(caught.value)
    assert text.startswith("4 fault(s)")
    assert "tensor 'q': its local part has shape (3, 4), and its placements say (4, 4)" in text
    assert "sources of 'a'" in text
    assert "sources of 'b'" in text
    assert "sources names 'c', and no tensor of that name is registered" in text
