"""The processes of a benchmark: a coordinator, a publisher, receivers; each does what its pipe says and answers.

Every process ends when its pipe does, so that none outlives the benchmark.
"""

import ctypes
import hashlib
import resource
import time
from collections.abc import Callable, Mapping
from contextlib import AsyncExitStack
from functools import partial
from multiprocessing.connection import Connection

import anyio
import anyio.to_thread
import torch

import tensorhub
from benches.mixes import Mix
from benches.remotes import Command, Commands, obey
from tensorhub.cli.bench import bare

Models = Mapping[str, tensorhub.Options]
"""All of them are of the same tensors, each published by a hub with its options."""

MODELS: Models = {"digested": tensorhub.Options(), "plain": tensorhub.Options(integrity=False)}

# ----------------------------------------------------------------------------------------------- inside the processes


def coordinator_main(pipe: Connection) -> None:
    anyio.run(_coordinator, pipe)


def publisher_main(pipe: Connection, address: str, mix: Mix, models: Models = MODELS) -> None:
    anyio.run(_worker, pipe, address, mix, "publisher", models)


def receiver_main(pipe: Connection, address: str, mix: Mix, name: str, models: Models = MODELS) -> None:
    anyio.run(_worker, pipe, address, mix, name, models)


def rank_main(pipe: Connection, address: str, rank: int, world_size: int) -> None:
    anyio.run(_rank, pipe, address, rank, world_size)


async def _coordinator(pipe: Connection) -> None:
    async with tensorhub.serve() as coordinator:
        pipe.send((True, coordinator.address))
        await obey(pipe, {"cpu": _cpu})


async def _worker(pipe: Connection, address: str, mix: Mix, name: str, models: Models) -> None:
    torch.set_num_threads(1)
    memory = Memory(mix, random=name == "publisher")
    async with AsyncExitStack() as stack:
        handles: dict[str, tensorhub.Weights] = {}
        for model, options in models.items():
            connecting = tensorhub.connect(address, name=f"{name}-{model}", transports=("tcp",), options=options)
            hub = await stack.enter_async_context(connecting)
            handles[model] = await hub.register(model, memory.tensors)
        pipe.send((True, len(memory.tensors)))
        await obey(pipe, _commands(memory, handles))


async def _rank(pipe: Connection, address: str, rank: int, world_size: int) -> None:
    """One rank of the group `g` of the model `group`, with one small tensor."""
    async with tensorhub.connect(address, name=f"rank-{rank}") as hub:
        weights = await hub.register("group", {"w": torch.ones(1024)}, group="g", rank=rank, world_size=world_size)

        async def publish(version: int) -> None:
            await weights.publish(version)

        async def update() -> float:
            started = time.perf_counter()
            report = await weights.update()
            assert not report.changed
            return time.perf_counter() - started

        async def trip() -> float:
            started = time.perf_counter()
            await hub.describe("group")
            return time.perf_counter() - started

        pipe.send((True, None))
        await obey(pipe, {"publish": publish, "update": update, "trip": trip})


async def _cpu() -> float:
    """CPU seconds of this process so far, of all its threads, in user and kernel mode."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def _commands(memory: "Memory", handles: dict[str, tensorhub.Weights]) -> Commands:
    async def publish(model: str, version: int) -> float:
        start = time.monotonic()
        await handles[model].publish(version)
        return time.monotonic() - start

    async def fetch(model: str, version: int) -> tuple[float, float]:
        start = time.monotonic()
        await handles[model].replicate(version)
        return start, time.monotonic()

    async def unpublish(model: str) -> None:
        await handles[model].unpublish()

    return {
        "cpu": _cpu,
        "publish": publish,
        "fetch": fetch,
        "unpublish": unpublish,
        "change": _call(memory.change),
        "clear": _call(memory.clear),
        "sample": _call(memory.sample),
        "sha256": _call(memory.sha256),
        "listen": _call(memory.listen),
        "send": _call(memory.send),
        "receive": _call(memory.receive),
    }


def _call(function: Callable[..., object]) -> Command:
    async def called(*arguments: object) -> object:
        return await anyio.to_thread.run_sync(partial(function, *arguments))

    return called


class Memory:
    """The tensors of one process, in pages that have been touched."""

    def __init__(self, mix: Mix, *, random: bool) -> None:
        self.tensors: dict[str, torch.Tensor] = {}
        for number, size in enumerate(mix.sizes()):
            tensor = torch.empty(size // 4, dtype=torch.float32)
            words = tensor.view(torch.int32)
            words.random_() if random else words.fill_(1)
            self.tensors[f"tensor.{number:03}"] = tensor
        self._bytes = [tensor.view(torch.uint8) for tensor in self.tensors.values()]
        self._views = [_view(tensor) for tensor in self.tensors.values()]
        self._listener = bare.listen()

    def change(self) -> None:
        """Another content: one byte of every tensor is another."""
        for raw in self._bytes:
            raw[0] += 1

    def clear(self) -> None:
        for raw in self._bytes:
            raw.zero_()

    def sample(self) -> bytes:
        """The byte of every tensor that `change` changes, and its last one."""
        return bytes(view[at] for view in self._views for at in (0, -1))

    def sha256(self) -> str:
        total = hashlib.sha256()
        for view in self._views:
            total.update(view)
        return total.hexdigest()

    def listen(self) -> int:
        """The port of the bare copy."""
        return int(self._listener.getsockname()[1])

    def send(self, receivers: int, digests: bool) -> None:
        bare.send_all(self._listener, receivers, self._views, digests)

    def receive(self, port: int, digests: bool) -> tuple[float, float]:
        start = time.monotonic()
        bare.receive_all(port, self._views, digests)
        return start, time.monotonic()


def _view(tensor: torch.Tensor) -> memoryview:
    """The tensor's own bytes; valid while the tensor lives."""
    return memoryview((ctypes.c_char * tensor.nbytes).from_address(tensor.data_ptr())).cast("B")
