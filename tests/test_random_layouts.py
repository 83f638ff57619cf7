"""Random trainers and readers over sockets: what a reader ends up with is what gathering and
slicing by numpy gives.

Each world is a model of its own at one cluster: a few tensors; a trainer of 1 to 4 ranks, each with
parts of them by blocks, by every so many rows, or all of them, some permuted in its memory; and a
reader of 1 to 3 ranks, each with views of them: slices with steps, indices, permutations, in lists,
stacks and padded places, in memory with padded rows. Another group of the reader's layout reads
from it. Nothing but the public API is used.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from math import prod
from random import Random
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

import tensorhub
from tensorhub.api.hub import Hub
from tests.layouts.worlds import chunked, some_entry, tensors
from tests.rig import OPTIONS, all_of, cluster

pytestmark = pytest.mark.anyio

Array = npt.NDArray[Any]
GAP = 0xA5
OPTIONS_HERE = replace(OPTIONS, chunk_bytes=4096)  # the least


@dataclass
class Rank:
    """What it registers, and what is to be there."""

    memory: dict[str, Array]
    sources: dict[str, object]
    expected: dict[str, Array]
    # of a reader: what its memory is of
    buffers: dict[str, tuple[Array, tuple[Any, ...]]] = field(default_factory=dict)

    @property
    def keeps_padding(self) -> bool:
        """Whether what is beside its memory is as it was."""
        for buffer, index in self.buffers.values():
            rest = buffer.copy()
            rest[index] = np.frombuffer(bytes([GAP]) * rest.itemsize, rest.dtype)[0]
            if set(rest.tobytes()) - {GAP}:
                return False
        return True


def enlarged(random: Random, made: dict[str, tuple[str, Array]]) -> dict[str, tuple[str, Array]]:
    """Some of them have so many elements that they take several chunks."""
    found = {}
    for name, (dtype, elements) in made.items():
        times = random.choice([1, 1, 40, 170]) if elements.ndim else 1
        large = (
            np.concatenate([elements + np.asarray(n, elements.dtype) for n in range(times)])
            if times > 1
            else elements
        )
        found[name] = dtype, large
    return found


def trainer(random: Random, made: dict[str, tuple[str, Array]], ranks: int) -> list[Rank]:
    how = {name: random.choice(["whole", "blocks", "rows", "columns"]) for name in made}
    order = {
        name: random.sample(range(elements.ndim), elements.ndim)
        for name, (_, elements) in made.items()
    }
    found = []
    for number in range(ranks):
        rank = Rank({}, {}, {})
        for name, (_, elements) in made.items():
            view: Any = tensorhub.source(name, shape=elements.shape)
            part = elements
            dimension = 1 if how[name] == "columns" and elements.ndim > 1 else 0
            if elements.ndim and how[name] != "whole":
                size = elements.shape[dimension]
                mine = (
                    range(number, size, ranks)
                    if how[name] == "rows"
                    else chunked(list(range(size)), ranks)[number]
                )
                index = (
                    slice(mine[0], mine[-1] + 1, ranks if how[name] == "rows" else 1)
                    if mine
                    else slice(0, 0)
                )
                at = (index,) if dimension == 0 else (slice(None), index)
                view, part = view[at], part[at]
            rank.memory[f"{name} of {number}"] = part.transpose(order[name]).copy()
            rank.sources[f"{name} of {number}"] = view.permute(*order[name])
        found.append(rank)
    return found


def reader(random: Random, made: dict[str, tuple[str, Array]], ranks: int) -> list[Rank]:
    found = []
    for _ in range(ranks):
        rank = Rank({}, {}, {})
        for number in range(random.randint(1, 4)):
            name = f"mine{number}"
            _, shape, entry, goes = some_entry(random, made)
            kind = goes[0][1].dtype
            blank = filled(shape, kind)
            rank.buffers[name] = buffer, index = padded(random, shape, kind)
            rank.memory[name], rank.sources[name], rank.expected[name] = (
                buffer[index],
                entry,
                blank.copy(),
            )
            for place, array in goes:
                rank.expected[name][place] = array
        found.append(rank)
    return found


def filled(shape: tuple[int, ...], kind: np.dtype[Any]) -> Array:
    return np.frombuffer(bytes([GAP]) * (prod(shape) * kind.itemsize), kind).reshape(shape).copy()


def padded(
    random: Random, shape: tuple[int, ...], kind: np.dtype[Any]
) -> tuple[Array, tuple[Any, ...]]:
    """Memory of at least that shape, and which part of it has that shape. Whole rows are padded,
    and not each element.
    """
    row = max((dimension for dimension, size in enumerate(shape) if size > 1), default=-1)
    pads = [
        random.choice([0, 0, 1, 3]) if dimension <= row else 0 for dimension in range(len(shape))
    ]
    starts = [random.randint(0, pad) for pad in pads]
    buffer = filled(tuple([size + pad for size, pad in zip(shape, pads, strict=True)]), kind)
    return buffer, (
        ...,
        *(slice(start, start + size) for start, size in zip(starts, shape, strict=True)),
    )


def shared(rank: Rank) -> Rank:
    """The same in memory that readers of this host can map."""
    memory: dict[str, Array] = tensorhub.shared_empty_like(rank.memory)
    for name, array in rank.memory.items():
        memory[name][...] = array
    return replace(rank, memory=memory, buffers={})


async def check(hubs: list[Hub], model: str, random: Random, transport: str) -> None:
    made = enlarged(random, tensors(random))
    trained, mine = (
        trainer(random, made, random.randint(1, 4)),
        reader(random, made, random.randint(1, 3)),
    )
    if transport == "shm":
        trained, mine = [shared(rank) for rank in trained], [shared(rank) for rank in mine]

    async def registered(
        ranks: list[Rank], hub: Hub, group: str, **settings: Any
    ) -> list[tensorhub.Weights]:
        return [
            await hub.register(
                model,
                rank.memory,
                sources=rank.sources,
                group=group,
                rank=n,
                world_size=len(ranks),
                **settings,
            )
            for n, rank in enumerate(ranks)
        ]

    publishers = await registered(trained, hubs[0], "t")
    await all_of(*(each.publish(1) for each in publishers))
    readers = await registered(mine, hubs[1], "r", partial=True)
    followers = reader_again(mine)
    reports = await all_of(*(each.replicate() for each in readers))
    for rank, report in zip(mine, reports, strict=True):
        for name, expected in rank.expected.items():
            assert rank.memory[name].tobytes() == expected.tobytes(), (model, name)
        assert rank.keeps_padding, model
        assert report.reread_bytes == 0
    others = await registered(followers, hubs[2], "f", partial=True)
    await all_of(*(each.unpublish() for each in publishers))
    await all_of(*(each.replicate(1) for each in others))
    for rank, first in zip(followers, mine, strict=True):
        assert all(
            rank.memory[name].tobytes() == first.expected[name].tobytes() for name in rank.memory
        ), model
        assert rank.keeps_padding, model
    for each in (*others, *readers, *publishers):
        await each.close()


def reader_again(ranks: list[Rank]) -> list[Rank]:
    """Another group of that layout: its memory is as it was before."""
    found = []
    for rank in ranks:
        buffers = {name: (buffer.copy(), index) for name, (buffer, index) in rank.buffers.items()}
        memory = {name: buffer[index] for name, (buffer, index) in buffers.items()} or {
            name: array.copy() for name, array in rank.memory.items()
        }
        found.append(Rank(memory, rank.sources, {}, buffers))
    return found


async def worlds(seeds: range, transport: str) -> None:
    async with cluster(
        "trainer", "reader", "follower", transports=[transport], options=OPTIONS_HERE
    ) as c:
        for seed in seeds:
            await check(c.hubs, f"m{seed}", Random(f"{transport} {seed}"), transport)


@pytest.mark.heavy
@pytest.mark.parametrize("anyio_backend", ["asyncio"])
async def test_what_arrives_is_what_gathering_and_slicing_would_give() -> None:
    await worlds(range(25), "tcp")


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("transport", ["tcp", "shm", "cma"])
@pytest.mark.parametrize("start", range(0, 1000, 100))
async def test_a_thousand_worlds(start: int, transport: str) -> None:
    await worlds(range(start, start + 100), transport)
