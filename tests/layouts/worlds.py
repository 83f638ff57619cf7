"""Random trainers and readers in memory, and what a reader must end up with by gathering and
slicing with numpy.

A world has a few global tensors, the ranks of a group that publish them, and one reader. Each rank
has regions of bytes, with gaps of a value of their own.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import product
from math import prod
from random import Random
from typing import Any

import numpy as np

from tensorhub.errors import RegistrationError
from tensorhub.layouts import (
    Coordinates,
    Declaration,
    Piece,
    Publication,
    arrange,
    at,
    pieces,
    source,
)
from tensorhub.layouts.sharding import Cut, Sharding, cut
from tensorhub.layouts.views import Entry, Sources, View, entries_of
from tensorhub.model.dtypes import Quantization
from tensorhub.model.manifest import Manifest, TensorSpec

Array = np.ndarray[Any, Any]

# held as unsigned integers: only bytes are compared
DTYPES = {"uint8": 1, "float16": 2, "float32": 4}
GAP = 0xEE


@dataclass(frozen=True)
class LocalTensor:
    """A registered tensor as it lies in a rank's memory."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    region: int
    offset: int = 0
    quantization: Quantization | None = None


def entries(sources: Mapping[str, object]) -> dict[str, Entry]:
    found, faults = entries_of(sources, sources)
    assert not faults
    return found


def pieces_of(
    tensors: Sequence[LocalTensor],
    *,
    rank: int = 0,
    world_size: int = 1,
    shardings: Mapping[str, Sharding | None] | None = None,
    sources: Sources | None = None,
    shape_of: pieces.ShapeOf | None = None,
) -> list[Piece]:
    """The pieces of these tensors. RegistrationError, with every fault."""
    entries, wrong = entries_of([each.name for each in tensors], sources)
    specs = [
        TensorSpec(
            t.name,
            t.dtype,
            t.shape,
            tuple([(0, n) for n in t.shape]),
            t.region,
            t.offset,
            t.quantization,
        )
        for t in tensors
    ]
    strides = {each.name: each.strides for each in tensors}
    declared = Declaration(rank, world_size, shardings or {}, entries, strides=strides)
    found, faults = pieces.pieces_of(
        Manifest(tuple(specs), (), 4096, "none", ""), declared, shape_of
    )
    if faults or wrong:
        raise RegistrationError(
            f"{len(faults) + len(wrong)} fault(s): " + "\n  ".join([*faults.values(), *wrong])
        )
    return found


@dataclass
class Memory:
    """One rank's regions; tensors are allocated with random gaps and row pitches."""

    regions: list[bytearray] = field(default_factory=list)
    tensors: list[LocalTensor] = field(default_factory=list)

    def add(self, random: Random, name: str, dtype: str, shape: Sequence[int]) -> Array:
        """A new tensor of gap bytes, in a region of its own or behind another tensor."""
        size = DTYPES[dtype]
        strides, pitch = [], size
        for extent in reversed(shape):
            strides.append(pitch)
            pitch *= max(1, extent)
            if random.random() < 0.1:
                pitch += size * random.randrange(1, 4)
        if self.regions and random.random() < 0.2:
            region = random.randrange(len(self.regions))
            offset = -(-len(self.regions[region]) // size) * size + size * random.randrange(3)
        else:
            self.regions.append(bytearray())
            region, offset = len(self.regions) - 1, size * random.choice([0, 0, 3])
        memory = self.regions[region]
        memory += bytes([GAP]) * (offset + pitch - len(memory))
        local = LocalTensor(name, dtype, tuple(shape), tuple(reversed(strides)), region, offset)
        self.tensors.append(local)
        return self.array(local)

    def array(self, local: LocalTensor) -> Array:
        kind = np.dtype(f"u{DTYPES[local.dtype]}")
        frozen = np.frombuffer(memoryview(self.regions[local.region]), dtype=np.uint8)
        if 0 in local.shape:
            return np.empty(local.shape, kind)
        # numpy wants to see the whole extent; the last pitch may reach beyond the region's end, but
        # no element does
        return np.ndarray(
            local.shape, kind, buffer=frozen.data, offset=local.offset, strides=local.strides
        )


@dataclass
class World:
    tensors: dict[str, tuple[str, Array]]  # dtype and elements of the global tensors
    publication: Publication
    memories: list[Memory]  # of each publishing rank
    reader: Coordinates
    memory: Memory  # the reader's
    expected: list[bytes]  # of each of its regions


# --------------------------------------------------------------------------------------------------
# publishers


def tensors(random: Random) -> dict[str, tuple[str, Array]]:
    found = {}
    for number in range(random.randint(1, 4)):
        shape = [
            random.choice([1, 2, 3, 4, 5, 6, 8, 13]) for _ in range(random.choice([0, 1, 2, 2, 3]))
        ]
        dtype = random.choice(list(DTYPES))
        elements = np.frombuffer(
            random.randbytes(prod(shape) * DTYPES[dtype]), np.dtype(f"u{DTYPES[dtype]}")
        )
        found[f"t{number}"] = dtype, elements.reshape(shape)
    return found


def chunked(indices: list[int], parts: int) -> list[list[int]]:
    """As `torch.chunk`: an independent account of it."""
    each = -(-len(indices) // parts)
    return [indices[n * each : (n + 1) * each] for n in range(parts)]


@dataclass(frozen=True)
class Placed:
    """A mesh dimension of `size`: what it does with a tensor. `dimension` None: replicates."""

    size: int
    dimension: int | None
    split: int = 1

    def kept(self, indices: list[list[int]], coordinate: int) -> None:
        if self.dimension is not None:
            outer = chunked(indices[self.dimension], self.split)
            indices[self.dimension] = [
                index for part in outer for index in chunked(part, self.size)[coordinate]
            ]


def placements(random: Random, mesh: Sequence[int], dimensions: int) -> list[Placed]:
    found = []
    for size in mesh:
        dimension = random.randrange(dimensions) if dimensions and random.random() < 0.75 else None
        found.append(
            Placed(size, dimension, random.choice([1, 1, 2, 3]) if dimension is not None else 1)
        )
    return found


def mesh_rank(
    random: Random,
    memory: Memory,
    name: str,
    dtype: str,
    elements: Array,
    placed: Sequence[Placed],
    coordinate: Sequence[int],
) -> Sharding:
    """Allocates the local part and fills it, by explicit indices; what it is according to `cut`."""
    indices = [list(range(size)) for size in elements.shape]
    for each, its in zip(placed, coordinate, strict=True):
        each.kept(indices, its)
    part = elements[np.ix_(*indices)] if elements.ndim else elements
    memory.add(random, name, dtype, part.shape)[...] = part
    cuts = [
        Cut(each.dimension, each.size, its, each.split)
        for each, its in zip(placed, coordinate, strict=True)
        if each.dimension is not None
    ]
    return cut(elements.shape, cuts)


def publishers(
    random: Random, made: dict[str, tuple[str, Array]]
) -> tuple[Publication, list[Memory]]:
    mesh = random.choice([[1], [2], [3], [4], [2, 2], [3, 2], [2, 3], [1, 4], [2, 1, 2]])
    how = {name: placements(random, mesh, elements.ndim) for name, (_, elements) in made.items()}
    seed = random.random()
    ranks, memories = [], []
    for rank, coordinate in enumerate(product(*map(range, mesh))):
        alike = Random(seed)  # replicas are laid out alike, as frameworks do it
        memory = Memory()
        shardings: dict[str, Sharding] = {}
        sources: dict[str, object] = {}
        for name, (dtype, elements) in made.items():
            # by hand: what a publisher's `sources=` says
            if alike.random() < 0.2 and elements.ndim:
                _by_hand(alike, memory, sources, name, dtype, elements, rank, prod(mesh))
            else:
                shardings[name] = mesh_rank(
                    alike, memory, name, dtype, elements, how[name], coordinate
                )
        held = pieces_of(
            memory.tensors, rank=rank, world_size=prod(mesh), shardings=shardings, sources=sources
        )
        ranks.append(arrange(held))
        memories.append(memory)
    return Publication(tuple(ranks)).check(), memories


def _by_hand(
    random: Random,
    memory: Memory,
    sources: dict[str, object],
    name: str,
    dtype: str,
    elements: Array,
    rank: int,
    ranks: int,
) -> None:
    """Every `ranks`-th row, transposed in memory."""
    rows = elements[rank::ranks] if rank < elements.shape[0] else elements[:0]
    view = source(name, shape=elements.shape)
    view = view[rank::ranks] if rank < elements.shape[0] else view[0:0]
    order = list(range(elements.ndim))
    random.shuffle(order)
    part = rows.transpose(order)
    memory.add(random, f"{name}.mine", dtype, part.shape)[...] = part
    sources[f"{name}.mine"] = view.permute(*order)


# --------------------------------------------------------------------------------------------------
# readers


def some_slice(random: Random, size: int) -> slice:
    start = random.randrange(size)
    stop = random.randint(start + 1, size)
    return slice(start, stop, random.choice([1, 1, 1, 2, 3]))


def some_view(random: Random, name: str, elements: Array) -> tuple[View, Array]:
    """A view, and what it is of: the same said to numpy."""
    view, array = source(name), elements
    for _ in range(random.randrange(3)):
        if array.ndim and random.random() < 0.7:
            index: list[Any] = []
            for size in array.shape:
                if random.random() < 0.2:
                    index.append(random.randrange(-size, size))
                else:
                    index.append(some_slice(random, size) if random.random() < 0.7 else slice(None))
            if random.random() < 0.3:
                del index[random.randrange(len(index)) :]
                index.append(...)
            view, array = view[tuple(index)], array[tuple(index)]
        elif array.ndim:
            order = list(range(array.ndim))
            random.shuffle(order)
            view, array = view.permute(*order), array.transpose(order)
    return view, array


def some_entry(
    random: Random, made: dict[str, tuple[str, Array]]
) -> tuple[str, tuple[int, ...], Any, list[tuple[Any, Array]]]:
    """A dtype and a shape, an entry of `sources` for it, and which elements go to which index."""
    name = random.choice(list(made))
    dtype, elements = made[name]
    view, array = some_view(random, name, elements)
    kind = random.choice(["one", "list", "padded", "interleaved", "stacked"])
    if kind == "one" or array.ndim == 0:
        return dtype, array.shape, random.choice([view, [view]]), [(..., array)]
    if kind == "list":
        parts = [(view, array)]
        for _ in range(random.randrange(3)):
            rows = some_slice(random, array.shape[0])
            parts.append((view[rows], array[rows]))
        joined = np.concatenate([each for _, each in parts])
        return dtype, joined.shape, [each for each, _ in parts], [(..., joined)]
    if kind == "padded":
        shape = tuple(size + random.randrange(3) for size in array.shape)
        begin = [
            random.randint(0, size - its) for size, its in zip(shape, array.shape, strict=True)
        ]
        place = tuple(
            slice(start, start + its) for start, its in zip(begin, array.shape, strict=True)
        )
        return dtype, shape, [(at[place], view)], [(place, array)]
    if kind == "interleaved":
        step = random.choice([2, 3])
        shape = (array.shape[0] * step, *array.shape[1:])
        pairs, goes = [], []
        for phase in random.sample(range(step), random.randint(1, step)):
            rows = slice(phase, shape[0], step)
            pairs.append((at[rows], view))
            goes.append((rows, array))
        return dtype, shape, pairs, goes
    shape = (3, *array.shape)
    numbers = random.sample(range(3), random.randint(1, 3))
    return dtype, shape, [(at[n], view) for n in numbers], [(n, array) for n in numbers]


def readers(
    random: Random, made: dict[str, tuple[str, Array]], publication: Publication
) -> tuple[Coordinates, Memory, list[bytes]]:
    memory, sources, shardings, written = Memory(), {}, {}, []
    mesh = random.choice([[1], [2], [4], [2, 2]])
    coordinate = [random.randrange(size) for size in mesh]
    for name, (dtype, elements) in made.items():
        if random.random() < 0.5:
            placed = placements(random, mesh, elements.ndim)
            shardings[name] = mesh_rank(random, memory, name, dtype, elements, placed, coordinate)
            written.append((memory.tensors[-1], ..., memory.array(memory.tensors[-1]).copy()))
    for number in range(random.randrange(4)):
        dtype, shape, entry, goes = some_entry(random, made)
        memory.add(random, f"mine{number}", dtype, shape)
        sources[f"mine{number}"] = entry
        written += [(memory.tensors[-1], index, array) for index, array in goes]
    shapes = {name: elements.shape for name, (_, elements) in made.items()}
    read = pieces_of(
        memory.tensors, world_size=2, shardings=shardings, sources=sources, shape_of=shapes.get
    )
    coordinates = arrange(read, publication.catalogue)
    return coordinates, memory, _expected(memory, written)


def _expected(memory: Memory, written: Sequence[tuple[LocalTensor, Any, Array]]) -> list[bytes]:
    """The regions once these elements are at these indices; now they are blank."""
    for local in memory.tensors:
        memory.array(local)[...] = int.from_bytes(bytes([GAP]) * DTYPES[local.dtype], "little")
    blank = [bytes(region) for region in memory.regions]
    for local, index, array in written:
        memory.array(local)[index] = array
    expected = [bytes(region) for region in memory.regions]
    for region, content in zip(memory.regions, blank, strict=True):
        region[:] = content
    return expected


class Even(Random):
    """Draws the same all the time: what is allocated with it is allocated alike."""

    def random(self) -> float:
        return 0.99


def experts(random: Random) -> World:
    """Many tensors of one shape, which the ranks cut alike, or have some of each; the reader has
    them in another order, and cut otherwise, in regions of their own or stacked.
    """
    count, ranks = random.randint(2, 12), random.choice([1, 2, 3])
    shape, dtype = (random.choice([4, 6]), random.choice([4, 8])), random.choice(list(DTYPES))
    made = {}
    for number in range(count):
        elements = np.frombuffer(
            random.randbytes(prod(shape) * DTYPES[dtype]), np.dtype(f"u{DTYPES[dtype]}")
        )
        made[f"e{number}"] = dtype, elements.reshape(shape)
    names, cut_along = list(made), random.choice([0, 1, None])
    coordinates, memories = [], []
    for rank in range(ranks):
        memory, shardings = Memory(), {}
        for number, name in enumerate(names):
            if cut_along is not None or number % ranks == rank:
                placed = [Placed(ranks, cut_along)]
                shardings[name] = mesh_rank(
                    Even(), memory, name, dtype, made[name][1], placed, [rank]
                )
        coordinates.append(
            arrange(pieces_of(memory.tensors, world_size=ranks + 1, shardings=shardings))
        )
        memories.append(memory)
    publication = Publication(tuple(coordinates)).check()
    order = random.choice([names, names[::-1], names[::2], random.sample(names, count)])
    rows, columns = (some_slice(random, size) for size in shape)
    parts = {name: made[name][1][rows, columns] for name in order}
    memory, sources, written = Memory(), dict[str, object](), list[tuple[LocalTensor, Any, Array]]()
    if random.random() < 0.5:
        memory.add(Even(), "stack", dtype, (len(order), *parts[order[0]].shape))
        pairs = [(at[n], source(name)[rows, columns]) for n, name in enumerate(order)]
        sources["stack"] = random.choice([pairs, pairs[::-1]])
        written += [(memory.tensors[0], n, parts[name]) for n, name in enumerate(order)]
    else:
        for name in order:
            memory.add(Even(), f"my {name}", dtype, parts[name].shape)
            sources[f"my {name}"] = source(name)[rows, columns]
            written.append((memory.tensors[-1], ..., parts[name]))
    read = pieces_of(memory.tensors, sources=sources, shape_of=dict.fromkeys(names, shape).get)
    expected = _expected(memory, written)
    return World(
        made, publication, memories, arrange(read, publication.catalogue), memory, expected
    )


def world(random: Random) -> World:
    made = tensors(random)
    publication, memories = publishers(random, made)
    reader, memory, expected = readers(random, made, publication)
    return World(made, publication, memories, reader, memory, expected)


def wanted(world: World) -> list[bytearray]:
    """1 for each byte of the reader's regions that a piece of it covers."""
    counts = [bytearray(len(region)) for region in world.memory.regions]
    for piece in world.reader.pieces():
        for index in product(*(range(each.size) for each in piece.box)):
            at_byte = piece.offset + sum(
                n * stride for n, stride in zip(index, piece.strides, strict=True)
            )
            for byte in range(at_byte, at_byte + piece.kind.itemsize):
                counts[piece.region][byte] = 1
    return counts
