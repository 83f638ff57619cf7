"""Bundles: two ranks that have one of the same id have the same bytes in chunk after chunk of it, however each of them lays
them out; and what ranks have in common is found where they have it alike.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations, pairwise
from random import Random
from typing import Any

import numpy as np
from hypothesis import given, settings, strategies as st

from tensorhub.layouts import Coordinates, Publication, Reading, arrange, at, pieces_of, reading_of, source
from tests.layouts.test_reading import bytes_of, gathered, scattered
from tests.layouts.worlds import DTYPES, Array, Even, Memory, Placed, mesh_rank

Shapes = dict[str, tuple[int, ...]]
CHUNK_BYTES = st.sampled_from([1, 3, 7, 16, 24, 64, 4096])


@dataclass
class Rank:
    """One of a reading group, with what it has read."""

    coordinates: Coordinates
    reading: Reading
    regions: list[bytearray]

    def content(self, chunk: int) -> bytes:
        return gathered(self.reading.places[chunk], self.regions)


def model(random: Random) -> dict[str, tuple[str, Array]]:
    """Layers with two tensors that look alike, and with experts."""
    dtype, side, found = random.choice(list(DTYPES)), random.choice([2, 4, 6]), dict[str, tuple[str, Array]]()
    for layer in range(random.randint(1, 3)):
        for name in ("q", "k", *(f"experts.{n}.w" for n in range(random.choice([2, 4])))):
            elements = np.frombuffer(random.randbytes(side * side * DTYPES[dtype]), np.dtype(f"u{DTYPES[dtype]}"))
            found[f"layers.{layer}.{name}"] = dtype, elements.reshape(side, side)
    return found


def published(random: Random, made: dict[str, tuple[str, Array]]) -> tuple[Publication, list[Memory]]:
    """Ranks that have some tensors whole, each of them, and parts of the others; laid out alike or not."""
    ranks, cuts = random.choice([1, 2, 2, 3]), {name: random.choice([None, None, 0, 1]) for name in made}
    if random.random() < 0.7:
        cuts = {name: None if "experts" not in name else 0 for name in made}
    coordinates, memories = [], []
    for rank in range(ranks):
        memory, shardings = Memory(), {}
        for name in random.choice([list(made), random.sample(list(made), len(made))]):
            dtype, elements = made[name]
            placed = [Placed(ranks, cuts[name])]
            shardings[name] = mesh_rank(random.choice([Even(), random]), memory, name, dtype, elements, placed, [rank])
        coordinates.append(arrange(pieces_of(memory.tensors, world_size=ranks, shardings=shardings)))
        memories.append(memory)
    return Publication(tuple(coordinates)).check(), memories


def whole_in(
    way: str, memory: Memory, sources: dict[str, object], names: Sequence[str], dtype: str, shape: tuple[int, ...]
) -> None:
    """These tensors, which are of one shape, all of them on this rank, laid out in that way."""
    gaps = Random(1) if "padded" in way else Even()
    views = [source(name) for name in names]
    if way in ("apart", "padded"):
        for name, view in zip(names, views, strict=True):
            memory.add(gaps, f"my {name}", dtype, shape)
            sources[f"my {name}"] = view
    elif way == "transposed":
        for name, view in zip(names, views, strict=True):
            memory.add(gaps, f"my {name}", dtype, shape[::-1])
            sources[f"my {name}"] = view.T
    else:
        among = way == "among each other"
        memory.add(Even(), "stack", dtype, (shape[0], len(names), shape[1]) if among else (len(names), *shape))
        order = list(enumerate(views))
        if "backwards" in way:
            order = [(len(views) - 1 - n, view) for n, view in order]
        sources["stack"] = [(at[:, n] if among else at[n], view) for n, view in order]


WAYS = ["apart", "apart", "padded", "transposed", "stacked", "stacked backwards", "among each other"]


def rank_of(
    random: Random, made: dict[str, tuple[str, Array]], publication: Publication, rank: int, ranks: int
) -> tuple[Coordinates, Memory]:
    """Attention whole, in some way; experts of its own, or its part of each."""
    memory, sources = Memory(), dict[str, object]()
    common = [name for name in made if "experts" not in name]
    experts = [name for name in made if "experts" in name]
    dtype, elements = made[common[0]]
    whole_in(random.choice(WAYS), memory, sources, random.choice([common, common, common[::-1]]), dtype, elements.shape)
    cut_experts = random.random() < 0.5
    for number, name in enumerate(experts):
        rows = elements.shape[0]
        part = slice(rows * rank // ranks, rows * (rank + 1) // ranks) if cut_experts else slice(None)
        if cut_experts or number % ranks == rank:
            memory.add(random.choice([Even(), random]), f"my {name}", dtype, elements[part].shape)
            sources[f"my {name}"] = source(name)[part]
    shapes = {name: each.shape for name, (_, each) in made.items()}
    pieces = pieces_of(memory.tensors, rank=rank, world_size=ranks, sources=sources, shape_of=shapes.get)
    return arrange(pieces, publication.catalogue), memory


def filled(publication: Publication, memories: Sequence[Memory], reader: Coordinates, memory: Memory, nbytes: int) -> Rank:
    reading = reading_of(publication, reader, chunk_bytes=nbytes)
    for part in reading.parts:
        for number, strips in zip(part.chunks, part.selection.chunks, strict=True):
            scattered(reading.places[number], memory.regions, gathered(strips, memories[part.shard].regions))
    return Rank(reader, reading, memory.regions)


def group(random: Random, chunk_bytes: int) -> list[Rank]:
    made = model(random)
    publication, memories = published(random, made)
    ranks, found = random.choice([2, 2, 3]), list[Rank]()
    for rank in range(ranks):
        reader, memory = rank_of(random, made, publication, rank, ranks)
        found.append(filled(publication, memories, reader, memory, chunk_bytes))
    return found


def check_group(ranks: Sequence[Rank]) -> int:
    """How many bundles two of them have in common."""
    for each in ranks:
        chunks = [chunk for bundle in each.reading.bundles for chunk in bundle.chunks]
        assert len(chunks) == len(set(chunks))
        assert set(chunks) <= set(range(len(each.reading.sizes)))
        assert all(first < second for bundle in each.reading.bundles for first, second in pairwise(bundle.chunks))
    in_common = 0
    for one, other in combinations(ranks, 2):
        mine, theirs = ({bundle.bundle_id: bundle.chunks for bundle in each.reading.bundles} for each in (one, other))
        for name in mine.keys() & theirs.keys():
            in_common += 1
            assert [one.content(chunk) for chunk in mine[name]] == [other.content(chunk) for chunk in theirs[name]]
        if one.coordinates == other.coordinates:
            assert one.reading == other.reading
    return in_common


@settings(max_examples=300)
@given(st.randoms(use_true_random=False), CHUNK_BYTES)
def test_bundles_of_one_id_have_the_same_bytes_chunk_by_chunk(random: Random, chunk_bytes: int) -> None:
    check_group(group(random, chunk_bytes))


def two_trainers(made: Shapes) -> Publication:
    """Each has all of it, and its half of `w`: so what they have in common can be had from either."""
    ranks = []
    for rank in range(2):
        half = slice(3 * rank, 3 * rank + 3)
        sources = {name: source(name, shape=shape)[half if name == "w" else ...] for name, shape in made.items()}
        ranks.append(arrange(pieces_of(bytes_of({**made, "w": (3, 4)}), sources=sources)))
    return Publication(tuple(ranks)).check()


def in_common(made: Shapes, *readers: tuple[Shapes, dict[str, Any]]) -> int:
    """How many bundles these have in common, each of which has its half of `w` as well."""
    publication, found = two_trainers(made), list[set[str]]()
    for tensors, sources in readers:
        views = {"w": source("w")[:3], **sources}
        pieces = pieces_of(bytes_of({**tensors, "w": (3, 4)}), sources=views, shape_of=made.get)
        reading = reading_of(publication, arrange(pieces, publication.catalogue), chunk_bytes=64)
        found.append({bundle.bundle_id for bundle in reading.bundles})
    assert [len(each) for each in found] == [2] * len(readers)
    return len(set.intersection(*found))


def test_who_has_a_tensor_transposed_has_not_the_same() -> None:
    """A chunk has all of it, in another order, in as many bytes of memory."""
    made: Shapes = {"q.0": (4, 4), "k.0": (4, 4), "w": (6, 4)}
    mine: Shapes = {"q.0": (4, 4), "k.0": (4, 4)}
    turned = {name: source(name).T for name in mine}
    assert in_common(made, (mine, {}), (mine, {})) == 2
    assert in_common(made, (mine, turned), (mine, turned)) == 2
    assert in_common(made, (mine, {}), (mine, turned)) == 1  # `w`


def test_who_has_very_many_in_another_order_has_not_the_same() -> None:
    """They are planned in the order of the source, since their callers name them in none."""
    names = [f"norms.{n}" for n in range(100)]
    made: Shapes = {**dict.fromkeys(names, (8,)), "w": (6, 4)}
    order = Random(3).sample(range(100), 100)
    mine = {"stack": [(at[n], source(names[n])) for n in order]}
    backwards = {"stack": [(at[99 - n], source(names[n])) for n in order]}
    stack: Shapes = {"stack": (100, 8)}
    assert in_common(made, (stack, mine), (stack, mine)) == 2
    assert in_common(made, (stack, mine), (stack, backwards)) == 1


def test_who_has_them_among_each_other_has_not_the_same() -> None:
    names = [f"k.{n}" for n in range(2)]
    made: Shapes = {**dict.fromkeys(names, (4, 4)), "w": (6, 4)}
    stacked = {"stack": [(at[n], source(name)) for n, name in enumerate(names)]}
    among = {"stack": [(at[:, n], source(name)) for n, name in enumerate(names)]}
    assert in_common(made, ({"stack": (2, 4, 4)}, stacked), ({"stack": (4, 2, 4)}, among)) == 1
