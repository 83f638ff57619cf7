"""A whole cluster in one process, over loopback sockets; gates that hold a transfer; and proof that
nothing is left.

Nothing here sleeps to let things happen: a test waits for what it wants to see (`until`), or holds
a gate.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import os
import tempfile
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import anyio
import anyio.lowlevel
import numpy as np
import numpy.typing as npt

import tensorhub
from tensorhub.api.embedded import Coordinator
from tensorhub.api.hub import Hub
from tensorhub.api.weights import Weights
from tensorhub.archives.store import Store
from tensorhub.errors import StateError
from tensorhub.protocol.blocking import BlockingConnection
from tensorhub.runtime.loop_thread import LoopThread
from tensorhub.runtime.worker.handle import Handle
from tensorhub.runtime.worker.worker import Worker
from tensorhub.transport import built_in, cma
from tensorhub.transport.base import (
    Arrival,
    Channel,
    Cutter,
    Destination,
    Lacking,
    ReadFailure,
    ReadRight,
    Transport,
)
from tensorhub.transport.nixl.transport import NixlTransport
from tensorhub.transport.owner import OwnerSide
from tensorhub.transport.rdma.reader import RdmaTransport
from tensorhub.transport.registry import Registry
from tensorhub.transport.tcp import TcpTransport
from tensorhub.types import Endpoint, Location, Options, parse_address
from tests.runtime import data_rig
from tests.runtime.data_rig import KINDS, busy_threads

WAIT_S = data_rig.WAIT_S
CHUNK_BYTES = 65_536
CHUNKS = 12  # of the tensors below
BEST = "tcp" if cma.fault_here() else "cma"  # the transport that two workers here read by
OPTIONS = Options(
    op_timeout_s=WAIT_S, chunk_bytes=CHUNK_BYTES, drain_grace_s=0.2, coordinator_wait_s=0
)

Tensors = Mapping[str, npt.NDArray[np.uint8]]


def tensors(content: int | None = None) -> Tensors:
    """`CHUNKS` chunks in three tensors: zeros, or bytes that depend on `content`."""
    made = {name: np.zeros(4 * CHUNK_BYTES, np.uint8) for name in ("a", "b", "c")}
    if content is not None:
        write(made, content)
    return made


def write(into: Tensors, content: int) -> None:
    """Bytes that depend on `content`, and on where they are."""
    for place, tensor in enumerate(into.values()):
        tensor[:] = np.random.default_rng([content, place]).integers(0, 256, tensor.shape, np.uint8)


def holds(what: Tensors, content: int) -> bool:
    return equal(what, tensors(content))


def equal(some: Tensors, other: Tensors) -> bool:
    return all(np.array_equal(some[name], other[name]) for name in other)


# --------------------------------------------------------------------------------------------------
# nothing is left


def open_files() -> dict[str, str]:
    found = {}
    for number in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):
            found[number] = os.readlink(f"/proc/self/fd/{number}")
    return found


def library_threads() -> list[str]:
    """Threads of hubs and coordinators, and what any other thread does inside TensorHub."""
    return [
        thread.name for thread in threading.enumerate() if thread.name.startswith("tensorhub-")
    ] + busy_threads()


@functools.cache
def begin_store() -> None:
    """Have the client of object stores begin its own threads, which stay."""
    with tempfile.TemporaryDirectory() as directory, contextlib.suppress(StateError):
        Store(f"file://{directory}").now()


@contextlib.asynccontextmanager
async def nothing_left(wait_s: float = 2 * WAIT_S) -> AsyncIterator[None]:
    """No thread, file descriptor or task of the block outlives it, and it ends in time."""
    await anyio.lowlevel.checkpoint()
    files, tasks = open_files(), {task.id for task in anyio.get_running_tasks()}
    with anyio.fail_after(wait_s):
        yield
        await until(lambda: {task.id for task in anyio.get_running_tasks()} <= tasks)
    assert not library_threads()
    # shared memory goes with its last tensor; of a socket that nobody closed it warns, which is an
    # error
    gc.collect()
    left = [target for number, target in open_files().items() if files.get(number) != target]
    assert not left, left


async def until(condition: Callable[[], bool]) -> None:
    """Let everything run until the condition holds."""
    with anyio.fail_after(WAIT_S):
        while not condition():  # noqa: ASYNC110 - it becomes true in another thread
            await anyio.sleep(0.001)


async def all_of(*calls: Awaitable[Any]) -> list[Any]:
    """Make these calls at the same time, as the ranks of a group do."""
    found: list[Any] = [None] * len(calls)

    async def run(number: int, call: Awaitable[Any]) -> None:
        found[number] = await call

    async with anyio.create_task_group() as tasks:
        for number, call in enumerate(calls):
            tasks.start_soon(run, number, call)
    return found


# --------------------------------------------------------------------------------------------------
# clusters


@dataclass
class Cluster:
    coordinator: Coordinator
    hubs: list[Hub]

    @property
    def address(self) -> str:
        return self.coordinator.address


@contextlib.asynccontextmanager
async def cluster(
    *names: str,
    options: Options = OPTIONS,
    token: str = "",
    transports: Sequence[str] | None = None,
    **serving: Any,
) -> AsyncIterator[Cluster]:
    """A coordinator and one hub per name; all of it closed, and nothing left, at the end."""
    async with nothing_left(), contextlib.AsyncExitStack() as stack:
        coordinator = await stack.enter_async_context(
            tensorhub.serve(token=token, options=options, **serving)
        )
        joining = [connect(coordinator.address, name, options, token, transports) for name in names]
        hubs = [await stack.enter_async_context(each) for each in joining]
        yield Cluster(coordinator, hubs)


def connect(
    address: str | Sequence[str],
    name: str = "worker",
    options: Options = OPTIONS,
    token: str = "",
    transports: Sequence[str] | None = None,
) -> contextlib.AbstractAsyncContextManager[Hub]:
    return tensorhub.connect(
        address, name=name, token=token, options=options, transports=transports
    )


class Restartable:
    """A coordinator at one address; without a `state_dir` each one is a new cluster."""

    def __init__(self, state_dir: Path | None = None) -> None:
        self.address = ""
        self._state_dir = state_dir
        self._stack = contextlib.AsyncExitStack()

    async def start(self) -> None:
        port = parse_address(self.address)[1] if self.address else 0
        serving = tensorhub.serve(port=port, state_dir=self._state_dir, token="", options=OPTIONS)
        self.address = (await self._stack.enter_async_context(serving)).address

    async def stop(self) -> None:
        await self._stack.aclose()

    async def restart(self, *hubs: Hub) -> None:
        """Returns when these hubs know the new one."""
        await self.stop()
        await until(lambda: all("offline" in repr(hub) for hub in hubs))
        await self.start()
        await until(lambda: all("online" in repr(hub) for hub in hubs))
        for hub in hubs:
            # asked in its loop, hence after all that its welcome brought about
            await hub.describe()


async def published(hub: Hub, version: int = 1, content: int = 1, **settings: Any) -> Weights:
    """A handle of `m` whose tensors depend on `content`, and are published as this version."""
    weights = await hub.register("m", tensors(content), **settings)
    await weights.publish(version)
    return weights


async def ranks_of(
    hubs: Sequence[Hub], given: Sequence[Any], group: str, **settings: Any
) -> list[Weights]:
    """A rank of a group of `m` for each of these sets of tensors, on these hubs in turn."""
    return [
        await hubs[rank % len(hubs)].register(
            "m", its, group=group, rank=rank, world_size=len(given), **settings
        )
        for rank, its in enumerate(given)
    ]


# --------------------------------------------------------------------------------------------------
# gates


class Gate:
    """Holds every reader of this process after so many arrivals."""

    def __init__(self, arrivals: int) -> None:
        self._changed = threading.Condition()
        self._left: int | None = arrivals  # None: open
        self._waiting = 0

    @property
    def holds(self) -> bool:
        """Whether a reader waits here."""
        return self.held > 0

    @property
    def held(self) -> int:
        """How many readers' lanes wait here."""
        with self._changed:
            return self._waiting

    def close(self, arrivals: int) -> None:
        """From now on, so many arrivals, then it holds (again)."""
        with self._changed:
            self._left = arrivals

    def open(self) -> None:
        with self._changed:
            self._left = None
            self._changed.notify_all()

    def pass_one(self, cutter: Cutter) -> None:
        # else a test that fails while a reader is held would wait for it for ever
        until = time.monotonic() + WAIT_S
        with self._changed:
            self._waiting += 1
            while self._left == 0 and not cutter.is_cut and time.monotonic() < until:
                self._changed.wait(0.005)  # a cut does not notify
            self._waiting -= 1
            if self._left:
                self._left -= 1

    def give_back(self) -> None:
        """What passed was no arrival."""
        with self._changed:
            if self._left is not None:
                self._left += 1


class _GatedChannel:
    def __init__(self, channel: Channel, gate: Gate, cutter: Cutter) -> None:
        self._channel = channel
        self._gate = gate
        self._cutter = cutter

    def submit(self, chunks: Sequence[int]) -> None:
        self._channel.submit(chunks)

    def receive(self, bytes_max: int) -> Arrival | Lacking:
        self._gate.pass_one(self._cutter)
        # what lies in the socket's buffer is not read, so that a test knows how much was
        if self._cutter.is_cut:
            raise ReadFailure("lost", "cut at the gate")
        answer = self._channel.receive(min(bytes_max, CHUNK_BYTES))
        if isinstance(answer, Lacking):
            self._gate.give_back()
        return answer

    def close(self) -> None:
        self._channel.close()


class _GatedTransport(Transport):
    """Another transport behind a gate, with one thread to a source."""

    lanes = 1

    def __init__(self, inner: Transport, gate: Gate, heeds_cuts: bool) -> None:
        self.name, self.strides = inner.name, inner.strides
        # Where bytes come over sockets, what is asked for before the gate lies in their buffers,
        # even when its source is dead. A one-sided reader asks where bytes lie, and then needs
        # nobody.
        self.batch_bytes = CHUNK_BYTES if inner.name == "tcp" else inner.batch_bytes
        self._inner = inner
        self._gate = gate
        self._heeds_cuts = heeds_cuts

    def serve(self) -> OwnerSide | None:
        return self._inner.serve()

    def reaches(self, here: Location, there: Location) -> bool:
        return self._inner.reaches(here, there)

    def open(
        self, endpoint: Endpoint, right: ReadRight, destination: Destination, cutter: Cutter
    ) -> Channel:
        heard = cutter if self._heeds_cuts else Cutter()
        return _GatedChannel(
            self._inner.open(endpoint, right, destination, heard), self._gate, heard
        )

    def sweep(self) -> None:
        """Nothing is kept for so long here."""

    def close(self) -> None:
        self._inner.close()


@contextlib.contextmanager
def gated(arrivals: int, *, heeds_cuts: bool = True, transport: str = "tcp") -> Iterator[Gate]:
    """Workers that connect in this block read through a gate: so many arrivals, of one chunk each,
    then it holds.

    `heeds_cuts` False: a reader that is told to leave its source does not, as one whose process was
    stopped. They have that `transport` only.
    """
    gate, usual, kinds = (
        Gate(arrivals),
        built_in.TRANSPORTS,
        {**KINDS, "rdma": RdmaTransport, "nixl": NixlTransport},
    )
    built_in.TRANSPORTS = Registry(
        {transport: lambda local: _GatedTransport(kinds[transport](local), gate, heeds_cuts)}
    )
    try:
        yield gate
    finally:
        gate.open()
        built_in.TRANSPORTS = usual


@contextlib.contextmanager
def damaging() -> Iterator[None]:
    """Workers that connect in this block read over tcp, where a byte of all that they receive is
    another one in the end.
    """
    usual, receives = built_in.TRANSPORTS, BlockingConnection.receive_into
    registry = Registry({"tcp": TcpTransport})

    def damages(connection: BlockingConnection, buffers: Sequence[memoryview]) -> None:
        receives(connection, buffers)
        buffers[0][0] ^= 1

    built_in.TRANSPORTS, BlockingConnection.receive_into = registry, damages  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        built_in.TRANSPORTS, BlockingConnection.receive_into = usual, receives  # type: ignore[method-assign]


def worker_of(used: Hub | Weights) -> Worker:
    """The real one under a hub, for tests that look inside it."""
    assert isinstance(used._worker, Worker)
    return used._worker


def copies_of(hub: Hub) -> list[Handle]:
    """The handles of its copies in host memory."""
    worker = worker_of(hub)
    handles = worker.router.handles
    return [handles[ident] for ident in worker.copies.machine._copies if ident in handles]


def thread_of(hub: Hub) -> LoopThread:
    assert isinstance(hub._thread, LoopThread)
    return hub._thread


def handle_of(weights: Weights) -> Handle:
    assert isinstance(weights._handle, Handle)
    return weights._handle
