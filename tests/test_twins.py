"""Ranks of one group that hold the same, in another site than the trainer: one of them reads it there, over real sockets,
and the others have it from that one.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack

import numpy as np
import pytest

import tensorhub
from tensorhub.hub import Hub
from tensorhub.runtime.worker import handle
from tensorhub.types import FetchReport
from tensorhub.weights import Weights
from tests.rig import all_of, cluster
from tests.test_origins import far, holds
from tests.test_resharding import SHAPES, Array, Tensors, new_version, read_from, trainer, whole

pytestmark = pytest.mark.anyio

NBYTES = sum(tensor.nbytes for tensor in whole(0).values())


async def twins(hubs: Sequence[Hub], content: int, group: str) -> tuple[list[Weights], list[Tensors]]:
    """On each of these workers a rank that has the whole model."""
    memory, weights = [whole(content) for _ in hubs], []
    sources = {name: tensorhub.source(name, shape=shape) for name, shape in SHAPES.items()}
    for rank, (hub, mine) in enumerate(zip(hubs, memory, strict=True)):
        use = {"group": group, "rank": rank, "world_size": len(hubs)}
        weights.append(await hub.register("m", mine, sources=sources, **use))  # type: ignore[arg-type]
    return weights, memory


def given_by(reports: Sequence[FetchReport]) -> Mapping[str, int]:
    """Bytes of each worker."""
    found = Counter[str]()
    for source in (source for report in reports for source in report.sources):
        found[source.name] += source.bytes_read
    return +found


def all_hold(memory: Sequence[Mapping[str, Array]], content: int) -> bool:
    return all(holds(mine, content) for mine in memory)


async def test_of_ranks_that_read_what_was_published_whole_one_enters_the_site() -> None:
    async with cluster("trainer-0", "trainer-1", transports=["tcp"]) as c, AsyncExitStack() as stack:
        hubs = [await stack.enter_async_context(far(c, f"rollout-{rank}")) for rank in range(2)]
        trained, theirs = await twins(c.hubs, 1, "trainer")
        await all_of(*(each.publish(1) for each in trained))
        ranks, mine = await twins(hubs, 0, "rollout")
        for version in (1, 2):
            reports = await all_of(*(each.update() for each in ranks))
            assert all_hold(mine, version)
            (entered,) = [source for source in given_by(reports) if source.startswith("trainer")]
            assert given_by(reports)[entered] == NBYTES
            assert sum(given_by(reports).values()) == 2 * NBYTES
            await all_of(*(each.unpublish() for each in trained))
            for memory in theirs:
                for name, tensor in whole(version + 1).items():
                    memory[name][...] = tensor
            await all_of(*(each.publish(version + 1) for each in trained))


async def test_where_trainers_have_drifted_apart_each_rank_has_the_bytes_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only what differs is read again, where the digests are not known from the start that tell the trainers apart."""
    monkeypatch.setattr(handle.Handle, "_digest_early", lambda self: None)
    async with cluster("trainer-0", "trainer-1", transports=["tcp"]) as c, AsyncExitStack() as stack:
        hubs = [await stack.enter_async_context(far(c, f"rollout-{rank}")) for rank in range(2)]
        trained, theirs = await twins(c.hubs, 1, "trainer")
        theirs[1]["gate"][0, 0] += 1
        await all_of(*(each.publish(1) for each in trained))
        ranks, mine = await twins(hubs, 0, "rollout")
        reports = await all_of(*(each.update() for each in ranks))
        pairs = [(one[name], other[name]) for one, other in zip(mine, theirs, strict=True) for name in SHAPES]
        assert all(np.array_equal(one, other) for one, other in pairs)
        of_trainers = sorted(n for source, n in given_by(reports).items() if source.startswith("trainer"))
        assert len(of_trainers) == 2
        assert 0 < of_trainers[0] < of_trainers[1] == NBYTES


async def test_of_ranks_that_read_another_layout_whole_one_enters_the_site() -> None:
    """The next version, too."""
    async with cluster("trainer", transports=["tcp"]) as c, AsyncExitStack() as stack:
        hubs = [await stack.enter_async_context(far(c, f"rollout-{rank}")) for rank in range(3)]
        trained, memory = await trainer(c.hubs, 1)
        await all_of(*(each.publish(1) for each in trained))
        ranks, mine = await twins(hubs, 0, "rollout")
        for version in (1, 2):
            reports = await all_of(*(each.update() for each in ranks))
            assert all_hold(mine, version)
            assert given_by(reports)["trainer"] == NBYTES
            assert sum(given_by(reports).values()) == 3 * NBYTES
            await all_of(*(new_version(trained, memory, rank, version + 1) for rank in range(len(memory))))


async def test_so_it_is_where_several_trainers_have_a_tensor() -> None:
    """Each rank reads that of the same trainer."""
    async with cluster("trainer-0", "trainer-1", transports=["tcp"]) as c, AsyncExitStack() as stack:
        hubs = [await stack.enter_async_context(far(c, f"rollout-{rank}")) for rank in range(2)]
        full, trained = whole(1), []
        for rank, hub in enumerate(c.hubs):
            half, gate = slice(48 * rank, 48 * (rank + 1)), tensorhub.source("gate", shape=SHAPES["gate"])
            memory = {"gate": full["gate"], "q": full["q"][half].copy()}
            sources = {"gate": gate, "q": tensorhub.source("q", shape=SHAPES["q"])[half]}
            use = {"group": "trainer", "rank": rank, "world_size": 2}
            trained.append(await hub.register("m", memory, sources=sources, **use))  # type: ignore[arg-type]
        await all_of(*(each.publish(1) for each in trained))
        mine = [{name: np.zeros(SHAPES[name], np.float32) for name in ("q", "gate")} for _ in hubs]
        sources = {name: tensorhub.source(name) for name in ("q", "gate")}
        ranks = []
        for rank, hub in enumerate(hubs):
            use = {"group": "rollout", "rank": rank, "world_size": 2}
            ranks.append(await hub.register("m", mine[rank], sources=sources, **use))  # type: ignore[arg-type]
        reports = await all_of(*(each.update() for each in ranks))
        assert all(np.array_equal(memory[name], full[name]) for memory in mine for name in memory)
        nbytes = sum(full[name].nbytes for name in ("q", "gate"))
        assert sum(n for source, n in given_by(reports).items() if source.startswith("trainer")) == nbytes


async def test_in_the_trainers_site_each_reads_of_the_trainer() -> None:
    async with cluster("trainer", "rollout-0", "rollout-1", transports=["tcp"]) as c:
        trained, _ = await trainer(c.hubs[:1], 1)
        await all_of(*(each.publish(1) for each in trained))
        ranks, mine = await twins(c.hubs[1:], 0, "rollout")
        reports = await all_of(*(each.update() for each in ranks))
        assert all_hold(mine, 1)
        assert read_from(reports) == {"trainer"}
