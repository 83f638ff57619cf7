"""What a version is: the chunk grid, the one encoding, the comparison, and what cannot be a
manifest.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from math import prod

import msgpack
import pytest
from hypothesis import example, given, strategies as st

from tensorhub.errors import ProtocolError, RegistrationError
from tensorhub.model.digests import WIDTHS, head_of, pack, unpack, width_in
from tensorhub.model.dtypes import ZERO_POINT_MAX, ZERO_POINT_MIN, itemsize
from tensorhub.model.manifest import (
    CHUNKS_MAX,
    ENCODED_BYTES_MAX,
    Chunk,
    Manifest,
    RegionSpec,
    TensorDescription,
    TensorSpec,
    build_manifest,
)

KIB, GIB = 2**10, 2**30


def spec(name: str, dtype: str, *shape: int, region: int = 0, offset: int = 0) -> TensorSpec:
    return TensorSpec(name, dtype, shape, tuple((0, size) for size in shape), region, offset)


def manifest(*tensors: TensorSpec, chunk_bytes: int = 4096, layout_id: str = "") -> Manifest:
    """Each region ends with its last tensor."""
    ends: dict[int, int] = {}
    for tensor in tensors:
        ends[tensor.region] = max(ends.get(tensor.region, 0), tensor.offset + tensor.nbytes)
    regions = tuple(RegionSpec(ends[region]) for region in range(len(ends)))
    return Manifest(tensors, regions, chunk_bytes, "xxh3-64", layout_id)


def description(name: str, address: int, *shape: int, dtype: str = "float32") -> TensorDescription:
    return TensorDescription(name, dtype, shape, address, prod(shape) * itemsize(dtype))


quantizations = st.tuples(
    st.floats(0, exclude_min=True, allow_infinity=False),
    st.integers(ZERO_POINT_MIN, ZERO_POINT_MAX),
)


# --------------------------------------------------------------------------------------------------
# dtypes


def test_a_chunk_is_named_by_the_tensors_that_it_has_bytes_of() -> None:
    tensors = [
        TensorDescription(name, "uint8", (10_000,), at, 10_000)
        for name, at in (("a", 1), ("b", 2**20), ("t", 2**20))
    ]
    manifest = build_manifest(tensors, 4096, "none")
    assert [manifest.tensors_in(chunk) for chunk in range(6)] == [("a",)] * 3 + [("b", "t")] * 3


# --------------------------------------------------------------------------------------------------
# grid


def offsets(made: Manifest, region: int = 0) -> list[tuple[int, int]]:
    return [(chunk.offset, chunk.nbytes) for chunk in made.chunks if chunk.region == region]


@given(st.integers(0, 60), st.integers(0, 3 * 4096))
@example(3, 4096)
@example(3, 4097)
def test_rows_begin_chunks_or_lie_within_one(rows: int, row_bytes: int) -> None:
    made = manifest(spec("w", "uint8", rows, row_bytes))
    cuts = offsets(made)
    starts = {offset for offset, _ in cuts}
    if row_bytes > made.chunk_bytes:
        assert set(range(0, rows * row_bytes, row_bytes)) <= starts
    else:
        assert all(offset % row_bytes == 0 for offset in starts)
        whole = [nbytes for _, nbytes in cuts[:-1]]
        assert all(nbytes + row_bytes > made.chunk_bytes for nbytes in whole), (
            "another row would have fitted"
        )


def test_regions_of_several_tensors_are_cut_by_size_alone() -> None:
    tied = manifest(spec("a", "uint8", 2, 3000), spec("b", "uint8", 2, 3000))
    packed = manifest(spec("a", "uint8", 1, 3000), spec("b", "uint8", 1, 3000, offset=3000))
    assert offsets(tied) == offsets(packed) == [(0, 4096), (4096, 1904)]


def test_tensors_beyond_4_gib() -> None:
    made = manifest(spec("w", "bfloat16", 131_072, 65_536), chunk_bytes=GIB)
    assert (made.nbytes, made.chunk_count) == (16 * GIB, 16)
    assert made.chunks[-1] == Chunk(15, 0, 15 * GIB, GIB)
    one_row = manifest(spec("w", "uint8", 2, 5 * GIB + 1), chunk_bytes=GIB)
    assert offsets(one_row)[5:7] == [(5 * GIB, 1), (5 * GIB + 1, GIB)]
    assert Manifest.decode(made.encode()) == made


# --------------------------------------------------------------------------------------------------
# encoding


def test_the_encoding_is_this_one() -> None:
    """Workers of different releases compare these bytes: a change of them is a new FORMAT."""
    made = manifest(spec("a", "bfloat16", 2, 3), spec("b", "bool", region=1), layout_id="tp1")
    assert made.manifest_id == "026540cda613ca3e3defc96d4eff7851"


FAULTY: list[tuple[Manifest, str]] = [
    (manifest(spec("a", "uint8"), spec("a", "uint8", region=1)), "'a' is there twice"),
    (manifest(spec("", "uint8")), "1 to 512 characters"),
    (manifest(spec("n" * 513, "uint8")), "1 to 512 characters"),
    (manifest(spec("a", "uint8", *[1] * 65)), "65 dimensions"),
    (
        Manifest(
            (TensorSpec("a", "uint8", (2,), ((0, 3),), 0, 0),), (RegionSpec(3),), 4096, "none", ""
        ),
        "slice 0:3",
    ),
    (
        Manifest(
            (TensorSpec("a", "uint8", (2,), ((2, 1),), 0, 0),), (RegionSpec(3),), 4096, "none", ""
        ),
        "slice 2:1",
    ),
    (Manifest((spec("a", "uint8", region=1),), (RegionSpec(1),), 4096, "none", ""), "no region 1"),
    (
        Manifest((spec("a", "uint8", 2, offset=1),), (RegionSpec(2),), 4096, "none", ""),
        "beyond its region of 2",
    ),
    (
        Manifest((spec("a", "uint8", 2),), (RegionSpec(2), RegionSpec(2)), 4096, "none", ""),
        "region 1 holds no",
    ),
    (manifest(spec("a", "uint8", 2), spec("b", "uint8", 2, offset=1)), "region 0 overlap"),
    (manifest(spec("a", "uint8"), chunk_bytes=4095), "chunk_bytes 4095"),
    (manifest(spec("a", "uint8"), chunk_bytes=2**30 + 1), "chunk_bytes 1073741825"),
    (manifest(spec("a", "uint8", 4096 * CHUNKS_MAX + 1)), "16777217 chunks"),
    (
        manifest(spec("a", "uint8", 2**62), spec("b", "uint8", 2**62, region=1)),
        "2\\*\\*63 bytes or more",
    ),
    (manifest(spec("a", "uint8"), layout_id="x" * 513), "layout id"),
    (replace(manifest(spec("a", "uint8")), digest="md5"), "digest 'md5' is unknown"),  # type: ignore[arg-type]
    (
        manifest(spec("a", "qint8")),
        "a scale and a zero point belong to qint32, qint8, quint8.*this is qint8",
    ),
    (
        manifest(replace(spec("a", "uint8"), quantization=(1.0, 0))),
        "and to no other dtype .this is uint8",
    ),
    (manifest(replace(spec("a", "qint8"), quantization=(0.0, 0))), "scale 0.0 is not a positive"),
    (
        manifest(replace(spec("a", "qint8"), quantization=(float("inf"), 0))),
        "scale inf is not a positive",
    ),
    (manifest(replace(spec("a", "qint8"), quantization=(-1.0, 0))), "'scale' has a number above"),
    (
        manifest(replace(spec("a", "qint8"), quantization=(1.0, 2**31))),
        "zero point 2147483648 is not within",
    ),
]


@pytest.mark.parametrize(("made", "why"), FAULTY, ids=[why for _, why in FAULTY])
def test_a_hostile_manifest_is_refused_by_name(made: Manifest, why: str) -> None:
    with pytest.raises(ProtocolError, match=why):
        Manifest.decode(made.encode())


def test_parts_of_the_encoding_are_refused_by_name() -> None:
    good = manifest(spec("a", "uint8", 2)).encode()
    for at, part, why in [
        (0, 99, "format 99"),
        (2, True, "chunk_bytes True"),
        (4, "text", "wrong types"),
        (5, [1], "dtype is not a string"),
        (5, ["float3"], "dtype 'float3' is unknown"),
        (5, ["uint8", "uint8"], "not the one encoding"),
        (6, "ab", "lengths do not add up"),
        (7, b"1234567", "not whole numbers"),
        (7, b"\xff" * 8, "above 2\\*\\*63"),
        (8, b"", "different tensors"),
        (9, (1).to_bytes(8, "little"), "dtype is not listed"),
        (10, (2).to_bytes(8, "little"), "dimensions do not add up"),
        (16, (0).to_bytes(8, "little"), "quantizations do not add up"),
    ]:
        parts = msgpack.unpackb(good)
        parts[at] = part
        with pytest.raises(ProtocolError, match=why):
            Manifest.decode(msgpack.packb(parts))
    with pytest.raises(ProtocolError, match="bytes after its end"):
        Manifest.decode(good + b"\0")
    with pytest.raises(ProtocolError, match="longer than"):
        Manifest.decode(bytes(ENCODED_BYTES_MAX + 1))


# --------------------------------------------------------------------------------------------------
# building


def test_algorithm_and_chunk_size_are_read_from_the_beginning_alone() -> None:
    for digest, width in WIDTHS.items():
        made = replace(manifest(spec("a", "uint8", 2)), digest=digest)  # type: ignore[arg-type]
        for blob in (made.encode(), made.encode()[:64]):
            assert head_of(blob) == (digest, 4096)
            assert width_in(blob) == width


@pytest.mark.parametrize(
    "blob",
    [
        b"",
        b"nonsense",
        msgpack.packb({"format": 1}),
        msgpack.packb([1]),
        msgpack.packb([1, "md5", 4096]),
        msgpack.packb([1, ["xxh3-64"], 4096]),
        msgpack.packb([1, "xxh3-64", True]),
        msgpack.packb([1, "xxh3-64", "4096"]),
    ],
)
def test_what_is_no_manifest_has_no_digests(blob: bytes) -> None:
    assert head_of(blob) == ("none", 0)
    assert width_in(blob) == 0


@pytest.mark.parametrize("width", [8, 32])
def test_a_list_has_its_digests_one_after_another_big_endian(width: int) -> None:
    digests = [0, 258, 2 ** (8 * width) - 1]
    values = pack(digests, width)
    assert values == b"".join(
        bytes(width - 2) + b"\1\2" if d == 258 else d.to_bytes(width) for d in digests
    )
    assert unpack(values, width) == digests


def test_tied_tensors_share_a_region_and_regions_keep_their_order() -> None:
    tensors = [
        description("head", 8000, 10),
        description("empty", 0, 0),
        description("body", 1000, 5),
        description("nothing", 0, 0),
        description("embedding", 8000, 2, 5),
    ]
    made = build_manifest(tensors, 4096, "xxh3-64", "tp1")
    assert [(tensor.name, tensor.region) for tensor in made.tensors] == [
        ("head", 0), ("empty", 1), ("body", 2), ("nothing", 3), ("embedding", 0)
    ]  # fmt: skip
    assert [region.nbytes for region in made.regions] == [40, 0, 20, 0]
    assert (made.nbytes, made.layout_id) == (60, "tp1")
    assert Manifest.decode(made.encode()) == made


@given(st.lists(st.tuples(st.integers(0, 60), st.integers(0, 20)), max_size=8))
def test_only_overlaps_in_part_are_refused(places: list[tuple[int, int]]) -> None:
    tensors = [description(f"t{i}", at, size, dtype="uint8") for i, (at, size) in enumerate(places)]
    spans = sorted({place for place in places if place[1]})
    if any(at + size > after for (at, size), (after, _) in pairwise(spans)):
        with pytest.raises(RegistrationError, match="overlap"):
            build_manifest(tensors, 4096, "none")
    else:
        made = build_manifest(tensors, 4096, "none")
        assert len(made.regions) == len(spans) + sum(not size for _, size in places)


def test_an_overlap_names_both_tensors() -> None:
    whole, part = description("qkv", 1000, 30), description("q", 1040, 10)
    with pytest.raises(RegistrationError, match=r"'qkv' and 'q'.*clone"):
        build_manifest([part, whole, description("far", 1130, 3)], 4096, "none")
    with pytest.raises(RegistrationError, match="'qkv' and 'q', 'qkv' and 'v'"):
        build_manifest([whole, part, description("v", 1080, 10)], 4096, "none")


def test_what_no_manifest_can_say_is_refused_when_it_is_built() -> None:
    with pytest.raises(RegistrationError, match="'w' is there twice"):
        build_manifest([description("w", 0, 1), description("w", 100, 1)], 4096, "none")
    with pytest.raises(RegistrationError, match=r"'w': float32 .3,. is not 8 bytes"):
        build_manifest([TensorDescription("w", "float32", (3,), 0, 8)], 4096, "none")
    with pytest.raises(RegistrationError, match="dtype 'float3' is unknown"):
        build_manifest([TensorDescription("w", "float3", (3,), 0, 12)], 4096, "none")
    with pytest.raises(
        RegistrationError, match="'w': its scale 1 is not a positive, finite number"
    ):
        build_manifest([TensorDescription("w", "qint8", (3,), 0, 3, (1, 0))], 4096, "none")
    with pytest.raises(RegistrationError, match="surrogate"):
        build_manifest([description("\ud800", 0, 1)], 4096, "none")
    with pytest.raises(RegistrationError, match="a larger chunk_bytes makes fewer"):
        build_manifest([description("w", 0, 2**40)], 4096, "none")
    with pytest.raises(RegistrationError, match="chunk_bytes 1 is not"):
        build_manifest([description("w", 0, 1)], 1, "none")


def test_too_much_to_describe_is_refused_when_it_is_built(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tensorhub.model.manifest.ENCODED_BYTES_MAX", 100)
    with pytest.raises(RegistrationError, match="more than 100 bytes to describe"):
        build_manifest([description("w", 0, 1)], 4096, "none")
