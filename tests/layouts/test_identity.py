"""The layout id of a rank: the same in every process, for the same parts in whatever memory;
another one for other parts.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from math import prod

import numpy as np
import pytest

from tensorhub.layouts import Declaration, Sharding, at, layout_id_of, source
from tensorhub.layouts.sharding import Cut, cut
from tensorhub.layouts.views import View
from tensorhub.model.manifest import Manifest, TensorDescription, build_manifest
from tests.layouts.worlds import entries

SHAPES = {"a": (6, 4), "b": (4,)}


def manifest_of(shapes: Mapping[str, tuple[int, ...]] = SHAPES, dtype: str = "uint8") -> Manifest:
    size = {"uint8": 1, "bfloat16": 2}[dtype]
    tensors = [
        TensorDescription(name, dtype, its, 4096 * number, size * prod(its))
        for number, (name, its) in enumerate(shapes.items())
    ]
    return build_manifest(tensors, 4096, "none")


def half(rank: int = 0) -> dict[str, Sharding | None]:
    return {"a": cut((12, 4), [Cut(0, 2, rank)])}


W = source("w", shape=(12, 4))


def test_plain_tensors_are_any_like_rank_of_a_group_of_so_many() -> None:
    assert layout_id_of(manifest_of(), Declaration()) == "world/1"
    assert layout_id_of(manifest_of(), Declaration(3, 8)) == "world/8"
    assert layout_id_of(manifest_of({}), Declaration(sources={})) == "world/1"


def test_it_is_the_same_in_every_process() -> None:
    declared = Declaration(
        1,
        2,
        half(1),
        entries({"b": [(at[0:2, ...], W[3, ::2]), (at[2:4], W.T[0, 5:-5])]}),
        partial=True,
    )
    assert layout_id_of(manifest_of(), declared) == "own/18d9e254f31796944cc1a6cc1217c7b0"


def test_regions_and_order_make_no_difference() -> None:
    backwards = manifest_of(dict(reversed(SHAPES.items())))
    for declared in (
        Declaration(0, 2, half()),
        Declaration(sources=entries({"a": W[0:6]})),
        Declaration(partial=True),
    ):
        assert layout_id_of(backwards, declared) == layout_id_of(manifest_of(), declared)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (W[0:6], [W[0:6]]),
        (W[0:6], W[np.int64(0) : np.int64(6)]),
        ([W[0:3], W[3:6]], (W[0:3], W[3:6])),
        ([(at[0:6], W[0:6])], [[at[0:6], W[0:6]]]),
    ],
)
def test_what_says_the_same_is_the_same(one: object, other: object) -> None:
    ids = {
        layout_id_of(manifest_of(), Declaration(sources=entries({"a": each})))
        for each in (one, other)
    }
    assert len(ids) == 1


def test_what_says_anything_else_is_another() -> None:
    views: list[View] = [
        W[0:6],
        W[0:6, :],
        W[:6],
        W[0:12:2],
        W,
        W.T,
        W[...],
        source("w")[0:6],
    ]
    given = [
        *views,
        source("v", shape=(12, 4))[0:6],
        [W[0:3], W[3:6]],
        [(at[0:6], W[0:6])],
        [(at[0:3], W[0:3])],
    ]
    manifest = manifest_of()
    declared = [Declaration(sources=entries({"a": entry})) for entry in given]
    declared += [
        Declaration(sources=entries({"b": W[0:6]})),
        Declaration(partial=True),
        Declaration(partial=True, world_size=2),
    ]
    declared += [Declaration(rank, 2, half(rank)) for rank in range(2)]
    declared += [
        Declaration(0, 2, half(1)),
        Declaration(0, 4, half()),
        Declaration(0, 2, half(), partial=True),
    ]
    declared += [
        Declaration(0, 2, {"a": None}),
        Declaration(0, 2, {"a": cut((12, 4), [Cut(0, 2, 0, 2)])}),
    ]
    ids = [layout_id_of(manifest, each) for each in declared]
    ids += [layout_id_of(manifest_of({"a": (6, 4), "b": (5,)}), declared[0])]
    ids += [layout_id_of(manifest_of({"a": (6, 4), "c": (4,)}), declared[0])]
    ids += [layout_id_of(manifest_of(SHAPES, "bfloat16"), declared[0])]
    assert len(set(ids)) == len(ids)


def test_padded_rows_are_another_layout_for_each_padding_and_each_tie() -> None:
    found = {layout_id_of(manifest_of(), Declaration())}
    for pitch in (5, 6):
        rows = TensorDescription("a", "uint8", (6, 4), 0, 24, strides=(pitch, 1))
        for address in (0, 4096):  # "b" is the same memory, or not
            manifest = build_manifest(
                [rows, replace(rows, name="b", address=address)], 4096, "none"
            )
            strides = dict.fromkeys("ab", rows.strides)
            found.add(layout_id_of(manifest, Declaration(strides=strides)))
            found.add(
                layout_id_of(manifest, Declaration(strides=strides, sources=entries({"a": W[:6]})))
            )
    assert len(found) == 1 + 2 * 2 * 2


def test_a_dtensor_that_a_rank_alone_has_the_whole_of_is_a_plain_tensor() -> None:
    whole = Declaration(shardings={"a": cut((6, 4), [Cut(0, 1, 0)]), "b": cut((4,), [])})
    assert layout_id_of(manifest_of(), whole) == "world/1"
    replicated = Declaration(0, 2, {"a": cut((6, 4), []), "b": cut((4,), [])})
    assert layout_id_of(manifest_of(), replicated).startswith("own/")
