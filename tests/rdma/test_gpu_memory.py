"""GPU memory over a real device, with a stand-in for the GPU: reached by the device, or copied
through the host.
"""

from __future__ import annotations

import errno
from typing import Any

import pytest
import torch

from tensorhub.api.tools import register_memory
from tensorhub.memory.tensors import RegisteredMemory
from tensorhub.testing.conformance import CHECKS
from tensorhub.testing.serving import ServedSource
from tensorhub.transport import staging
from tensorhub.transport.rdma import verbs
from tensorhub.transport.rdma.ports import usable_ports
from tensorhub.transport.rdma.queues import Fabric
from tensorhub.transport.rdma.reader import RdmaTransport
from tensorhub.transport.registry import Local
from tensorhub.transport.staging import PIECE_BYTES
from tensorhub.types import Incarnation, Options
from tests.cuda.double import Double
from tests.rig import cluster
from tests.transport.fabric import OwnRdma

pytestmark = pytest.mark.rdma
SECRET = b"a secret of the test"
MIB = 2**20
SIZES = {"large": 20 * MIB + 5, "odd": 3 * MIB + 1, "small": 3, "none": 0}


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture(autouse=True)
def _reach(monkeypatch: pytest.MonkeyPatch) -> None:
    """(The double's memory is the host's: the device reaches all of it.)"""
    real = verbs.register_on

    def register_on(device: Any, domain: Any, address: int, nbytes: int) -> tuple[Any, int]:
        if device.unreachable:
            raise OSError(errno.EFAULT, device.unreachable)
        return real(device, domain, address, nbytes)

    monkeypatch.setattr(verbs, "register_on", register_on)


def gpu(is_reached: bool) -> Double:
    made = Double()
    made.unreachable = "" if is_reached else "there is no peer memory"
    return made


@pytest.mark.parametrize("is_reached", [True, False])
@pytest.mark.parametrize("check", CHECKS)
def test_the_transport_keeps_the_rule(
    check: str, is_reached: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(staging, "PIECE_BYTES", 2**16)  # a guest takes a second to register 32 MiB
    device = gpu(is_reached)
    transport = RdmaTransport(
        Local(
            Incarnation("reader"), (SECRET,), Options(stall_timeout_s=2.0, connect_timeout_s=15.0)
        )
    )
    CHECKS[check](
        transport, lambda: ServedSource(SECRET, side=OwnRdma(Fabric(usable_ports())), device=device)
    )
    transport.close()
    transport.fabric.close()
    assert (device.pinned_bytes if is_reached else device.settled) == 0


def tensors(seed: int | None) -> dict[str, torch.Tensor]:
    if seed is None:
        return {name: torch.zeros(size, dtype=torch.uint8) for name, size in SIZES.items()}
    made = torch.Generator().manual_seed(seed)
    return {
        name: torch.randint(0, 256, (size,), generator=made, dtype=torch.uint8)
        for name, size in SIZES.items()
    }


@pytest.mark.anyio
@pytest.mark.parametrize("integrity", [True, False])
@pytest.mark.parametrize(
    ("source", "target"), [(True, True), (False, False), (False, None), (None, False)]
)
async def test_versions_go_between_host_and_gpu(
    source: bool | None, target: bool | None, integrity: bool
) -> None:
    """Whether they are reached by the device; None: in host memory. Chunks are larger than what is
    staged at a time.
    """
    options = Options(op_timeout_s=60, chunk_bytes=16 * MIB, integrity=integrity)
    theirs, mine = (None if each is None else gpu(each) for each in (source, target))
    held, memory = tensors(1), tensors(None)
    async with cluster("trainer", "reader", options=options, transports=("rdma",)) as made:
        published_memory, filled = RegisteredMemory(held), RegisteredMemory(memory)
        published_memory.device, filled.device = theirs, mine
        published = await register_memory(made.hubs[0], "m", published_memory)
        weights = await register_memory(made.hubs[1], "m", filled)
        for version in (1, 2, 3):
            await published.publish(version)
            report = await weights.update()
            assert [each.transport for each in report.sources] == ["rdma"]
            assert [report.retries, report.reread_bytes] == [0, 0]
            assert all(torch.equal(memory[name], held[name]) for name in held)
            await published.unpublish()
            for name, tensor in tensors(version + 1).items():
                held[name].copy_(tensor)
    for device, is_reached in ((theirs, source), (mine, target)):
        # kept, for all versions
        assert device is None or device.pinned_bytes == (0 if is_reached else 4 * PIECE_BYTES)
