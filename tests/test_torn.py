"""A fill that was broken off leaves what it had verified: a retry reads the rest only (R9, G8)."""

from __future__ import annotations

from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import anyio
import pytest

import tensorhub
from tensorhub.types import FetchReport, Options
from tensorhub.weights import Weights
from tests.rig import (
    CHUNK_BYTES,
    CHUNKS,
    OPTIONS,
    Tensors,
    cluster,
    connect,
    gated,
    handle_of,
    holds,
    nothing_left,
    tensors,
    until,
    worker_of,
    write,
)

pytestmark = pytest.mark.anyio
HAD = 5  # chunks that the broken fill has verified


@pytest.fixture(params=["asyncio", "trio"])
def anyio_backend(request: pytest.FixtureRequest) -> str:
    return str(request.param)


async def break_off(weights: Weights, gate: Any) -> None:
    """A fill that is cancelled when it has `HAD` chunks."""
    gate.close(HAD)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(weights.replicate)
        await until(lambda: gate.holds)
        tasks.cancel_scope.cancel()
    gate.open()
    assert weights.state == "torn"


def check(report: FetchReport, memory: Tensors, *, reads: int, content: int = 1) -> None:
    assert holds(memory, content)
    assert (report.bytes_read, report.reread_bytes) == (reads * CHUNK_BYTES, 0)
    assert sum(report.phases.values()) == pytest.approx(report.seconds)
    assert report.phases["verify"] > 0


async def test_a_retry_reads_the_rest() -> None:
    with gated(HAD) as gate:
        async with cluster("trainer", "reader") as c:
            await (await c.hubs[0].register("m", tensors(1))).publish(1)
            memory = tensors()
            weights = await c.hubs[1].register("m", memory)
            await break_off(weights, gate)
            check(await weights.replicate(), memory, reads=CHUNKS - HAD)


async def test_a_second_broken_fill_keeps_both_parts() -> None:
    with gated(HAD) as gate:
        async with cluster("trainer", "reader") as c:
            await (await c.hubs[0].register("m", tensors(1))).publish(1)
            memory = tensors()
            weights = await c.hubs[1].register("m", memory)
            await break_off(weights, gate)
            await break_off(weights, gate)
            check(await weights.replicate(), memory, reads=CHUNKS - 2 * HAD)


async def test_what_was_written_meanwhile_is_read_again() -> None:
    with gated(HAD) as gate:
        async with cluster("trainer", "reader") as c:
            await (await c.hubs[0].register("m", tensors(1))).publish(1)
            memory = tensors()
            weights = await c.hubs[1].register("m", memory)
            await break_off(weights, gate)
            memory["a"][0] ^= 1
            check(await weights.replicate(), memory, reads=CHUNKS - HAD + 1)


async def test_without_digests_nothing_is_trusted() -> None:
    options = Options(op_timeout_s=30, chunk_bytes=CHUNK_BYTES, integrity=False)
    with gated(HAD) as gate:
        async with cluster("trainer", "reader", options=options) as c:
            await (await c.hubs[0].register("m", tensors(1))).publish(1)
            memory = tensors()
            weights = await c.hubs[1].register("m", memory)
            await break_off(weights, gate)
            report = await weights.replicate()
            assert holds(memory, 1)
            assert (report.bytes_read, report.reread_bytes) == (CHUNKS * CHUNK_BYTES, 0)


async def test_another_version_is_read_whole() -> None:
    with gated(HAD) as gate:
        async with cluster("trainer", "reader") as c:
            source = tensors(1)
            trainer = await c.hubs[0].register("m", source)
            await trainer.publish(1)
            memory = tensors()
            weights = await c.hubs[1].register("m", memory)
            await break_off(weights, gate)
            async with trainer.mutate(2):
                write(source, 2)
            check(await weights.replicate(), memory, reads=CHUNKS, content=2)


async def test_what_is_kept_is_served_while_the_rest_is_read() -> None:
    with gated(HAD) as gate:
        async with cluster("trainer", "reader") as c:
            source = await c.hubs[0].register("m", tensors(1))
            await source.publish(1)
            memory = tensors()
            weights = await c.hubs[1].register("m", memory)
            await break_off(weights, gate)
            gate.close(0)
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(weights.replicate)
                await until(lambda: gate.holds)
                held = weights._handle.member.content
                assert held is not None
                owner = worker_of(c.hubs[1])._owner
                registration = handle_of(weights)._registration
                assert owner.has(registration, held.generation, 9) == ((0, HAD),)
                gate.open()
            assert holds(memory, 1)


async def test_across_a_restart_of_the_coordinator(tmp_path: Path) -> None:
    """It is the worker's own knowledge: nobody else has to remember anything."""
    with gated(HAD) as gate:
        async with nothing_left(), AsyncExitStack() as stack:
            async with tensorhub.serve(token="", options=OPTIONS, state_dir=tmp_path) as coordinator:
                port = int(coordinator.address.rpartition(":")[2])
                trainer = await stack.enter_async_context(connect(coordinator.address, "trainer"))
                reader = await stack.enter_async_context(connect(coordinator.address, "reader"))
                await (await trainer.register("m", tensors(1))).publish(1)
                memory = tensors()
                weights = await reader.register("m", memory)
                await break_off(weights, gate)
            async with tensorhub.serve(port=port, token="", options=OPTIONS, state_dir=tmp_path):
                await until(lambda: worker_of(trainer).link.online and worker_of(reader).link.online)
                check(await weights.replicate(), memory, reads=CHUNKS - HAD)
                await stack.aclose()
