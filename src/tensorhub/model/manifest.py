"""What a version is: its tensors, the regions that hold their bytes, and the grid of chunks that is
read.

Responsible for the manifest as a value: building it from described memory, and its one encoding,
which is also its identity. Not responsible for comparing a source's with a reader's
(`compatibility`), for what a dtype is (`dtypes`), nor for where the bytes are: a region has no
address here, and each holder keeps it wherever it likes.

The publisher fixes the manifest (R8). The chunk grid follows from the manifest alone. So all
readers of the version agree on chunk numbers and digests, whatever their own settings are.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import count, pairwise, repeat
from math import prod
from operator import attrgetter
from typing import Any, Literal, NamedTuple, get_args

import msgpack

from tensorhub.errors import ProtocolError, RegistrationError, some
from tensorhub.model.dtypes import (
    INT_MAX,
    ITEMSIZE,
    ZERO_POINT_MIN,
    Quantization,
    itemsize,
    quantization_fault,
    shape_fault,
)
from tensorhub.model.strips import Strip, straight
from tensorhub.model.unpacking import unpacker

Digest = Literal["xxh3-64", "sha-256", "none"]

FORMAT = 2
ID_BYTES = 16  # see `id_of`
CHUNK_BYTES_MIN = 4096
CHUNK_BYTES_MAX = 2**30
CHUNKS_MAX = 2**24
TENSORS_MAX = 2**20
DIMENSIONS_MAX = 64  # what torch itself can iterate over
NAME_MAX = 512
ENCODED_BYTES_MAX = 48 * 2**20  # what a message can carry

# --------------------------------------------------------------------------------------------------
# values


@dataclass(frozen=True, slots=True)
class TensorDescription:
    """One registered tensor: its bytes from an address on. `dtype` is torch's name without
    "torch.".

    `strides`: bytes between neighbours of each dimension, if rows are padded; else empty, and the
    bytes are contiguous.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    address: int
    nbytes: int
    quantization: Quantization | None = None
    strides: tuple[int, ...] = ()

    @property
    def extent(self) -> int:
        """Bytes from its first one to its last one, with all padding between them."""
        if not self.strides or not self.nbytes:
            return self.nbytes
        apart = [(size - 1) * stride for size, stride in zip(self.shape, self.strides, strict=True)]
        return sum(apart) + itemsize(self.dtype)


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """One tensor of a version: the part of it that this shard holds, and where in which region its
    bytes are.

    `slices`: (start, stop) per dimension of `global_shape`. `quantization`: where the dtype is one
    of `QUANTIZED`.
    """

    name: str
    dtype: str
    global_shape: tuple[int, ...]
    slices: tuple[tuple[int, int], ...]
    region: int
    offset: int
    quantization: Quantization | None = None

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the part that this shard holds."""
        return tuple([stop - start for start, stop in self.slices])

    @property
    def nbytes(self) -> int:
        return prod(self.shape) * itemsize(self.dtype)

    @property
    def row_bytes(self) -> int:
        """Bytes of one index of the first dimension; a tensor without dimensions is one row."""
        return prod(self.shape[1:]) * itemsize(self.dtype)


@dataclass(frozen=True, slots=True)
class RegionSpec:
    """One contiguous run of bytes, equal at every holder."""

    nbytes: int


@dataclass(frozen=True, slots=True)
class Chunk:
    """The unit of transfer: `nbytes` of region `region`, from `offset` on."""

    index: int
    region: int
    offset: int
    nbytes: int


class _Grid(NamedTuple):
    """How a region is cut: `step` bytes apart, and anew every `period` bytes; period divides
    nbytes.
    """

    nbytes: int
    period: int
    step: int

    @property
    def chunk_count(self) -> int:
        return self.nbytes // self.period * -(-self.period // self.step)

    def cuts(self) -> Iterator[tuple[range, list[int]]]:
        """The chunks' offsets and sizes, one period at a time."""
        pieces = -(-self.period // self.step)
        sizes = [self.step] * (pieces - 1) + [self.period - (pieces - 1) * self.step]
        for start in range(0, self.nbytes, self.period):
            yield range(start, start + self.period, self.step), sizes


@dataclass(frozen=True)
class Manifest:
    """One shard of a version. `layout_id` names how the model is cut into shards.

    `metadata` is the publisher's, and opaque here: of a version that was published from files, what
    they were.
    """

    tensors: tuple[TensorSpec, ...]
    regions: tuple[RegionSpec, ...]
    chunk_bytes: int
    digest: Digest
    layout_id: str
    metadata: bytes = b""

    @cached_property
    def region_bytes(self) -> int:
        """Bytes of all regions: what memory of its own for them takes. Tied tensors count once."""
        return sum(region.nbytes for region in self.regions)

    @cached_property
    def nbytes(self) -> int:
        """What a whole read moves: all of it, as long as chunks are the regions'."""
        return self.region_bytes

    @cached_property
    def by_region(self) -> tuple[tuple[TensorSpec, ...], ...]:
        """The tensors of each region, in the order of `tensors`."""
        found: list[list[TensorSpec]] = [[] for _ in self.regions]
        for tensor in self.tensors:
            found[tensor.region].append(tensor)
        return tuple(map(tuple, found))

    @cached_property
    def chunk_count(self) -> int:
        """len(chunks), without making them."""
        return sum(grid.chunk_count for _, grid in self._grids())

    @cached_property
    def chunks(self) -> tuple[Chunk, ...]:
        """Every byte of every region exactly once, in order.

        A region of one tensor is cut at rows of the tensor's first dimension, as many as fit
        `chunk_bytes`; a longer row is cut into pieces, anew in each row. So every row begins a
        chunk or lies within one, and a reader of another layout can verify what it reads.
        """
        made: list[Chunk] = []
        for region, grid in self._grids():
            for offsets, sizes in grid.cuts():
                made.extend(map(Chunk, count(len(made)), repeat(region), offsets, sizes))
        return tuple(made)

    @cached_property
    def sizes(self) -> tuple[int, ...]:
        """The bytes of each chunk."""
        return tuple([chunk.nbytes for chunk in self.chunks])

    def places(self, chunk: int) -> tuple[Strip, ...]:
        """Where this chunk's bytes are in the regions, in their order."""
        place = self.chunks[chunk]
        return (straight(place.region, place.offset, place.nbytes),)

    @property
    def grid_id(self) -> str:
        """Names the grid: manifests with equal grid ids number their chunks alike."""
        return self.manifest_id

    def tensors_in(self, chunk: int) -> tuple[str, ...]:
        """The names of the tensors that have bytes in this chunk."""
        place = self.chunks[chunk]
        end = place.offset + place.nbytes
        there = (
            t
            for t in self.by_region[place.region]
            if t.offset < end and place.offset < t.offset + t.nbytes
        )
        return tuple(tensor.name for tensor in there)

    def _grids(self) -> Iterator[tuple[int, _Grid]]:
        for index, (region, tensors) in enumerate(zip(self.regions, self.by_region, strict=True)):
            if region.nbytes:
                yield index, _grid(region.nbytes, tensors, self.chunk_bytes)

    @cached_property
    def _encoded(self) -> bytes:
        return _encode(self)

    def encode(self) -> bytes:
        """The canonical encoding of this manifest: equal manifests have equal bytes."""
        return self._encoded

    @cached_property
    def manifest_id(self) -> str:
        """32 hex digits that name the encoding."""
        return id_of(self._encoded)

    @classmethod
    def decode(cls, blob: bytes) -> Manifest:
        """The manifest that `blob` encodes; ProtocolError, naming the fault, for anything else."""
        manifest = _decode(blob)
        if fault := _fault(manifest):
            raise ProtocolError(f"bad manifest: {fault}")
        if manifest.encode() != blob:
            raise ProtocolError("bad manifest: this is not the one encoding of what it says")
        return manifest


def id_of(encoded: bytes) -> str:
    """32 hex digits that name the manifest of this encoding."""
    return hashlib.blake2b(encoded, digest_size=ID_BYTES).hexdigest()


def _grid(nbytes: int, tensors: tuple[TensorSpec, ...], chunk_bytes: int) -> _Grid:
    if len(tensors) == 1 and tensors[0].nbytes == nbytes:
        row_bytes = tensors[0].row_bytes
        if row_bytes > chunk_bytes:
            return _Grid(nbytes, row_bytes, chunk_bytes)
        return _Grid(nbytes, nbytes, chunk_bytes - chunk_bytes % row_bytes)
    return _Grid(nbytes, nbytes, chunk_bytes)


# --------------------------------------------------------------------------------------------------
# building


def build_manifest(
    tensors: Iterable[TensorDescription],
    chunk_bytes: int,
    digest: Digest,
    layout_id: str = "",
    metadata: bytes = b"",
) -> Manifest:
    """The manifest of registered memory; tied tensors share a region, so their bytes are sent once.
    The region of a tensor with padded rows includes the padding.

    RegistrationError, naming both tensors, where bytes are shared in part; and for memory that no
    manifest can describe.
    """
    regions: list[TensorDescription] = []  # the first tensor of each
    region_of: dict[tuple[int, int, tuple[int, ...]], int] = {}
    specs: list[TensorSpec] = []
    for tensor in tensors:
        place = (tensor.address, tensor.nbytes, tensor.strides)
        region = region_of.get(place) if tensor.nbytes else None
        if region is None:
            region = region_of[place] = len(regions)
            regions.append(tensor)
        if (
            tensor.dtype in ITEMSIZE
            and prod(tensor.shape) * ITEMSIZE[tensor.dtype] != tensor.nbytes
        ):
            what = f"{tensor.dtype} {tensor.shape} is not {tensor.nbytes} bytes"
            raise RegistrationError(f"tensor {tensor.name!r}: {what}")
        slices = tuple([(0, size) for size in tensor.shape])
        specs.append(
            TensorSpec(
                tensor.name, tensor.dtype, tensor.shape, slices, region, 0, tensor.quantization
            )
        )
    _refuse_overlaps(regions)
    sizes = tuple([RegionSpec(first.extent) for first in regions])
    manifest = Manifest(tuple(specs), sizes, chunk_bytes, digest, layout_id, metadata)
    if fault := _fault(manifest):
        raise RegistrationError(f"these tensors cannot be one shard: {fault}")
    if len(manifest.encode()) > ENCODED_BYTES_MAX:
        raise RegistrationError(
            f"these tensors take more than {ENCODED_BYTES_MAX} bytes to describe"
        )
    return manifest


def _refuse_overlaps(regions: list[TensorDescription]) -> None:
    overlaps = []
    last: TensorDescription | None = None  # its region ends last of the regions so far
    for region in sorted((r for r in regions if r.nbytes), key=attrgetter("address")):
        if last is not None and region.address < last.address + last.extent:
            overlaps.append(f"{last.name!r} and {region.name!r}")
        if last is None or region.address + region.extent > last.address + last.extent:
            last = region
    if overlaps:
        raise RegistrationError(
            f"tensors overlap without being the same bytes: {some(overlaps, ', ')}. "
            "Register the larger one alone, or copy one of the two (`.clone()`). Of columns of one "
            "tensor, register that "
            "one, and say with sources= what is where in it (`tensorhub.at[:, 0:512]`)."
        )


# --------------------------------------------------------------------------------------------------
# encoding
#  One flat array: [FORMAT, digest, chunk_bytes, layout_id, metadata, dtypes, all names in one
# string, columns of 64-bit numbers]. Columns rather than an array per tensor, because msgpack then
# needs no long arrays: a hostile blob that nests empty promises of long arrays would make its
# decoder allocate gigabytes.

_PER_TENSOR = ("name lengths", "dtypes", "dimensions", "region", "offset")
_PER_DIMENSION = ("shape", "start", "stop")
# which tensors, the scales' bits, the zero points from the least on
_PER_QUANTIZED = ("quantized", "scale", "zero point")
_COLUMNS = ("regions", *_PER_TENSOR, *_PER_DIMENSION, *_PER_QUANTIZED)
_COLUMNS_AT = 7
_DTYPES_MAX = 64
_KINDS = (int, str, int, str, bytes, list, str, *repeat(bytes, len(_COLUMNS)))


def _bits(scale: float) -> int:
    bits: int = struct.unpack("<Q", struct.pack("<d", scale))[0]
    return bits


def _scale(bits: int) -> float:
    scale: float = struct.unpack("<d", struct.pack("<Q", bits))[0]
    return scale


def _pack(column: list[int]) -> bytes:
    return struct.pack(f"<{len(column)}Q", *column)


def _encode(manifest: Manifest) -> bytes:
    tensors = manifest.tensors
    dtypes = {
        name: index for index, name in enumerate(dict.fromkeys(tensor.dtype for tensor in tensors))
    }
    quantized = [
        (index, *tensor.quantization)
        for index, tensor in enumerate(tensors)
        if tensor.quantization is not None
    ]
    columns = (
        [region.nbytes for region in manifest.regions],
        [len(tensor.name) for tensor in tensors],
        [dtypes[tensor.dtype] for tensor in tensors],
        [len(tensor.global_shape) for tensor in tensors],
        [tensor.region for tensor in tensors],
        [tensor.offset for tensor in tensors],
        [size for tensor in tensors for size in tensor.global_shape],
        [start for tensor in tensors for start, _ in tensor.slices],
        [stop for tensor in tensors for _, stop in tensor.slices],
        [index for index, _, _ in quantized],
        [_bits(scale) for _, scale, _ in quantized],
        [zero_point - ZERO_POINT_MIN for _, _, zero_point in quantized],
    )
    names = "".join([tensor.name for tensor in tensors])
    head = [
        FORMAT,
        manifest.digest,
        manifest.chunk_bytes,
        manifest.layout_id,
        manifest.metadata,
        list(dtypes),
        names,
    ]
    encoded: bytes = msgpack.packb([*head, *map(_pack, columns)])
    return encoded


def _decode(blob: bytes) -> Manifest:
    """What `blob` says, with every type and count checked, and not yet what it means."""
    _expect(len(blob) <= ENCODED_BYTES_MAX, f"longer than {ENCODED_BYTES_MAX} bytes")
    try:
        parts = _parts(blob)
    except (ValueError, TypeError, msgpack.UnpackException) as error:
        raise ProtocolError(
            f"bad manifest: not msgpack ({type(error).__name__}: {error})"
        ) from None
    _, digest, chunk_bytes, layout_id, metadata, dtypes, names = parts[:_COLUMNS_AT]
    _expect(all(type(dtype) is str for dtype in dtypes), "a dtype is not a string")
    columns = [
        _unpack(what, data) for what, data in zip(_COLUMNS, parts[_COLUMNS_AT:], strict=True)
    ]
    regions, *per_tensor, sizes, starts, stops, quantized, scales, zero_points = columns
    _expect(
        len({len(column) for column in per_tensor}) == 1, "the columns tell of different tensors"
    )
    lengths, dtype_of, dimensions, *_ = per_tensor
    _expect(max(len(lengths), len(regions)) <= TENSORS_MAX, f"more than {TENSORS_MAX} tensors")
    _expect(sum(lengths) == len(names), "the names' lengths do not add up")
    _expect(
        sum(dimensions) == len(sizes) == len(starts) == len(stops), "the dimensions do not add up"
    )
    _expect(max(dtype_of, default=-1) < len(dtypes), "a tensor's dtype is not listed")
    _expect(
        len(quantized) == len(scales) == len(zero_points) <= len(lengths),
        "the quantizations do not add up",
    )
    points = [each + ZERO_POINT_MIN for each in zero_points]
    quantizations = dict(zip(quantized, zip(map(_scale, scales), points, strict=True), strict=True))
    slices = tuple(zip(starts, stops, strict=True))
    at, dimension = 0, 0  # where the next tensor's name and sizes begin
    tensors: list[TensorSpec] = []
    for length, dtype, rank, region, offset in zip(*per_tensor, strict=True):
        name, its = names[at : at + length], slice(dimension, dimension + rank)
        quantization = quantizations.get(len(tensors))
        tensors.append(
            TensorSpec(name, dtypes[dtype], sizes[its], slices[its], region, offset, quantization)
        )
        at, dimension = at + length, dimension + rank
    return Manifest(
        tuple(tensors), tuple(map(RegionSpec, regions)), chunk_bytes, digest, layout_id, metadata
    )


def _parts(blob: bytes) -> list[Any]:
    """What `blob` says, part by part, each of its type: nothing is made of lists within lists,
    which would cost many times the bytes that say them.
    """
    parts = unpacker(blob)
    length = parts.read_array_header()
    found: list[Any] = [parts.unpack() if length else None]
    _expect(type(found[0]) is int, "not a manifest")
    _expect(found[0] == FORMAT, f"format {found[0]} is unknown to this version of TensorHub")
    _expect(length == len(_KINDS), "parts are missing")
    for kind in _KINDS[1:]:
        found.append(_dtypes(parts) if kind is list else parts.unpack())
        _expect(isinstance(found[-1], kind), "parts are of wrong types")
    _expect(parts.tell() == len(blob), "there are bytes after its end")
    return found


def _dtypes(parts: Any) -> list[Any]:
    length = parts.read_array_header()
    _expect(length <= _DTYPES_MAX, f"more than {_DTYPES_MAX} dtypes")
    return [parts.unpack() for _ in range(length)]


def _unpack(what: str, data: bytes) -> tuple[int, ...]:
    _expect(len(data) % 8 == 0, f"column {what!r} is not whole numbers")
    column = struct.unpack(f"<{len(data) // 8}Q", data)
    _expect(max(column, default=0) <= INT_MAX, f"column {what!r} has a number above 2**63 - 1")
    return column


def _expect(holds: bool, otherwise: str) -> None:
    if not holds:
        raise ProtocolError(f"bad manifest: {otherwise}")


# --------------------------------------------------------------------------------------------------
# checking


def _fault(manifest: Manifest) -> str | None:
    """The first thing that makes this no manifest, whether it was built here or came from a
    socket.
    """
    if manifest.digest not in get_args(Digest):
        return (
            f"digest {manifest.digest[:64]!r} is unknown; known are {', '.join(get_args(Digest))}"
        )
    size = manifest.chunk_bytes
    if type(size) is not int or not CHUNK_BYTES_MIN <= size <= CHUNK_BYTES_MAX:
        return f"chunk_bytes {size!r} is not within {CHUNK_BYTES_MIN} to {CHUNK_BYTES_MAX}"
    if len(manifest.layout_id) > NAME_MAX:
        return f"the layout id has more than {NAME_MAX} characters"
    if len(manifest.tensors) > TENSORS_MAX:
        return f"there are more than {TENSORS_MAX} tensors"
    if manifest.nbytes > INT_MAX:
        return "the regions hold 2**63 bytes or more"
    names = set()
    for tensor in manifest.tensors:
        if fault := _tensor_fault(tensor, manifest.regions):
            return f"tensor {tensor.name[:NAME_MAX]!r}: {fault}"
        if tensor.name in names:
            return f"tensor {tensor.name!r} is there twice"
        names.add(tensor.name)
    if fault := _region_fault(manifest):
        return fault
    if manifest.chunk_count > CHUNKS_MAX:
        return (
            f"{manifest.chunk_count} chunks are more than {CHUNKS_MAX}; a larger chunk_bytes "
            f"makes fewer"
        )
    return None


def name_fault(name: object) -> str | None:
    """Why this cannot name a tensor; None if it can."""
    if not isinstance(name, str) or not 0 < len(name) <= NAME_MAX:
        return f"a name is a string of 1 to {NAME_MAX} characters"
    if not name.isascii() and any("\ud800" <= character <= "\udfff" for character in name):
        return "the name holds half a character (a lone surrogate), which UTF-8 cannot carry"
    return None


def _tensor_fault(tensor: TensorSpec, regions: tuple[RegionSpec, ...]) -> str | None:
    if fault := name_fault(tensor.name):
        return fault
    if tensor.dtype not in ITEMSIZE:
        return f"dtype {tensor.dtype[:64]!r} is unknown to this version of TensorHub"
    if fault := quantization_fault(tensor.dtype, tensor.quantization):
        return fault
    if len(tensor.global_shape) > DIMENSIONS_MAX:
        return f"{len(tensor.global_shape)} dimensions are more than {DIMENSIONS_MAX}"
    for size, (start, stop) in zip(tensor.global_shape, tensor.slices, strict=True):
        if not 0 <= start <= stop <= size <= INT_MAX:
            return f"the slice {start}:{stop} is not within 0:{size}, or that is 2**63 or more"
    if fault := shape_fault(tensor.shape, tensor.dtype):
        return fault
    if not 0 <= tensor.region < len(regions):
        return f"there is no region {tensor.region}"
    if tensor.offset + tensor.nbytes > regions[tensor.region].nbytes:
        return f"it ends beyond its region of {regions[tensor.region].nbytes} bytes"
    return None


def _region_fault(manifest: Manifest) -> str | None:
    """Two tensors of one region share all bytes or none: with partial overlaps, aliasing would be
    no equivalence.
    """
    for index, tensors in enumerate(manifest.by_region):
        if not tensors:
            return f"region {index} holds no tensor"
        if len(tensors) == 1:
            continue
        spans = sorted({(tensor.offset, tensor.nbytes) for tensor in tensors if tensor.nbytes})
        if any(at + nbytes > after for (at, nbytes), (after, _) in pairwise(spans)):
            return f"tensors of region {index} overlap without being the same bytes"
    return None
