"""What users of weight transfer complain of, one test each, named after the complaint: none of it happens here.

The list is that of public trackers of RL frameworks and transfer engines. Real sockets; real processes where somebody dies.
"""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
from collections.abc import AsyncIterator, Callable, Iterator

import anyio
import pytest

import tensorhub
from tensorhub.api.hub import Hub
from tensorhub.types import FetchReport, Location, VersionInfo
from tests.processes.child_processes import ChildProcesses, Failed, child_processes
from tests.rig import CHUNK_BYTES, CHUNKS, OPTIONS, Tensors, cluster, gated, holds, tensors, until, write

MIB = 2**20
NBYTES = CHUNKS * CHUNK_BYTES  # of `tensors()`


@pytest.fixture
def processes(prepared: None) -> Iterator[ChildProcesses]:
    with child_processes("asyncio") as made:
        yield made


@contextlib.asynccontextmanager
async def located(address: str, name: str, site: str) -> AsyncIterator[Hub]:
    here = Location(site=site, host=name)
    async with tensorhub.connect(address, name=name, token="", options=OPTIONS, location=here) as hub:
        yield hub


async def published(hub: Hub, version: int = 1) -> tuple[tensorhub.Weights, Tensors]:
    memory = tensors(version)
    weights = await hub.register("m", memory)
    await weights.publish(version)
    return weights, memory


# ------------------------------------------------------------------------------------------------ 5: a gather on rank 0


async def test_05_everything_is_gathered_on_rank_0() -> None:
    """Each rank reads its own shard, from the rank that has it, and nothing else."""
    async with cluster("p0", "p1", "r0", "r1") as c:
        outs, ins = [tensors(10), tensors(11)], [tensors(), tensors()]
        publishers = [await c.hubs[n].register("m", outs[n], group="p", rank=n, world_size=2) for n in range(2)]
        readers = [await c.hubs[2 + n].register("m", ins[n], group="r", rank=n, world_size=2) for n in range(2)]
        reports: dict[int, FetchReport] = {}

        async def fill(rank: int) -> None:
            reports[rank] = await readers[rank].replicate()

        async with anyio.create_task_group() as tasks:
            for rank in range(2):
                tasks.start_soon(publishers[rank].publish, 1)
                tasks.start_soon(fill, rank)
        for rank in range(2):
            assert holds(ins[rank], 10 + rank)
            assert reports[rank].bytes_read == NBYTES
            assert [source.name for source in reports[rank].sources] == [f"p{rank}"]


# ------------------------------------------------------------------------------------ 7: no staged commit or rollback


async def test_07_no_staged_commit_or_rollback() -> None:
    options = dataclasses.replace(OPTIONS, host_memory_bytes=2 * NBYTES)
    async with cluster("trainer", "reader", "keeper", options=options) as c:
        source, memory = await published(c.hubs[0])
        mine = tensors()
        weights, keeper = await c.hubs[1].register("m", mine), await c.hubs[2].register("m", tensors())
        await weights.replicate()
        await keeper.replicate()
        await c.hubs[1].retain("m", latest=2)
        async with source.mutate(2):
            write(memory, 2)

        async def refuses(info: VersionInfo) -> None:
            raise RuntimeError("the engine does not pause")

        for staged in (False, True):  # staged: all of version 2 is here by then, beside version 1
            with pytest.raises(RuntimeError, match="does not pause"):
                await weights.update(before_write=refuses, staged=staged)
            assert (weights.version, holds(mine, 1)) == (1, True)
        await c.hubs[1].rollback("m", to=1)
        assert (await c.hubs[1].wait_for("m", at_least=0)).version == 1
        await until(lambda: source.state == "empty")
        assert (await c.hubs[0].fetch("m", "latest")).info.version == 1
        assert (await source.publish(2)).version == 2


# -------------------------------------------------------------------------------------- 8: stale peers, lost metadata


def test_08_stale_peers_and_lost_metadata(processes: ChildProcesses, tmp_path: object) -> None:
    """A dead worker is nobody's source once its lease is over, its successor is somebody else, and marks outlive a crash."""
    coordinator = processes.process("coordinator")
    address = coordinator.do("serve", lease_s=1.0, state_dir=str(tmp_path))
    port = int(address.rpartition(":")[2])
    trainer = processes.worker(address, "trainer", MIB)
    trainer.do("write", content=1)
    trainer.do("publish", version=1)
    holder = processes.worker(address, "holder", MIB, group="g")
    holder.do("replicate")
    holder.kill()
    coordinator.kill()
    again = processes.process("coordinator again")
    assert again.do("serve", lease_s=1.0, state_dir=str(tmp_path), port=port) == address
    successor = processes.worker(address, "successor", MIB, group="g")
    assert list(successor.do("replicate")["sources"]) == ["trainer"]
    assert successor.do("contents") == [1]
    assert successor.do("describe")["holders"] == ["successor", "trainer"]
    with pytest.raises(Failed, match="the newest number so far is 1"):
        trainer.do("mutate", version=1)


# ------------------------------------------------------------------------------------- 10: memory overhead of staging


def test_10_memory_overhead_of_staging(processes: ChildProcesses) -> None:
    """A reader's peak memory grows by far less than what it reads: bytes go straight into its own tensors."""
    coordinator = processes.process("coordinator")
    address = coordinator.do("serve")
    trainer, reader = (processes.worker(address, name, 256 * MIB) for name in ("trainer", "reader"))
    trainer.do("write", content=1)
    trainer.do("publish", version=1)
    reader.do("write", content=9)  # its pages are there before
    before = reader.do("peak_bytes")
    report = reader.do("replicate")
    assert report["bytes_read"] == 256 * MIB
    assert reader.do("peak_bytes") - before < 64 * MIB


# -------------------------------------------------------------------------------------------- 11: registering each time


async def test_11_memory_is_registered_anew_at_every_step() -> None:
    """Once per handle: the hundredth version costs what the second one did, and leaves no more behind."""
    async with cluster("trainer", "reader") as c:
        source, memory = await published(c.hubs[0])
        weights = await c.hubs[1].register("m", tensors())
        await weights.replicate()
        sizes = []
        registration = weights._handle.member.shard.registration
        for version in range(2, 30):
            async with source.mutate(version):
                write(memory, version)
            await weights.update()
            about = await c.hubs[0].describe("m")
            sizes.append((len(about.versions), len(about.replicas), len(about.leases)))
        assert weights._handle.member.shard.registration == registration
        assert max(sizes) == max(sizes[:5]) <= (4, 2, 0)


# -------------------------------------------------------------------------------------------- 12: across datacenters


async def test_12_every_reader_of_a_site_crosses_the_wan() -> None:
    """One of them does; the others read from it, while it is still being filled."""
    async with cluster() as c, located(c.address, "trainer", "west") as trainer:
        await published(trainer)
        with gated(2) as gate:
            async with contextlib.AsyncExitStack() as stack:
                names = [f"east{n}" for n in range(4)]
                hubs = [await stack.enter_async_context(located(c.address, name, "east")) for name in names]
                handles = [await hub.register("m", tensors()) for hub in hubs]
                reports: list[FetchReport] = []

                async def fill(weights: tensorhub.Weights) -> None:
                    reports.append(await weights.replicate())

                async with anyio.create_task_group() as tasks:
                    tasks.start_soon(fill, handles[0])
                    await until(lambda: gate.holds)
                    for weights in handles[1:]:
                        tasks.start_soon(fill, weights)
                    gate.open()
        crossed = sum(source.bytes_read for report in reports for source in report.sources if source.name == "trainer")
        assert crossed == NBYTES


# ------------------------------------------------------------------------------------------------------ 15: packaging

SIGNATURES = {
    "serve": "(host, port, *, token, state_dir, options)",
    "connect": "(address, *, name, location, token, transports, prefetch, options)",
    "Hub.register": "(self, model, tensors, *, group, rank, world_size, spot, sources, partial)",
    "Hub.retain": "(self, model, *, latest, timeout)",
    "Hub.pin": "(self, model, version, timeout)",
    "Hub.rollback": "(self, model, *, to, timeout)",
    "Hub.newest": "(self, model)",
    "Hub.wait_for": "(self, model, *, at_least, timeout)",
    "Hub.watch": "(self, model)",
    "Hub.fetch": "(self, model, selector, *, rank, names, device, timeout)",
    "Weights.publish": "(self, version, timeout)",
    "Weights.unpublish": "(self, timeout)",
    "Weights.mutate": "(self, version, timeout)",
    "Weights.replicate": "(self, selector, timeout)",
    "Weights.update": "(self, selector, *, at_least, before_write, staged, timeout)",
    "Weights.prefetch": "(self, selector, timeout)",
    "Weights.close": "(self, abandon)",
}


@pytest.mark.parametrize("name", SIGNATURES)
def test_15_signatures_that_churn(name: str) -> None:
    found = inspect.signature(getattr(tensorhub, name) if "." not in name else _method(name))
    words: list[str] = []
    for parameter in found.parameters.values():
        if parameter.kind is parameter.KEYWORD_ONLY and "*" not in words:
            words.append("*")
        words.append(parameter.name)
    assert f"({', '.join(words)})" == SIGNATURES[name]


def _method(name: str) -> Callable[..., object]:
    owner, _, method = name.partition(".")
    found: Callable[..., object] = getattr(getattr(tensorhub, owner), method)
    return found
