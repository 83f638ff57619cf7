"""From what travels to what is read: parts make a publication, and a rank's manifest and sources
make its reading of it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from math import prod
from random import Random

import pytest
from hypothesis import given, settings, strategies as st

from tensorhub.errors import ManifestMismatch, ProtocolError, RegistrationError
from tensorhub.layouts import (
    Declaration,
    Published,
    ReshardedManifest,
    Sharding,
    at,
    coordinates_of,
    parts_of,
    publication_of,
    reading_for,
    source,
)
from tensorhub.layouts.sharding import Cut, cut
from tensorhub.model.manifest import Digest, Manifest, TensorDescription, build_manifest
from tensorhub.model.strips import Strip, straight
from tests.layouts.worlds import entries, world

Shapes = Mapping[str, tuple[int, ...]]

WHOLE: Shapes = {"a": (12, 4), "b": (6, 2), "norm": (4,)}


def manifest_of(shapes: Shapes, at_address: Mapping[str, int] | None = None) -> Manifest:
    addresses = {name: 4096 * number for number, name in enumerate(shapes)} | dict(at_address or {})
    described = [
        TensorDescription(name, "uint8", its, addresses[name], prod(its))
        for name, its in shapes.items()
    ]
    return build_manifest(described, 4096, "xxh3-64", "some")


def by_rows(
    rank: int, ranks: int, shapes: Shapes = WHOLE
) -> tuple[Manifest, dict[str, Sharding | None]]:
    shardings = {name: cut(shape, [Cut(0, ranks, rank)]) for name, shape in shapes.items()}
    parts = {
        name: tuple(sum(run.size for run in runs) for runs in its.runs)
        for name, its in shardings.items()
    }
    return manifest_of(parts), dict(shardings)


def published_by_rows(ranks: int) -> tuple[Published, dict[str, bytes]]:
    parts: dict[str, bytes] = {}
    shards = []
    for rank in range(ranks):
        manifest, shardings = by_rows(rank, ranks)
        its = parts_of(coordinates_of(manifest, Declaration(rank, ranks, shardings)))
        shards.append(tuple(its))
        parts |= its
    return Published("xxh3-64", 4096, tuple(shards)), parts


def published_plain(ranks: int) -> tuple[Published, dict[str, bytes]]:
    manifest = manifest_of(WHOLE)
    return Published("sha-256", 4096, ((manifest.manifest_id,),) * ranks), {
        manifest.manifest_id: manifest.encode()
    }


# --------------------------------------------------------------------------------------------------
# a publication


@settings(max_examples=30)
@given(st.randoms(use_true_random=False))
def test_a_publication_is_what_its_parts_say(random: Random) -> None:
    made = world(random).publication
    parts: dict[str, bytes] = {}
    shards = []
    for rank in made.ranks:
        its = parts_of(rank)
        shards.append(tuple(its))
        parts |= its
    published = Published.decode(Published("none", 4096, tuple(shards)).encode())
    again = publication_of(published, parts)
    assert again == made
    assert [each.ranks for each in again.classes] == [each.ranks for each in made.classes]


def test_several_ranks_of_plain_tensors_have_each_their_own() -> None:
    publication = publication_of(*published_plain(2))
    assert [
        {(piece.kind.ranks, piece.box[0].start) for piece in rank.pieces()}
        for rank in publication.ranks
    ] == [
        {(2, 0)},
        {(2, 1)},
    ]


def test_parts_that_are_missing_or_others_are_refused() -> None:
    published, parts = published_by_rows(2)
    for part_id in parts:
        with pytest.raises(ProtocolError, match=f"part {part_id} is missing"):
            publication_of(published, {key: blob for key, blob in parts.items() if key != part_id})
        with pytest.raises(ProtocolError, match="not what its id names"):
            publication_of(published, parts | {part_id: b"other"})


def test_an_arrangement_of_another_catalogue_is_refused() -> None:
    published, parts = published_by_rows(2)
    other = parts_of(coordinates_of(manifest_of({"z": (2,)}), Declaration()))
    (catalogue, *_), (_, arrangement, coordinates) = tuple(other), published.shards[0]
    shards = ((catalogue, arrangement, coordinates), published.shards[1])
    with pytest.raises(ProtocolError, match="another catalogue"):
        publication_of(Published("xxh3-64", 4096, shards), parts | other)
    with pytest.raises(ProtocolError, match="another catalogue"):
        publication_of(Published("xxh3-64", 4096, shards[::-1]), parts | other)


def test_ranks_that_do_not_make_one_version_are_refused() -> None:
    published, parts = published_by_rows(3)
    with pytest.raises(ManifestMismatch, match="is held by no rank"):
        publication_of(Published("xxh3-64", 4096, published.shards[:2]), parts)


# --------------------------------------------------------------------------------------------------
# a reading


def read(
    published: tuple[Published, dict[str, bytes]],
    shapes: Shapes,
    sources: Mapping[str, object] | None = None,
    **declared: int,
) -> Sequence[int]:
    """By shard, the bytes that are read of it."""
    publication = publication_of(*published)
    rank, world_size = declared.get("rank", 0), declared.get("world_size", 1)
    declaration = Declaration(
        rank, world_size, {}, entries(sources or {}), bool(declared.get("partial"))
    )
    made = reading_for(published[0], publication, manifest_of(shapes), declaration)
    assert made.digest == published[0].digest
    assert made.nbytes == sum(part.selection.nbytes for part in made.parts)
    needs = {part.shard: part.selection.nbytes for part in made.parts}
    return [needs.get(shard, 0) for shard in range(len(published[0].shards))]


def test_the_regions_are_those_of_the_manifest_and_the_numbers_follow_from_it() -> None:
    published, parts = published_by_rows(2)
    publication = publication_of(published, parts)
    manifest = manifest_of({name: WHOLE[name] for name in reversed(list(WHOLE))})
    made = reading_for(published, publication, manifest, Declaration())
    again = reading_for(published, publication, Manifest.decode(manifest.encode()), Declaration())
    assert made == again
    assert made.grid_id == again.grid_id
    assert made.regions == manifest.regions
    assert made.tensors_in(0) == ("norm", "b", "a")
    other = reading_for(published, publication, manifest_of(WHOLE), Declaration())
    assert other.grid_id != made.grid_id
    assert (
        reading_for(published, publication, manifest, Declaration(rank=1, world_size=1)).grid_id
        != made.grid_id
    )


def test_rank_local_tensors_are_refused_to_another_layout_with_advice() -> None:
    with pytest.raises(ManifestMismatch) as caught:
        read(published_plain(2), WHOLE)
    advice = (
        "only the same rank of an equal layout can read it: let the source say what its "
        "tensors hold, with sources="
    )
    assert [advice in difference for difference in caught.value.differences] == [True] * 3
    with pytest.raises(ManifestMismatch, match="say so with sources="):
        read(published_by_rows(2), WHOLE, rank=0, world_size=2)
    with pytest.raises(
        ManifestMismatch, match="'a' is a plain tensor, local to each of the source's ranks"
    ) as caught:
        read(published_plain(2), {"a": WHOLE["a"]}, {"a": source("a")[0:12]}, rank=0, world_size=2)
    assert "The source has" not in str(caught.value)


def test_everything_that_is_wrong_is_said_at_once() -> None:
    shapes: Shapes = {"a": (12, 3), "mine": (6, 2), "norm": (2,), "z": (1,)}
    sources = {"mine": source("a")[0:7, 0:2], "norm": source("norm")[0:9]}
    with pytest.raises(ManifestMismatch, match="The source has 'a', ") as caught:
        read(published_by_rows(2), shapes, sources)
    assert [difference[:61] for difference in caught.value.differences] == [
        "sources of 'mine': source('a')[0:7, 0:2] has shape (7, 2), an",
        "sources of 'norm': source('norm')[0:9]: slice 0:9 is not with",
        "tensor 'a' is uint8 (12, 4) at the source and uint8 (12, 3) a",
        "tensor 'z' is unknown to the source",
        "tensor 'b' (12 bytes) is read by no rank of the group",
    ]


def test_a_rank_alone_reads_everything_unless_it_may_leave_some() -> None:
    shapes: Shapes = {"a": (12, 4), "norm": (4,)}
    with pytest.raises(
        ManifestMismatch, match=r"tensor 'b' \(12 bytes\) is read by no rank"
    ) as caught:
        read(published_by_rows(2), shapes)
    assert "partial=True" in str(caught.value)
    assert read(published_by_rows(2), shapes, partial=True) == [26, 26]
    half = {"a": (6, 4), "b": (6, 2), "norm": (4,)}
    with pytest.raises(ManifestMismatch, match="6:12, 0:4"):
        read(published_by_rows(2), half, {"a": source("a")[0:6]})
    assert read(published_by_rows(2), half, {"a": source("a")[0:6]}, partial=True) == [32, 8]


def test_ties_at_the_reader_only_are_refused() -> None:
    published, parts = published_by_rows(1)
    tied = manifest_of(
        {"a": (12, 4), "b": (6, 2), "norm": (4,), "more": (6, 2)}, at_address={"more": 4096}
    )
    sources = {"more": source("a")[0:6, 0:2]}
    with pytest.raises(ManifestMismatch, match="share memory at the reader only"):
        reading_for(
            published, publication_of(published, parts), tied, Declaration(sources=entries(sources))
        )


def test_a_publisher_says_all_shapes() -> None:
    with pytest.raises(RegistrationError, match=r"source\('a', shape=...\)"):
        coordinates_of(
            manifest_of({"a": (2, 4)}), Declaration(sources=entries({"a": source("a")[0:2]}))
        )


# ------------------------------------------------------------------------------------------------
# its manifest


def resharded(
    chunk_bytes: int,
    digest: Digest,
    published: Shapes,
    mine: Sequence[TensorDescription],
    declared: Declaration,
) -> tuple[Manifest, ReshardedManifest]:
    """The manifest of a reader's memory, and what it reads of these plain tensors of a rank
    alone.
    """
    theirs = replace(
        manifest_of(published, {name: 2**20 * n for n, name in enumerate(published)}), digest=digest
    )
    what = Published(digest, chunk_bytes, ((theirs.manifest_id,),))
    publication = publication_of(what, {theirs.manifest_id: theirs.encode()})
    manifest = build_manifest(mine, 8192, "none", "mine")
    return manifest, reading_for(what, publication, manifest, declared)


def test_a_resharded_manifest_has_the_readers_memory_and_the_publishers_digests_and_no_padding() -> (
    None
):
    sources = {"padded": [(at[0:100], source("v"))], "columns": source("w")[:, 2:4]}
    mine = [
        TensorDescription("padded", "uint8", (128,), 0, 128),
        TensorDescription("columns", "uint8", (4096, 2), 2**20, 8192),
    ]
    shapes: Shapes = {"w": (4096, 4), "v": (100,)}
    plain, made = resharded(
        4096, "sha-256", shapes, mine, Declaration(0, 2, sources=entries(sources))
    )
    assert (made.tensors, made.regions) == (plain.tensors, plain.regions)
    assert (made.digest, made.chunk_bytes, made.layout_id) == ("sha-256", 4096, "mine")
    assert made.grid_id not in (plain.grid_id, made.manifest_id)
    with pytest.raises(TypeError, match="use `places`"):
        _ = made.chunks
    assert (made.sizes, made.chunk_count, made.nbytes) == ((100, 4096, 4096), 3, 100 + 2 * 4096)
    places = [straight(0, 0, 100), straight(1, 0, 4096), straight(1, 4096, 4096)]
    assert [made.places(chunk) for chunk in range(3)] == [(place,) for place in places]
    assert [made.tensors_in(chunk) for chunk in range(3)] == [
        ("padded",),
        ("columns",),
        ("columns",),
    ]
    (part,) = made.parts
    assert part.selection.chunks == (
        (straight(1, 0, 100),),
        (Strip(0, 2, 0, 0, 1, ((2048, 4),), 2),),
        (Strip(0, 8194, 0, 0, 1, ((2048, 4),), 2),),
    )


def test_a_chunk_of_padded_rows_knows_its_tensor() -> None:
    rows = TensorDescription("w", "uint8", (4096, 4), 0, 2**14, strides=(10, 1))
    _, made = resharded(4096, "none", {"w": (4096, 4)}, [rows], Declaration(strides={"w": (10, 1)}))
    assert (made.region_bytes, made.nbytes, made.chunk_count) == (4095 * 10 + 4, 2**14, 4)
    assert made.places(3) == (Strip(0, 3 * 1024 * 10, 0, 0, 1, ((1024, 10),), 4),)
    assert {made.tensors_in(chunk) for chunk in range(4)} == {("w",)}
