"""The processes of a benchmark: a coordinator, a publisher, receivers; each does what its pipe says
and answers.

Every process ends when its pipe does, so that none outlives the benchmark.
"""

from __future__ import annotations

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
from benches import bare_reads
from benches.comparison import bare, memory
from benches.remotes import Command, Commands, obey
from benches.size_profiles import SizeProfile

Models = Mapping[str, tensorhub.Options]
"""All of them are of the same tensors, each published by a hub with its options."""

MODELS: Models = {"digested": tensorhub.Options(), "plain": tensorhub.Options(integrity=False)}

# -----------------------------------------------------------------------------------------------
# inside the processes


def coordinator_main(pipe: Connection) -> None:
    anyio.run(_coordinator, pipe)


def publisher_main(
    pipe: Connection,
    address: str,
    profile: SizeProfile,
    models: Models = MODELS,
    transport: str = "tcp",
) -> None:
    anyio.run(_worker, pipe, address, profile, "publisher", models, transport)


def receiver_main(
    pipe: Connection,
    address: str,
    profile: SizeProfile,
    name: str,
    models: Models = MODELS,
    transport: str = "tcp",
) -> None:
    anyio.run(_worker, pipe, address, profile, name, models, transport)


def sender_main(pipe: Connection, profile: SizeProfile, transport: str) -> None:
    """A process that has the bytes, and knows nothing of TensorHub."""
    anyio.run(_sender, pipe, profile, transport)


def rank_main(pipe: Connection, address: str, rank: int, world_size: int) -> None:
    anyio.run(_rank, pipe, address, rank, world_size)


async def _coordinator(pipe: Connection) -> None:
    async with tensorhub.serve() as coordinator:
        pipe.send((True, coordinator.address))
        await obey(pipe, {"cpu": _cpu})


async def _sender(pipe: Connection, profile: SizeProfile, transport: str) -> None:
    memory = Memory(profile, random=True, shared=transport == "shm")
    pipe.send((True, len(memory.tensors)))
    await obey(pipe, memory.commands())


async def _worker(
    pipe: Connection, address: str, profile: SizeProfile, name: str, models: Models, transport: str
) -> None:
    torch.set_num_threads(1)
    own = Memory(profile, random=name == "publisher", shared=transport == "shm")
    async with AsyncExitStack() as stack:
        handles: dict[str, tensorhub.Weights] = {}
        for model, options in models.items():
            connecting = tensorhub.connect(
                address, name=f"{name}-{model}", transports=(transport,), options=options
            )
            hub = await stack.enter_async_context(connecting)
            handles[model] = await hub.register(model, own.tensors)
        pipe.send((True, len(own.tensors)))
        await obey(pipe, _commands(own, handles))


async def _rank(pipe: Connection, address: str, rank: int, world_size: int) -> None:
    """One rank of the group `g` of the model `group`, with one small tensor."""
    import torch

    async with tensorhub.connect(address, name=f"rank-{rank}") as hub:
        weights = await hub.register(
            "group", {"w": torch.ones(1024)}, group="g", rank=rank, world_size=world_size
        )

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


def cpu_seconds() -> float:
    """CPU seconds of this process so far, of all its threads, in user and kernel mode."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


async def _cpu() -> float:
    return cpu_seconds()


def _commands(own: Memory, handles: dict[str, tensorhub.Weights]) -> Commands:
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

    return {"publish": publish, "fetch": fetch, "unpublish": unpublish, **own.commands()}


def call_in_thread(function: Callable[..., object]) -> Command:
    async def called(*arguments: object) -> object:
        return await anyio.to_thread.run_sync(partial(function, *arguments))

    return called


class Memory(memory.Memory):
    """The tensors of one process, in pages that have been touched, and its part of a bare copy."""

    def __init__(self, profile: SizeProfile, *, random: bool, shared: bool = False) -> None:
        """`shared`: others can map it."""
        tensors = memory.private(profile.sizes())
        super().__init__(tensorhub.shared_empty_like(tensors) if shared else tensors, random=random)
        self._listener = bare.listen()
        self._readers: dict[bare_reads.Lie, bare_reads.Reader] = {}  # each keeps what it has mapped

    def commands(self) -> Commands:
        """What a process can be told to do with it."""
        own = (
            self.change,
            self.clear,
            self.sample,
            self.sha256,
            self.listen,
            self.send,
            self.receive,
            self.lie,
            self.digests,
            self.read,
        )
        return {"cpu": _cpu} | {method.__name__: call_in_thread(method) for method in own}

    def sha256(self) -> str:
        total = hashlib.sha256()
        for view in self.views:
            total.update(view)
        return total.hexdigest()

    def listen(self) -> int:
        """The port of the bare copy."""
        return int(self._listener.getsockname()[1])

    def send(self, receivers: int, digests: bool) -> None:
        bare.send_all(self._listener, receivers, self.views, digests)

    def receive(self, port: int, digests: bool) -> tuple[float, float]:
        start = time.monotonic()
        bare.receive_all(("127.0.0.1", port), self.views, digests)
        return start, time.monotonic()

    def lie(self) -> bare_reads.Lie:
        """Where it is, for a bare copy by one of `read`'s kinds."""
        return bare_reads.Lie.of(self.views)

    def digests(self) -> list[int]:
        return bare_reads.digests_of(self.views)

    def read(
        self, kind: bare_reads.Kind, there: bare_reads.Lie, threads: int, digests: list[int] | None
    ) -> tuple[float, float]:
        """Copy that process' memory into this one's."""
        if there not in self._readers:
            self._readers[there] = bare_reads.Reader(kind, there, self.views)
        start = time.monotonic()
        self._readers[there].read(threads, digests)
        return start, time.monotonic()
