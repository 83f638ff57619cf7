"""What users hear where a GPU has no memory left, or another process' GPU memory cannot be opened:
an error or a fallback, with the reason; and all goes on when it is over. With a stand-in for the
device.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

import pytest
import torch

from tensorhub.api.hub import Hub
from tensorhub.api.tools import register_memory
from tensorhub.api.weights import Weights
from tensorhub.cuda import cupy_device
from tensorhub.cuda.cupy_device import failures
from tensorhub.cuda.device import DeviceBytes
from tensorhub.errors import StateError, VersionUnavailable
from tensorhub.memory.tensors import RegisteredMemory
from tensorhub.transport import segments as shm, unix
from tests.cuda.double import Double
from tests.rig import OPTIONS, cluster

pytestmark = pytest.mark.anyio
MIB = 2**20


class Full(Double):
    """One without room, until there is some."""

    is_full = True

    def _take(self, what: str, nbytes: int) -> None:
        with failures(what, nbytes):
            if self.is_full:
                raise MemoryError("cudaErrorMemoryAllocation: out of memory")

    def pinned(self, nbytes: int) -> memoryview:
        self._take("taking page-locked host memory", nbytes)
        return super().pinned(nbytes)

    def pin(self, view: memoryview) -> Callable[[], None]:
        self._take("page-locking host memory", view.nbytes)
        return super().pin(view)

    def allocate(self, nbytes: int) -> DeviceBytes:
        self._take(f"taking memory on {self.name}", nbytes)
        return super().allocate(nbytes)


Tensors = Mapping[str, torch.Tensor]


def tensors(value: int = 0) -> Tensors:
    sizes = {"large": MIB, "tiny.0": 40, "tiny.1": 40}
    return {name: torch.full((size,), value, dtype=torch.uint8) for name, size in sizes.items()}


def hold(those: Tensors, value: int) -> bool:
    return all(bool(tensor.eq(value).all()) for tensor in those.values())


async def register(hub: Hub, those: Tensors, device: Double | None) -> Weights:
    memory = RegisteredMemory(those)
    memory.device = device  # the double's memory is this process'
    return await register_memory(hub, "m", memory)


def warned(caplog: pytest.LogCaptureFixture, event: str) -> list[str]:
    said = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    return [text for text in said if f"event='{event}'" in text]


# --------------------------------------------------------------------------------------------------
# out of memory

STAGING = r"taking page-locked host memory \(4194304 bytes\): out of memory: free some"
PACKING = (
    r"taking memory on double:0 \(\d+ bytes\): out of memory: free some: torch.cuda.empty_cache\(\)"
)


@pytest.mark.parametrize(
    ("pack_bytes", "why"), [(0, STAGING), (4096, PACKING)], ids=["staging", "packing"]
)
async def test_a_reader_without_room_says_so_and_reads_when_there_is_some(
    pack_bytes: int, why: str
) -> None:
    device, memory = Full(), tensors()
    async with cluster(
        "trainer", "reader", options=replace(OPTIONS, pack_bytes=pack_bytes)
    ) as made:
        await (await register(made.hubs[0], tensors(1), Double())).publish(1)
        weights = await register(made.hubs[1], memory, device)
        with pytest.raises(StateError, match=why) as caught:
            await weights.replicate()
        assert (caught.value.retryable, weights.state) == (True, "torn")
        device.is_full = False
        assert (await weights.replicate()).version == 1
    assert hold(memory, 1)


async def test_a_publisher_without_room_says_so_and_has_published_nothing() -> None:
    device, memory = Full(), tensors()
    async with cluster("trainer", "reader", options=replace(OPTIONS, pack_bytes=4096)) as made:
        published = await register(made.hubs[0], tensors(1), device)
        with pytest.raises(StateError, match=PACKING) as caught:
            await published.publish(1)
        assert (caught.value.retryable, caught.value.memory, published.state) == (
            True,
            "intact",
            "empty",
        )
        assert made.hubs[1].newest("m") is None
        device.is_full = False
        await published.publish(1)
        await (await register(made.hubs[1], memory, None)).replicate()
    assert hold(memory, 1)


async def test_a_source_without_room_to_send_from_tells_its_reader_why(
    caplog: pytest.LogCaptureFixture,
) -> None:
    device, memory = Full(), tensors()
    async with cluster("trainer", "reader") as made:
        await (await register(made.hubs[0], tensors(1), device)).publish(1)
        weights = await register(made.hubs[1], memory, None)
        with pytest.raises(
            VersionUnavailable, match=f"reads that failed: worker 'trainer': {STAGING}"
        ):
            await weights.replicate(timeout=2)
        assert "taking page-locked host memory" in warned(caplog, "read_not_served")[0]
        device.is_full = False
        assert (await weights.replicate()).version == 1
    assert hold(memory, 1)


async def test_host_memory_that_cannot_be_page_locked_is_used_as_it_is(
    caplog: pytest.LogCaptureFixture,
) -> None:
    memory = tensors()
    async with cluster(
        "trainer", "reader", options=replace(OPTIONS, host_memory_bytes=8 * MIB)
    ) as made:
        await (await register(made.hubs[0], tensors(1), None)).publish(1)
        weights = await register(made.hubs[1], memory, Full())
        await weights.prefetch()
        assert (await weights.update()).bytes_read == 0
    assert hold(memory, 1)
    (text,) = warned(caplog, "memory_not_pinned")
    assert "page-locking host memory" in text


# ------------------------------------------------------------------------------------------------
# other processes' memory


@pytest.mark.skipif(shm.fault_here() is not None, reason=str(shm.fault_here()))
async def test_gpu_memory_of_a_process_that_has_ended_is_left_with_one_warning(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """As the driver says it of a handle whose process is gone; here its tensors can still be read
    by tcp.
    """

    class Gone(Double):
        def open(self, handle: bytes, nbytes: int) -> int:
            advice = "its process has ended, or that GPU is not visible here"
            raise StateError(
                f"its memory cannot be opened on {self.name}: "
                f"cudaErrorMapBufferObjectFailed: {advice}"
            )

    monkeypatch.setattr(cupy_device, "missing", lambda: None)
    monkeypatch.setattr(unix, "is_this_process", lambda descriptor: False)
    source = Double()
    block = bytearray(2 * MIB)
    source.bytes_of(block)
    whole = torch.frombuffer(block, dtype=torch.uint8)
    held = {"a": whole[:MIB], "b": whole[MIB:]}
    memory = {name: torch.zeros_like(tensor) for name, tensor in held.items()}
    async with cluster("trainer", "reader") as made:
        published, weights = (
            await register(made.hubs[0], held, source),
            await register(made.hubs[1], memory, Gone()),
        )
        for version in (1, 2):
            held["b"].fill_(version)
            await published.publish(version)
            report = await weights.update()
            assert [(each.transport, each.outcome) for each in report.sources] == [("tcp", "used")]
            assert torch.equal(memory["b"], held["b"])
            await published.unpublish()
    (text,) = warned(caplog, "transport_unusable")
    assert (
        "transport='cuda_ipc' source='trainer' reason='its memory cannot be opened on double:0"
        in text
    )
    assert "its process has ended" in text


# --------------------------------------------------------------------------------------------------
# two memories
