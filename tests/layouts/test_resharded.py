"""A manifest and a resharded one say the same things of their own grids."""

from __future__ import annotations

from math import prod

import pytest

from tensorhub.layouts import Declaration, Published, ReshardedManifest, at, publication_of, reading_for, source
from tensorhub.model.manifest import Manifest, TensorDescription, build_manifest
from tensorhub.model.strips import Strip, straight
from tests.layouts.worlds import entries


def described(name: str, shape: tuple[int, ...], address: int) -> TensorDescription:
    return TensorDescription(name, "uint8", shape, address, prod(shape))


def made() -> tuple[Manifest, ReshardedManifest]:
    """Columns 2 and 3 of a tensor of 4096 rows, and a padded vector; the manifest of their memory, and the resharded one."""
    published = build_manifest([described("w", (4096, 4), 0), described("v", (100,), 2**20)], 4096, "sha-256")
    what = Published("sha-256", 4096, ((published.manifest_id,),))
    publication = publication_of(what, {published.manifest_id: published.encode()})
    mine = build_manifest([described("padded", (128,), 0), described("columns", (4096, 2), 2**20)], 8192, "none", "mine")
    sources = {"padded": [(at[0:100], source("v"))], "columns": source("w")[:, 2:4]}
    return mine, reading_for(what, publication, mine, Declaration(0, 2, sources=entries(sources)))


def test_what_is_said_of_chunks_is_said_of_either_in_the_same_words() -> None:
    for manifest in made():
        assert manifest.chunk_count == len(manifest.sizes)
        assert manifest.nbytes == sum(manifest.sizes)
        for chunk, size in enumerate(manifest.sizes):
            assert sum(place.nbytes for place in manifest.places(chunk)) == size
            assert len(manifest.tensors_in(chunk)) == 1


def test_the_grid_of_a_manifest_is_named_by_it() -> None:
    plain, resharded = made()
    assert plain.grid_id == plain.manifest_id
    assert plain.sizes == (128, 8192)
    assert plain.places(1) == (straight(1, 0, 8192),)
    assert resharded.grid_id not in (plain.grid_id, resharded.manifest_id)


def test_a_resharded_one_has_the_readers_memory_and_the_publishers_digests() -> None:
    plain, resharded = made()
    assert (resharded.tensors, resharded.regions) == (plain.tensors, plain.regions)
    assert (resharded.digest, resharded.chunk_bytes, resharded.layout_id) == ("sha-256", 4096, "mine")
    with pytest.raises(TypeError, match="use `places`"):
        _ = resharded.chunks


def test_a_chunk_of_padded_rows_knows_its_tensor() -> None:
    published = build_manifest([described("w", (4096, 4), 0)], 4096, "none")
    what = Published("none", 4096, ((published.manifest_id,),))
    publication = publication_of(what, {published.manifest_id: published.encode()})
    rows = TensorDescription("w", "uint8", (4096, 4), 0, 2**14, strides=(10, 1))
    mine = build_manifest([rows], 4096, "none", "mine")
    made = reading_for(what, publication, mine, Declaration(strides={"w": (10, 1)}))
    assert (made.region_bytes, made.nbytes, made.chunk_count) == (4095 * 10 + 4, 2**14, 4)
    assert made.places(3) == (Strip(0, 3 * 1024 * 10, 0, 0, 1, ((1024, 10),), 4),)
    assert {made.tensors_in(chunk) for chunk in range(4)} == {("w",)}


def test_padding_is_in_no_chunk() -> None:
    _, resharded = made()
    assert resharded.sizes == (100, 4096, 4096)
    assert [resharded.places(chunk) for chunk in range(3)] == [
        (straight(0, 0, 100),),
        (straight(1, 0, 4096),),
        (straight(1, 4096, 4096),),
    ]
    assert [resharded.tensors_in(chunk) for chunk in range(3)] == [("padded",), ("columns",), ("columns",)]
    (part,) = resharded.parts
    assert part.selection.chunks == (
        (straight(1, 0, 100),),
        (Strip(0, 2, 0, 0, 1, ((2048, 4),), 2),),
        (Strip(0, 8194, 0, 0, 1, ((2048, 4),), 2),),
    )
