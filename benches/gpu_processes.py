"""The processes of the GPU benchmarks: each does what its pipe says, and ends with it. See
`remotes`.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Mapping
from contextlib import AsyncExitStack
from multiprocessing.connection import Connection
from typing import Any

import anyio
import anyio.to_thread
import torch

import tensorhub
from benches.remotes import Commands, obey
from tensorhub.cuda.cupy_device import cuda_device

Tensors = Mapping[str, torch.Tensor]
MODELS = {"digested": True, "plain": False}  # whether there are digests


def tensors_of(nbytes: int, each: int, device: str, *, random: bool) -> dict[str, torch.Tensor]:
    """So many bytes, in tensors of `each` bytes, all of which have been touched."""
    count = max(1, nbytes // each)
    made = {
        f"t{number}": torch.empty(each, dtype=torch.uint8, device=device) for number in range(count)
    }
    for number, tensor in enumerate(made.values()):
        if random:
            tensor[: 2**20].random_(0, 256)
            tensor[2**20 :].fill_(number % 251)
        else:
            tensor.zero_()
    return made


def _synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def sum_of(tensors: Tensors) -> int:
    """Of all bytes, some at a time: torch takes eight times what it sums as int64."""
    flat = [
        tensor.view(-1)[start : start + 2**26]
        for tensor in tensors.values()
        for start in range(0, tensor.numel(), 2**26)
    ]
    return sum([int(part.sum(dtype=torch.int64)) for part in flat])


def publisher_main(
    pipe: Connection, nbytes: int, each: int, device: str, chunk_bytes: int = 4 * 2**20
) -> None:
    """A coordinator, and a publisher of one set of tensors under each name of MODELS."""
    anyio.run(_publisher, pipe, nbytes, each, device, chunk_bytes)


async def _publisher(
    pipe: Connection, nbytes: int, each: int, device: str, chunk_bytes: int
) -> None:
    own = tensors_of(nbytes, each, device, random=True)
    async with AsyncExitStack() as stack:
        coordinator = await stack.enter_async_context(tensorhub.serve())
        handles = await _handles(stack, coordinator.address, "publisher", own, chunk_bytes, None)

        async def publish(version: int) -> float:
            started = time.monotonic()
            for handle in handles.values():
                await handle.publish(version)
            return time.monotonic() - started

        async def unpublish() -> float:
            started = time.monotonic()
            for handle in handles.values():
                await handle.unpublish()
            return time.monotonic() - started

        async def total() -> int:
            return await anyio.to_thread.run_sync(sum_of, own)

        pipe.send(
            (True, (coordinator.address, {name: tensor.nbytes for name, tensor in own.items()}))
        )
        await obey(pipe, {"publish": publish, "unpublish": unpublish, "sum": total})


async def _handles(
    stack: AsyncExitStack,
    address: str,
    name: str,
    own: Tensors,
    chunk_bytes: int,
    transports: tuple[str, ...] | None,
) -> dict[str, tensorhub.Weights]:
    handles: dict[str, tensorhub.Weights] = {}
    for model, is_digested in MODELS.items():
        options = tensorhub.Options(
            op_timeout_s=120, chunk_bytes=chunk_bytes, integrity=is_digested
        )
        connecting = tensorhub.connect(
            address, name=f"{name}-{model}", transports=transports, options=options
        )
        hub = await stack.enter_async_context(connecting)
        handles[model] = await hub.register(model, own)
    return handles


def reader_main(
    pipe: Connection,
    address: str,
    nbytes: int,
    each: int,
    device: str,
    transports: tuple[str, ...],
    number: int = 0,
) -> None:
    """A reader, which also copies as many bytes within its own GPU."""
    anyio.run(_reader, pipe, address, nbytes, each, device, transports, number)


async def _reader(
    pipe: Connection,
    address: str,
    nbytes: int,
    each: int,
    device: str,
    transports: tuple[str, ...],
    number: int,
) -> None:
    own = tensors_of(nbytes, each, device, random=False)
    async with AsyncExitStack() as stack:
        handles = await _handles(stack, address, f"reader-{number}", own, 4 * 2**20, transports)
        pipe.send((True, None))
        await obey(pipe, _commands(own, handles))


def _commands(own: Tensors, handles: Mapping[str, tensorhub.Weights]) -> Commands:
    async def fetch(model: str, version: int) -> dict[str, Any]:
        """What a fetch took: the report's phases, and the stall, from where the engine is to
        pause.
        """
        paused: list[float] = []

        async def pause(info: object) -> None:
            paused.append(time.monotonic())

        report = await handles[model].update(version, before_write=pause)
        stall_s = time.monotonic() - paused[0] if paused else report.seconds
        used = sorted({source.transport for source in report.sources})
        return {
            "seconds": report.seconds,
            "stall": stall_s,
            "phases": dict(report.phases),
            "transports": used,
        }

    async def unpublish(model: str) -> None:
        await handles[model].unpublish()

    async def total() -> int:
        return await anyio.to_thread.run_sync(sum_of, own)

    async def bare() -> float:
        return await anyio.to_thread.run_sync(bare_copy, own)

    async def clear() -> None:
        for tensor in own.values():
            tensor.zero_()
        _synchronize()

    return {"fetch": fetch, "unpublish": unpublish, "sum": total, "bare": bare, "clear": clear}


def bare_copy(own: Tensors) -> float:
    """Seconds of a plain device-to-device copy of as many bytes into these tensors, by one copy for
    each.
    """
    source = torch.empty(
        max(tensor.nbytes for tensor in own.values()), dtype=torch.uint8, device="cuda"
    )
    source.fill_(1)
    torch.cuda.synchronize()
    started = time.perf_counter()
    for tensor in own.values():
        tensor.copy_(source[: tensor.nbytes])
    torch.cuda.synchronize()
    return time.perf_counter() - started


# ----------------------------------------------------------------------------------------- the
# smallest proof, and a peer


def exporter_main(pipe: Connection) -> None:
    """Export a tensor that lies somewhere within torch's own allocation, as the library does."""
    first, second = (
        torch.zeros(1000, device="cuda"),
        torch.arange(1000, device="cuda", dtype=torch.float32),
    )
    torch.cuda.synchronize()
    allocation = cuda_device(0).export(second.data_ptr())
    pipe.send((True, (allocation.handle, second.data_ptr() - allocation.address, first.numel())))
    with contextlib.suppress(EOFError):
        pipe.recv()


def gloo_main(
    pipe: Connection, rank: int, world: int, address: str, nbytes: int, each: int
) -> None:
    """A rank that gets its tensors by torch.distributed's broadcast; NCCL takes one rank for each
    GPU only.
    """
    import torch.distributed as dist

    own = tensors_of(nbytes, each, "cuda", random=rank == 0)
    dist.init_process_group("gloo", init_method=address, rank=rank, world_size=world)
    pipe.send((True, None))

    async def broadcast() -> float:
        def run() -> float:
            started = time.monotonic()
            for tensor in own.values():
                dist.broadcast(tensor, 0)
            torch.cuda.synchronize()
            return time.monotonic() - started

        return await anyio.to_thread.run_sync(run)

    commands: Commands = {"broadcast": broadcast}
    anyio.run(obey, pipe, commands)
