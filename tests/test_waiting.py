"""A call that waits for a version which may never come says so at once; with timeout=math.inf it
waits until it is over.
"""

from __future__ import annotations

import math
from dataclasses import replace
from functools import partial
from pathlib import Path

import anyio
import pytest

import tensorhub
from tensorhub.errors import StateError, VersionUnavailable
from tests.rig import OPTIONS, begin_store, cluster, tensors, until

HINT = "nothing is published under this name yet"


@pytest.mark.parametrize("call", ["replicate", "update", "fetch", "wait_for", "watch"])
async def test_who_waits_for_a_name_that_nobody_knows_is_told_at_once(
    call: str, caplog: pytest.LogCaptureFixture
) -> None:
    async with cluster("reader") as c, anyio.create_task_group() as tasks:
        hub = c.hubs[0]
        weights = await hub.register("acctor", tensors())

        async def wait() -> None:
            match call:
                case "fetch":
                    await hub.fetch("acctor", timeout=math.inf)
                case "wait_for":
                    await hub.wait_for("acctor", at_least=1, timeout=math.inf)
                case "watch":
                    await anext(hub.watch("acctor"))
                case _:
                    await getattr(weights, call)(timeout=math.inf)

        tasks.start_soon(wait)
        await until(lambda: HINT in caplog.text)
        told = [record.message for record in caplog.records if HINT in record.message]
        assert len(told) == 1
        assert "'acctor'" in told[0]
        assert call in told[0]
        assert "up_to_s='no limit'" in told[0] or call in ("wait_for", "watch")
        tasks.cancel_scope.cancel()


async def test_who_waits_for_a_version_that_is_there_is_told_nothing(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with cluster("trainer", "reader") as c:
        source = await c.hubs[0].register("m", tensors())
        await source.publish(1)
        weights = await c.hubs[1].register("m", tensors(0))
        await weights.replicate()
        await c.hubs[1].wait_for("m", at_least=1)
        await c.hubs[1].fetch("m")
        assert HINT not in caplog.text


async def test_an_archiver_of_an_empty_model_waits_on_purpose(
    caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    pytest.importorskip("obstore", reason="the extra archive is not installed")
    begin_store()
    options = replace(OPTIONS, host_memory_bytes=2**20)
    async with (
        cluster("archiver", options=options) as c,
        tensorhub.archive(c.hubs[0], "acctor", f"file://{tmp_path}"),
    ):
        await c.hubs[0].describe()  # answered after the model's newest
        assert HINT not in caplog.text
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(partial(c.hubs[0].wait_for, "acctor", at_least=1))
            await until(lambda: HINT in caplog.text)
            tasks.cancel_scope.cancel()


async def test_to_ask_for_a_name_does_not_make_it_known() -> None:
    async with cluster("trainer", "reader") as c:
        assert c.hubs[1].newest("acctor") is None
        with pytest.raises(VersionUnavailable, match="no model 'acctor' is known here"):
            await c.hubs[1].describe("acctor")
        assert await c.hubs[1].describe() == ()


async def test_wait_for_zero_is_how_to_learn_what_exists() -> None:
    """`newest` knows nothing before the coordinator has answered its first question."""
    async with cluster("trainer", "reader") as c:
        source = await c.hubs[0].register("m", tensors())
        info = await source.publish(7)
        assert await c.hubs[1].wait_for("m", at_least=0) == info
        assert c.hubs[1].newest("m") == info


async def test_without_a_deadline_it_waits_until_it_succeeds_or_fails_or_is_cancelled_or_the_hub_ends() -> (
    None
):
    async with cluster("trainer", "reader") as c:
        source = await c.hubs[0].register("m", tensors())
        weights = await c.hubs[1].register("m", tensors(0))
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(weights.replicate, "latest", math.inf)
            await until(lambda: weights._handle.member.running is not None)
            await source.publish(1, timeout=math.inf)  # success
        assert weights.version == 1
        with pytest.raises(VersionUnavailable, match="not published yet"):  # failure
            await weights.update(9, timeout=math.inf)
        async with anyio.create_task_group() as tasks:  # cancellation
            tasks.start_soon(lambda: weights.update(at_least=9, timeout=math.inf))
            await until(lambda: weights._handle.member.running is not None)
            tasks.cancel_scope.cancel()
        async with anyio.create_task_group() as tasks:  # the end

            async def wait() -> None:
                with pytest.raises(StateError, match="the hub was closed"):
                    await weights.update(at_least=9, timeout=math.inf)

            tasks.start_soon(wait)
            await until(lambda: weights._handle.member.running is not None)
            await c.hubs[1].close()
