"""A site that is not the trainer's: groups of one layout follow one another, and a seed serves
groups of all layouts.
"""

from __future__ import annotations

import socket
from contextlib import AbstractAsyncContextManager, AsyncExitStack
from dataclasses import replace

import anyio
import pytest

import tensorhub
from tensorhub.api.hub import Hub
from tensorhub.api.tools import seed_shard
from tensorhub.cli import common
from tensorhub.errors import InvalidValue
from tensorhub.types import FetchReport, Location
from tests.rig import OPTIONS, Cluster, all_of, cluster, connect, gated, until
from tests.test_resharding import TRAINERS, is_held, is_published, read_from, rollout, trainer

pytestmark = pytest.mark.anyio

HOSTED = replace(OPTIONS, host_memory_bytes=2**23)


def far(c: Cluster, name: str) -> AbstractAsyncContextManager[Hub]:
    """A worker in another site than the trainer."""
    where = Location(site="far")
    return tensorhub.connect(
        c.address, name=name, location=where, transports=["tcp"], options=HOSTED, token=""
    )


async def test_a_group_follows_an_earlier_group_of_its_layout_while_that_one_is_filled() -> None:
    async with cluster("trainer", transports=["tcp"]) as c, AsyncExitStack() as stack:
        trained, _ = await trainer(c.hubs, 1)
        await all_of(*(each.publish(1) for each in trained))
        gate = stack.enter_context(gated(2))
        hubs = [await stack.enter_async_context(far(c, name)) for name in ("first", "second")]
        (first, mine), (second, theirs) = [
            await rollout([hub], name) for hub, name in zip(hubs, "ab", strict=True)
        ]
        reports = dict[str, list[FetchReport]]()

        async def fill(name: str) -> None:
            reports[name] = await all_of(
                *(each.replicate() for each in {"first": first, "second": second}[name])
            )

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(fill, "first")
            await until(lambda: gate.holds)
            tasks.start_soon(fill, "second")
            gate.open()
        assert read_from(reports["first"]) == {"trainer"}
        assert read_from(reports["second"]) == {"first"}
        assert is_held(mine, 1)
        assert is_held(theirs, 1)


async def test_a_seed_brings_the_published_layout_for_groups_of_all_layouts() -> None:
    async with cluster("trainer", transports=["tcp"]) as c, AsyncExitStack() as stack:
        trained, _ = await trainer(c.hubs, 1)
        await all_of(*(each.publish(1) for each in trained))
        seed, *hubs = [
            await stack.enter_async_context(far(c, name)) for name in ("seed", "engine", "copy")
        ]
        info = await seed.wait_for("m", at_least=1)
        reports = await all_of(*(seed_shard(seed, info, shard) for shard in range(TRAINERS)))
        assert read_from(reports) == {"trainer"}
        engines, mine = await rollout(hubs[:1], "engine")
        copies, theirs = await trainer(hubs[1:], 0, "copy")
        reports = await all_of(*(each.replicate() for each in (*engines, *copies)))
        assert "trainer" not in read_from(reports)
        sources = [each for report in reports for each in report.sources]
        assert all((each.kind == "seed") == (each.name == "seed") for each in sources)
        assert {each.deltas for each in sources if each.shard is not None} == {"other layout"}
        assert is_held(mine, 1)
        assert is_published(theirs, 1)


async def test_the_environment_says_where_a_worker_is_and_an_argument_wins(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("TENSORHUB_SITE", "zone-a")
    monkeypatch.setenv("TENSORHUB_RACK", "node-7")
    monkeypatch.setenv("TENSORHUB_HOST", "")  # of a pod whose node lacks the label
    async with cluster("trainer") as c:
        await trainer([c.hubs[0]], 1)
        (seen,) = (await c.hubs[0].describe("m")).workers
        assert seen.location == Location("zone-a", "node-7", socket.gethostname())
        assert (common.location(None).site, common.location("far").site) == ("zone-a", "far")
        monkeypatch.setenv("TENSORHUB_SITE", "a\nb")
        with pytest.raises(InvalidValue, match="TENSORHUB_SITE"):
            connect(c.address)
