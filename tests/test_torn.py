"""A fill that was broken off leaves what it had verified: a retry reads the rest only (R9, G8)."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import anyio
import pytest

import tensorhub
from tensorhub.api.weights import Weights
from tensorhub.errors import StateError, TensorHubError
from tensorhub.types import FetchReport, Options
from tests.rig import (
    CHUNK_BYTES,
    CHUNKS,
    OPTIONS,
    Gate,
    Tensors,
    cluster,
    connect,
    gated,
    handle_of,
    holds,
    nothing_left,
    published,
    tensors,
    until,
    worker_of,
    write,
)

pytestmark = pytest.mark.anyio
HAD = 5  # chunks that the broken fill has verified


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@dataclass
class Torn:
    """A reader whose fill was cancelled when it had `HAD` chunks."""

    gate: Gate
    trainer: Weights
    source: Tensors
    reader: Weights
    memory: Tensors


async def break_off(weights: Weights, gate: Gate) -> None:
    gate.close(HAD)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(weights.replicate)
        await until(lambda: gate.holds)
        tasks.cancel_scope.cancel()
    gate.open()
    assert weights.state == "torn"


@asynccontextmanager
async def torn(options: Options = OPTIONS) -> AsyncIterator[Torn]:
    with gated(HAD) as gate:
        async with cluster("trainer", "reader", options=options) as c:
            source, memory = tensors(1), tensors()
            trainer, reader = (
                await c.hubs[0].register("m", source),
                await c.hubs[1].register("m", memory),
            )
            await trainer.publish(1)
            await break_off(reader, gate)
            yield Torn(gate, trainer, source, reader, memory)


def check(report: FetchReport, memory: Tensors, *, reads: int, content: int = 1) -> None:
    assert holds(memory, content)
    assert (report.bytes_read, report.reread_bytes) == (reads * CHUNK_BYTES, 0)
    assert sum(report.phases.values()) == pytest.approx(report.seconds)


@pytest.mark.parametrize("times", [1, 2])
async def test_a_retry_reads_the_rest(times: int) -> None:
    async with torn() as it:
        for _ in range(times - 1):
            await break_off(it.reader, it.gate)
        check(await it.reader.replicate(), it.memory, reads=CHUNKS - times * HAD)


async def test_a_chunk_that_was_written_meanwhile_is_read_again() -> None:
    async with torn() as it:
        it.memory["a"][0] ^= 1
        check(await it.reader.replicate(), it.memory, reads=CHUNKS - HAD + 1)


async def test_what_is_kept_is_served_while_the_rest_is_read() -> None:
    async with torn() as it:
        it.gate.close(0)
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(it.reader.replicate)
            await until(lambda: it.gate.holds)
            held = it.reader._handle.member.content
            assert held is not None
            handle = handle_of(it.reader)
            assert handle._owner.has(handle._registration, held.generation, 9) == ((0, HAD),)
            it.gate.open()
        assert holds(it.memory, 1)


async def test_across_a_restart_of_the_coordinator(tmp_path: Path) -> None:
    """It is the worker's own knowledge: nobody else has to remember anything."""
    with gated(HAD) as gate:
        async with nothing_left(), AsyncExitStack() as stack:
            async with tensorhub.serve(
                token="", options=OPTIONS, state_dir=tmp_path
            ) as coordinator:
                port = int(coordinator.address.rpartition(":")[2])
                trainer = await stack.enter_async_context(connect(coordinator.address, "trainer"))
                reader = await stack.enter_async_context(connect(coordinator.address, "reader"))
                await published(trainer)
                memory = tensors()
                weights = await reader.register("m", memory)
                await break_off(weights, gate)
            async with tensorhub.serve(port=port, token="", options=OPTIONS, state_dir=tmp_path):
                await until(
                    lambda: worker_of(trainer).link.online and worker_of(reader).link.online
                )
                check(await weights.replicate(), memory, reads=CHUNKS - HAD)
                await stack.aclose()


async def test_it_is_published_only_after_its_caller_says_that_it_was_written_anew() -> None:
    async with torn() as it:
        with pytest.raises(StateError, match=r"torn: .*unpublish\(\)") as caught:
            await it.reader.publish(2)
        assert (caught.value.memory, it.reader.state) == ("torn", "torn")
        with pytest.raises(StateError, match="is torn") as caught:
            async with it.reader.mutate(2):
                pytest.fail("the body ran")
        assert (caught.value.memory, it.reader.state) == ("torn", "torn")
        write(it.memory, 2)
        await it.reader.unpublish()
        assert it.reader.state == "empty"
        assert (await it.reader.publish(2)).version == 2
        await it.trainer.update()
        assert holds(it.source, 2)


async def test_every_error_of_a_call_says_that_the_memory_is_torn_still() -> None:
    async with torn() as it:
        for call in (
            partial(it.reader.update, 9, timeout=0.05),
            partial(it.reader.replicate, "lastest"),
            partial(it.reader.prefetch),  # there is no host memory
            partial(it.reader.publish, "1"),  # type: ignore[arg-type]
        ):
            with pytest.raises(TensorHubError) as caught:
                await call()
            assert (caught.value.memory, it.reader.state) == ("torn", "torn")
        with pytest.raises(TensorHubError) as caught:
            async with it.reader.mutate(-1):
                pytest.fail("the body ran")
        assert caught.value.memory == "torn"
        await it.reader.update()
        with pytest.raises(TensorHubError) as caught:
            await it.reader.update("lastest")
        assert caught.value.memory == "intact"
