"""What users of weight transfer complain of, one test each, named after the complaint: none of it
happens here.

The list is that of public trackers of RL frameworks and transfer engines. Real sockets; real
processes where somebody dies.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator

import pytest

import tensorhub
from tensorhub.api.hub import Hub
from tests.processes.child_processes import ChildProcesses, child_processes
from tests.rig import Tensors, cluster, tensors, write

MIB = 2**20


@pytest.fixture
def processes(prepared: None) -> Iterator[ChildProcesses]:
    with child_processes("asyncio") as made:
        yield made


async def published(hub: Hub, version: int = 1) -> tuple[tensorhub.Weights, Tensors]:
    memory = tensors(version)
    weights = await hub.register("m", memory)
    await weights.publish(version)
    return weights, memory


# ------------------------------------------------------------------------------------ 7: no staged
# commit or rollback


# ------------------------------------------------------------------------------------- 10: memory
# overhead of staging


@pytest.mark.heavy
def test_10_memory_overhead_of_staging(processes: ChildProcesses) -> None:
    """A reader's peak memory grows by far less than what it reads: bytes go straight into its own
    tensors.
    """
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


# -------------------------------------------------------------------------------------------- 11:
# registering each time


async def test_11_memory_is_registered_anew_at_every_step() -> None:
    """Once per handle: the hundredth version costs what the second one did, and leaves no more
    behind.
    """
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


# --------------------------------------------------------------------------------------------------
# 15: packaging

SIGNATURES = {
    "serve": "(host, port, *, token, tls, state_dir, ha, options)",
    "connect": "(address, *, name, location, token, tls, transports, prefetch, options)",
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
