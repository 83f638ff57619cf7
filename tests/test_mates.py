"""Ranks of one group that have some of a model in common, in another site than the trainer: what they share enters the site
once, over real sockets, and each of them has the rest from the trainer.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

import tensorhub
from tensorhub.hub import Hub
from tensorhub.runtime.data.serving import SharedOwner
from tensorhub.types import FetchReport, Location, RegistrationId
from tensorhub.weights import Weights
from tests.rig import OPTIONS, Cluster, all_of, cluster
from tests.test_origins import far
from tests.test_resharding import Array
from tests.test_twins import given_by

pytestmark = pytest.mark.anyio

Part = Mapping[str, tuple[slice, ...]]  # of one rank: which rows and columns of which tensors
EXPERT, HIDDEN = (32, 256), 256
SHAPES = {
    "model.embed.weight": (96, HIDDEN),
    **{f"model.layers.{layer}.norm.weight": (HIDDEN,) for layer in range(3)},
    **{f"model.layers.{layer}.q.weight": (64, HIDDEN) for layer in range(3)},
    **{f"model.layers.{layer}.kv.weight": (32, HIDDEN) for layer in range(3)},
    **{f"model.layers.{layer}.experts.{n}.weight": EXPERT for layer in range(3) for n in range(4)},
}
ITEM = np.dtype(np.float32).itemsize


def whole(content: int) -> dict[str, Array]:
    numbers = np.random.default_rng(content)
    return {name: numbers.standard_normal(shape, np.float32) for name, shape in SHAPES.items()}


def cut(name: str, rank: int, ranks: int) -> tuple[slice, ...]:
    rows = SHAPES[name][0]
    return (slice(rows * rank // ranks, rows * (rank + 1) // ranks),)


def by_rows(rank: int, ranks: int) -> Part:
    """Each tensor is cut."""
    return {name: cut(name, rank, ranks) for name in SHAPES}


def tensor_parallel(rank: int, ranks: int) -> Part:
    """Norms are not cut, and each key-value head is on two ranks. Experts are cut as well."""
    found = dict[str, tuple[slice, ...]]()
    for name in SHAPES:
        if "norm" in name:
            found[name] = ()
        else:
            found[name] = cut(name, rank // 2, ranks // 2) if "kv" in name else cut(name, rank, ranks)
    return found


def expert_parallel(rank: int, ranks: int) -> Part:
    """Attention is on every rank, and each expert on one."""
    mine = range(4 * rank // ranks, 4 * (rank + 1) // ranks)
    return {name: () for name in SHAPES if "experts" not in name or int(name.split(".")[4]) in mine}


def nbytes(part: Part) -> int:
    full = whole(0)
    return sum(full[name][at].nbytes for name, at in part.items())


def held_once(parts: Sequence[Part]) -> int:
    """Bytes of what these have together."""
    marks = {name: np.zeros(shape, bool) for name, shape in SHAPES.items()}
    for part in parts:
        for name, at in part.items():
            marks[name][at] = True
    return sum(int(mark.sum()) for mark in marks.values()) * ITEM


async def group(
    hubs: Sequence[Hub], name: str, layout: Callable[[int, int], Part], content: int | None
) -> tuple[list[Weights], list[dict[str, Array]]]:
    full, weights, memories = whole(content or 0), [], []
    for rank, hub in enumerate(hubs):
        part = layout(rank, len(hubs))
        memory = {tensor: full[tensor][at].copy() for tensor, at in part.items()}
        if content is None:
            for mine in memory.values():
                mine[...] = 0
        sources = {t: tensorhub.source(t, shape=SHAPES[t])[at] for t, at in part.items()}
        use = {"group": name, "rank": rank, "world_size": len(hubs)}
        weights.append(await hub.register("m", memory, sources=sources, **use))  # type: ignore[arg-type]
        memories.append(memory)
    return weights, memories


async def next_version(
    trained: Sequence[Weights], memories: Sequence[dict[str, Array]], parts: Sequence[Part], content: int
) -> None:
    await all_of(*(each.unpublish() for each in trained))
    full = whole(content)
    for memory, part in zip(memories, parts, strict=True):
        for name, at in part.items():
            memory[name][...] = full[name][at]
    await all_of(*(each.publish(content) for each in trained))


@pytest.mark.parametrize("reading", [tensor_parallel, expert_parallel])
@pytest.mark.parametrize("trained_as", [by_rows, tensor_parallel, expert_parallel])
@pytest.mark.parametrize("ranks", [2, 4])
async def test_what_ranks_have_in_common_enters_the_site_once(
    trained_as: Callable[[int, int], Part], reading: Callable[[int, int], Part], ranks: int
) -> None:
    """The next version, too; each rank reads as many bytes as it has."""
    trainers = 2 if trained_as is not reading or ranks != 2 else 4
    async with cluster(*(f"trainer-{n}" for n in range(trainers)), transports=["tcp"]) as c, AsyncExitStack() as stack:
        hubs = [await stack.enter_async_context(far(c, f"rollout-{rank}")) for rank in range(ranks)]
        trained, theirs = await group(c.hubs, "trainer", trained_as, 1)
        await all_of(*(each.publish(1) for each in trained))
        readers, mine = await group(hubs, "rollout", reading, None)
        parts = [reading(rank, ranks) for rank in range(ranks)]
        for version in (1, 2):
            reports = await all_of(*(each.update() for each in readers))
            full = whole(version)
            for memory, part in zip(mine, parts, strict=True):
                assert all(np.array_equal(memory[name], full[name][at]) for name, at in part.items())
            given = given_by(reports)
            assert sum(n for source, n in given.items() if source.startswith("trainer")) == held_once(parts)
            assert sum(given.values()) == sum(map(nbytes, parts))
            assert sum(report.bytes_across for report in reports) == held_once(parts)
            await next_version(trained, theirs, [trained_as(rank, trainers) for rank in range(trainers)], version + 1)


@pytest.mark.parametrize("integrity", [True, False])
async def test_who_has_what_others_have_turned_around_reads_it_for_itself(*, integrity: bool) -> None:
    """Its chunks are as long as theirs, and have the same tensors, in another order."""
    options = replace(OPTIONS, integrity=integrity)
    async with cluster("trainer-0", "trainer-1", transports=["tcp"], options=options) as c, AsyncExitStack() as stack:
        hubs = [await stack.enter_async_context(far(c, f"rollout-{rank}")) for rank in range(3)]
        shapes, full = {"q.0": (64, 64), "k.0": (64, 64), "w": (96, 64)}, dict[str, Array]()
        for number, (name, shape) in enumerate(shapes.items()):
            full[name] = np.random.default_rng(number).standard_normal(shape, np.float32)
        trained, readers, mine = list[Weights](), list[Weights](), list[dict[str, Array]]()
        for rank, hub in enumerate((*c.hubs, *hubs)):
            ranks, of = (2, rank) if rank < 2 else (3, rank - 2)
            part = {name: slice(96 * of // ranks, 96 * (of + 1) // ranks) if name == "w" else ... for name in shapes}
            views = {name: tensorhub.source(name, shape=shape)[part[name]] for name, shape in shapes.items()}
            memory = {name: array[part[name]].copy() for name, array in full.items()}
            if rank == 3:
                views.update({name: views[name].T for name in ("q.0", "k.0")})
            if rank > 1:
                mine.append(memory)
                for each in memory.values():
                    each[...] = 0
            use = {"group": "rollout" if rank > 1 else "trainer", "rank": of, "world_size": ranks}
            (readers if rank > 1 else trained).append(await hub.register("m", memory, sources=views, **use))  # type: ignore[arg-type]
        await all_of(*(each.publish(1) for each in trained))
        given = given_by(await all_of(*(each.update() for each in readers)))
        for rank, memory in enumerate(mine):
            turned = {name: array.T if rank == 1 and name != "w" else array for name, array in full.items()}
            turned["w"] = full["w"][32 * rank : 32 * rank + 32]
            assert all(np.array_equal(memory[name], array) for name, array in turned.items())
        once = full["q.0"].nbytes + full["k.0"].nbytes
        assert sum(n for source, n in given.items() if source.startswith("rollout")) == once


async def filled(
    stack: AsyncExitStack, c: Cluster, *sites: str
) -> tuple[list[FetchReport], list[dict[str, Array]], list[Part]]:
    """Ranks with experts of their own, one in each of these sites, read version 1."""
    hubs = []
    for rank, site in enumerate(sites):
        use: dict[str, Any] = {"location": Location(site=site), "transports": ["tcp"], "options": OPTIONS, "token": ""}
        hubs.append(await stack.enter_async_context(tensorhub.connect(c.address, name=f"rollout-{rank}", **use)))
    trained, _ = await group(c.hubs, "trainer", by_rows, 1)
    await all_of(*(each.publish(1) for each in trained))
    readers, mine = await group(hubs, "rollout", expert_parallel, None)
    reports = await all_of(*(each.update() for each in readers))
    return reports, mine, [expert_parallel(rank, len(sites)) for rank in range(len(sites))]


def all_right(mine: Sequence[Mapping[str, Array]], parts: Sequence[Part]) -> bool:
    full = whole(1)
    pairs = [(memory[name], full[name][at]) for memory, part in zip(mine, parts, strict=True) for name, at in part.items()]
    return all(np.array_equal(one, other) for one, other in pairs)


def entered(reports: Sequence[FetchReport]) -> int:
    return sum(n for source, n in given_by(reports).items() if source.startswith("trainer"))


async def test_each_of_three_sites_is_entered_once() -> None:
    async with cluster("trainer-0", "trainer-1", transports=["tcp"]) as c, AsyncExitStack() as stack:
        reports, mine, parts = await filled(stack, c, "a", "b", "a", "b", "c", "c")
        assert all_right(mine, parts)
        assert entered(reports) == sum(held_once([parts[one], parts[other]]) for one, other in [(0, 2), (1, 3), (4, 5)])


async def test_nobody_commits_what_a_mate_has_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever has something first spoils that, and says the digest of what it has then."""
    spoilt, offer = list[int](), SharedOwner.mark_available

    def spoil(
        owner: SharedOwner, registration: RegistrationId, generation: int, arrived: Any, *origin: Any, **how: Any
    ) -> bool:
        found, memory = list(arrived), owner._memory[registration]
        for number, (chunk, _) in enumerate(found):
            if not spoilt:
                np.frombuffer(next(memory.outgoing(chunk))[0], np.uint8)[0] ^= 1
                spoilt.append(chunk)
                found[number] = chunk, memory.digest(chunk)
        return offer(owner, registration, generation, found, *origin, **how)

    monkeypatch.setattr(SharedOwner, "mark_available", spoil)
    async with cluster("trainer-0", "trainer-1", transports=["tcp"]) as c, AsyncExitStack() as stack:
        reports, mine, parts = await filled(stack, c, "far", "far", "far")
        assert all_right(mine, parts)
        assert spoilt
        assert entered(reports) > held_once(parts)  # what was wrong was read there again
