"""On a real GPU: what the tests with a stand-in cannot show. `make gpu` runs these, and the
benchmarks.
"""

from __future__ import annotations

import contextlib
import os
import random
import threading
from collections.abc import Iterator
from typing import Any

import anyio.to_thread
import pytest
import torch
import xxhash

import tensorhub
from benches.gpu_processes import publisher_main
from benches.remotes import Remote
from tensorhub.compaction.packing import PackedOnDevice
from tensorhub.cuda.copies import copy_pieces
from tensorhub.cuda.cupy_device import CudaDevice, cuda_device
from tensorhub.cuda.device import DeviceBytes
from tensorhub.errors import RegistrationError, StaleWeightsWarning, StateError, TensorHubError
from tensorhub.memory.addresses import copy_bytes
from tensorhub.memory.tensors import RegisteredMemory
from tensorhub.testing.conformance import CHECKS
from tensorhub.testing.serving import ServedSource
from tensorhub.testing.strided_target import bytes_of
from tensorhub.transport.cuda_ipc import CudaIpcTransport
from tensorhub.transport.registry import Local
from tensorhub.transport.tcp import TcpTransport
from tensorhub.types import Incarnation, Options
from tests.rig import WAIT_S, cluster

pytestmark = [pytest.mark.anyio, pytest.mark.gpu]
OPTIONS = Options(op_timeout_s=60, chunk_bytes=2**20, host_memory_bytes=2**30)
SECRET = b"a secret of the test"


def on_gpu(device: CudaDevice, content: bytes, shift: int = 0) -> DeviceBytes:
    """These bytes, `shift` behind a multiple of 256."""
    made = device.allocate(len(content) + shift)[shift:]
    if content:
        copy_bytes(memoryview(bytearray(content)), made)
    return made


def tensors(value: int | None) -> dict[str, torch.Tensor]:
    sizes = {
        "large": 6 * 2**20 + 3,
        "odd": 70_001,
        "small": 3,
        "none": 0,
        **{f"tiny.{n}": 100 + n for n in range(50)},
    }
    if value is None:
        return {
            name: torch.zeros(size, dtype=torch.uint8, device="cuda")
            for name, size in sizes.items()
        }
    made = torch.Generator("cuda").manual_seed(value)
    return {
        name: torch.randint(0, 256, (size,), dtype=torch.uint8, device="cuda", generator=made)
        for name, size in sizes.items()
    }


def equal(some: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return all(torch.equal(some[name].cpu(), tensor.cpu()) for name, tensor in other.items())


# --------------------------------------------------------------------------------------------------
# the device


def test_digests_are_the_cpus(device: CudaDevice) -> None:
    chance = random.Random(3)
    sizes = [
        *range(600),
        *(chance.randrange(300_000) for _ in range(60)),
        4 * 2**20,
        4 * 2**20 + 17,
    ]
    contents = [chance.randbytes(size) for size in sizes]
    held = [
        on_gpu(device, content, size % 16) for size, content in zip(sizes, contents, strict=True)
    ]
    made = device.digests([(each.address, each.nbytes) for each in held])
    assert made == [xxhash.xxh3_64_intdigest(content) for content in contents]


def test_what_is_packed_is_unpacked(device: CudaDevice) -> None:
    chance = random.Random(4)
    contents = [
        chance.randbytes(chance.choice((0, 1, 7, 4096, 16_384, 200_001))) for _ in range(300)
    ]
    pieces, end = [], 0
    for number, content in enumerate(contents):
        pieces.append((end, on_gpu(device, content, number % 5)))
        end += -(-len(content) // 16) * 16
    packed = PackedOnDevice(device, end, pieces)
    packed.pack()
    whole = bytes_of(packed.buffer)
    for (offset, _), content in zip(pieces, contents, strict=True):
        assert whole[offset : offset + len(content)] == content
    for _, piece in pieces:
        if piece.nbytes:
            copy_bytes(memoryview(bytearray(piece.nbytes)), piece)
    packed.unpack()
    assert [bytes_of(piece) for _, piece in pieces] == contents


def test_other_devices_get_a_dma_buf_or_a_reason(device: CudaDevice) -> None:
    source = on_gpu(device, bytes(3_000_001))
    with contextlib.suppress(StateError):  # a driver or a kernel without them
        descriptor, start = device.dma_buf(source.address, source.nbytes)
        assert "dmabuf" in os.readlink(f"/proc/self/fd/{descriptor}")
        assert start <= source.address
        os.close(descriptor)
    device.settle()


def test_a_lack_of_memory_says_what_to_do(device: CudaDevice) -> None:
    with pytest.raises(StateError, match=r"out of memory: free some: torch\.cuda\.empty_cache"):
        device.allocate(2**44)
    assert device.digests([(on_gpu(device, b"x").address, 1)])  # and nothing else is wrong


def test_a_copy_may_cross_from_one_allocation_to_the_next(device: CudaDevice) -> None:
    import cupy

    size, runtime = 2 * 2**20, cupy.cuda.runtime
    taken = sorted(runtime.malloc(size) for _ in range(64))
    try:
        adjacent = [each for each in taken if each + size in taken]
        if not adjacent:
            pytest.skip("no two allocations are adjacent here")
        content = random.Random(8).randbytes(2 * size)
        source, queue = on_gpu(device, content), device.queue()
        assert queue.room(adjacent[0] + 5) == size - 5
        for by_kernel in (False, True):
            pieces = [
                (adjacent[0] + at, source.address + at, size // 4)
                for at in range(0, 2 * size, size // 4)
            ]
            copy_pieces(queue, pieces, by_kernel=by_kernel)
            queue.mark().wait()
            back = device.allocate(2 * size)
            copy_pieces(queue, [(back.address, adjacent[0], 2 * size)])
            queue.mark().wait()
            assert bytes_of(back) == content
    finally:
        for each in taken:
            runtime.free(each)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="there is one GPU only")
def test_many_pieces_of_another_gpu_are_copied_without_a_kernel(device: CudaDevice) -> None:
    content, other = random.Random(6).randbytes(100_000), cuda_device(1)
    source, target, queue = on_gpu(other, content), device.allocate(100_000), device.queue()
    assert not device.owns(source.address)
    pieces = [(target.address + at, source.address + at + 1, 99) for at in range(0, 100_000, 100)]
    copy_pieces(queue, pieces, by_kernel=False)
    queue.mark().wait()
    assert bytes_of(target[:99]) == content[1:100]


def test_a_capture_goes_on_while_other_threads_use_the_gpu(device: CudaDevice) -> None:
    held, graph, failures = (
        torch.zeros(1000, device="cuda"),
        torch.cuda.CUDAGraph(),
        list[BaseException](),
    )

    def work() -> None:
        try:
            other = on_gpu(device, b"another thread's" * 4096)
            assert len(device.digests([(other.address, other.nbytes)])) == 1
            assert bytes_of(other)[:7] == b"another"
            device.allocate(300 * 2**20)
        except BaseException as error:
            failures.append(error)

    work()  # kernels are compiled by now
    thread = threading.Thread(target=work)
    with torch.cuda.graph(graph):  # in the mode that forbids it to other threads
        held += 1
        thread.start()
        thread.join()
        with pytest.raises(StateError, match="a CUDA graph is being captured"):
            device.stream_sync()
        held += 1
    assert not failures
    graph.replay()
    assert held.tolist() == [2] * 1000


@pytest.mark.parametrize("check", CHECKS)
@pytest.mark.parametrize("kind", [TcpTransport, CudaIpcTransport])
def test_a_transport_keeps_the_rule(
    device: CudaDevice, kind: type[TcpTransport | CudaIpcTransport], check: str
) -> None:
    transport = kind(
        Local(
            Incarnation("reader"),
            (SECRET,),
            Options(
                stall_timeout_s=1.0 if check == "silence" else WAIT_S, connect_timeout_s=WAIT_S
            ),
        )
    )
    try:
        CHECKS[check](
            transport, lambda: ServedSource(SECRET, side=transport.serve(), device=device)
        )
    finally:
        transport.close()


# --------------------------------------------------------------------------------------------------
# whole clusters


@pytest.mark.parametrize("transports", [("cuda_ipc",), ("tcp",)])
@pytest.mark.parametrize("pack_bytes", [0, 4096])
async def test_a_version_goes_from_gpu_to_gpu(transports: tuple[str, ...], pack_bytes: int) -> None:
    held, memory = tensors(1), tensors(None)
    options = Options(op_timeout_s=60, chunk_bytes=2**20, pack_bytes=pack_bytes)
    async with cluster("trainer", options=options) as made:
        published = await made.hubs[0].register("m", held)
        connecting = tensorhub.connect(
            made.coordinator.address, name="reader", token="", transports=transports
        )
        async with connecting as hub:
            weights = await hub.register("m", memory)
            for version in (1, 2, 3):
                async with published.mutate(version):
                    for name, tensor in tensors(version).items():
                        held[name].copy_(tensor)
                report = await weights.update()
                assert [each.transport for each in report.sources] == list(transports)
                assert equal(memory, held)


async def test_between_host_and_gpu_and_out_of_host_copies() -> None:
    held, memory = {name: tensor.cpu() for name, tensor in tensors(1).items()}, tensors(None)
    async with cluster("trainer", "reader", options=OPTIONS) as made:
        published, weights = (
            await made.hubs[0].register("m", held),
            await made.hubs[1].register("m", memory),
        )
        await published.publish(1)
        await weights.prefetch()
        report = await weights.update()
        assert (report.bytes_read, equal(memory, held)) == (0, True)
        async with published.mutate(2):
            held["large"][5] ^= 1
        await weights.update(staged=True)
        assert equal(memory, held)
        await published.close()
        back = await made.hubs[0].fetch("m", device="cpu")
        assert equal(dict(back), held)
        fetched = await made.hubs[0].fetch("m", device="cuda")
        assert all(tensor.is_cuda for tensor in fetched.values())
        assert equal(dict(fetched), held)


async def test_a_publish_waits_for_the_callers_stream() -> None:
    held, memory = (
        {"w": torch.zeros(2**22, device="cuda")},
        {"w": torch.zeros(2**22, device="cuda")},
    )
    stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    async with cluster("trainer", "reader", options=OPTIONS) as made:
        published, weights = (
            await made.hubs[0].register("m", held),
            await made.hubs[1].register("m", memory),
        )
        with torch.cuda.stream(stream):
            torch.cuda._sleep(400_000_000)  # type: ignore[no-untyped-call]  # cycles: some 0.2 s
            held["w"].fill_(7)
            await published.publish(1)
        await weights.replicate()
        assert bool(memory["w"].eq(7).all())


async def test_a_module_is_never_stale_and_autograd_sees_an_update() -> None:
    async with cluster("trainer", "reader", options=OPTIONS) as made:
        policy, mine = (torch.nn.Linear(1024, 1024, device="cuda") for _ in range(2))
        source, weights = (
            await made.hubs[0].register("m", policy),
            await made.hubs[1].register("m", mine),
        )
        with torch.no_grad():
            async with source.mutate(1):
                policy.weight.add_(1)
        async with source.mutate(2):
            policy.weight.data.add_(1)  # moves no count: its bytes are sampled
        loss = mine(torch.ones(2, 1024, device="cuda", requires_grad=True)).sum()
        assert (await weights.replicate()).version == 2
        assert torch.equal(mine.weight, policy.weight)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            torch.autograd.backward(loss)
        with pytest.warns(StaleWeightsWarning, match="written no registered tensor"):
            async with source.mutate(3):
                pass
        policy.half()
        with pytest.raises(RegistrationError, match=r"'weight': its dtype is torch\.float16"):
            await source.publish(4)


def test_a_sample_waits_for_nothing_before_it_is_compared(device: CudaDevice) -> None:
    memory = RegisteredMemory(torch.nn.Linear(4096, 4096, device="cuda"))
    assert memory.watch() is not None  # what is made once
    torch.cuda.synchronize()
    cuda: Any = torch.cuda
    cuda._sleep(2_000_000_000)  # about a second
    busy = cuda.Event()
    busy.record()
    is_unwritten = memory.watch()
    memory.count_write()
    assert is_unwritten is not None
    assert not is_unwritten()
    assert not busy.query()
    torch.cuda.synchronize()


# --------------------------------------------------------------------------------------------------
# other processes


@pytest.fixture
def publisher() -> Iterator[Remote]:
    yield from _publisher("")


@pytest.fixture
def expandable_publisher() -> Iterator[Remote]:
    yield from _publisher("expandable_segments:True")


def _publisher(setting: str) -> Iterator[Remote]:
    before = os.environ.pop("PYTORCH_CUDA_ALLOC_CONF", None)
    if setting:
        os.environ["PYTORCH_CUDA_ALLOC_CONF"] = setting
    remote = Remote("publisher", publisher_main, 64 * 2**20, 2**20, "cuda")
    try:
        yield remote
    finally:
        remote.end()
        os.environ.pop("PYTORCH_CUDA_ALLOC_CONF", None)
        if before is not None:
            os.environ["PYTORCH_CUDA_ALLOC_CONF"] = before


async def read(publisher: Remote, *, kill: bool = False) -> tuple[list[str], Any]:
    """Which transports it took, and the bytes' sum."""
    address, sizes = await anyio.to_thread.run_sync(publisher.hear)
    memory = {
        name: torch.zeros(size, dtype=torch.uint8, device="cuda") for name, size in sizes.items()
    }
    async with tensorhub.connect(address, name="reader") as hub:
        weights = await hub.register("digested", memory)
        await anyio.to_thread.run_sync(publisher.ask, "publish", 1)
        report = await weights.replicate()
        if kill:
            publisher.kill()
            with pytest.raises(TensorHubError):
                await weights.update("latest", at_least=2, timeout=3)
    return [each.transport for each in report.sources], sum(
        int(each.sum(dtype=torch.int64)) for each in memory.values()
    )


async def test_another_process_memory_is_opened(publisher: Remote) -> None:
    transports, found = await read(publisher)
    assert transports == ["cuda_ipc"]
    assert found == await anyio.to_thread.run_sync(publisher.ask, "sum")


async def test_its_death_is_a_typed_error_and_this_process_goes_on(publisher: Remote) -> None:
    transports, _ = await read(publisher, kill=True)
    assert transports == ["cuda_ipc"]
    assert int(torch.ones(10, device="cuda").sum()) == 10


async def test_expandable_segments_are_read_by_tcp(expandable_publisher: Remote) -> None:
    transports, found = await read(expandable_publisher)
    assert transports == ["tcp"]
    assert found == await anyio.to_thread.run_sync(expandable_publisher.ask, "sum")
