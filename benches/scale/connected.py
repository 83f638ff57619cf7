"""A thin worker's connection, and a cluster of many: a real coordinator in a process of its own,
all workers in this one.
"""

from __future__ import annotations

import contextlib
import os
import random
import resource
import secrets
import socket
import struct
import threading
import time
from collections.abc import AsyncIterator, Iterable, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import anyio
import anyio.abc
import anyio.to_thread

import tensorhub
from benches.remotes import Remote, obey
from benches.scale.core import REPORTS, LoadWorker, make_shard
from tensorhub.messages import (
    AddSource,
    Dismissed,
    FromCoordinator,
    Heartbeat,
    HeartbeatAck,
    LeaveGranted,
    Outcome,
    Refused,
    Registered,
    Start,
    Welcome,
    Write,
)
from tensorhub.protocol.codec import FROM_COORDINATOR
from tensorhub.protocol.handshake import NONCE_BYTES, ClientHandshake
from tensorhub.protocol.lost import ConnectionLost
from tensorhub.protocol.polled_stream import Poller
from tensorhub.protocol.stream import MessageStream
from tensorhub.runtime.control.search import RECONNECT_S
from tensorhub.types import Options, parse_address

WAIT_S = 120.0
DIALS = 64  # connections that are begun at a time, where nothing else is wanted
BEATS_PER_LEASE = 4
SO_TIMESTAMPNS = 35  # of Linux; `socket` does not name it
STAMP_BYTES = socket.CMSG_SPACE(16)


# -------------------------------------------------------------------------------------------- the
# coordinator's process


def coordinator_main(
    pipe: Connection,
    options: Options,
    port: int = 0,
    state_dir: str | None = None,
    descriptors: int | None = None,
    ha: str | None = None,
) -> None:
    """`descriptors`: its `ulimit -n`."""
    if descriptors is not None:
        resource.setrlimit(resource.RLIMIT_NOFILE, (descriptors, descriptors))
    anyio.run(_coordinate, pipe, options, port, state_dir, ha)


async def _coordinate(
    pipe: Connection, options: Options, port: int, state_dir: str | None, ha: str | None
) -> None:
    serving = tensorhub.serve(port=port, state_dir=state_dir, ha=ha, options=options)
    async with serving as coordinator:
        pipe.send((True, coordinator.address))
        await obey(pipe, {"usage": _usage, "threads": _threads})


async def _usage() -> tuple[float, int]:
    """CPU seconds of this process, and its resident bytes."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime, _resident_bytes()


async def _threads() -> dict[str, float]:
    """CPU seconds of the library's threads of this process, by name."""
    return {
        thread.name: _cpu_s(thread.native_id)
        for thread in threading.enumerate()
        if thread.name.startswith("tensorhub-")
    }


def _cpu_s(thread: int | None) -> float:
    schedstat = Path(f"/proc/self/task/{thread}/schedstat").read_text(encoding="ascii")
    return int(schedstat.split()[0]) / 1e9


def _resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1]) * os.sysconf(
        "SC_PAGE_SIZE"
    )


# --------------------------------------------------------------------------------------------------
# the workers


class StampedSocket(socket.socket):
    """Knows when what was received last has arrived, which may be long before this busy process
    came to it.
    """

    arrived_at = 0.0  # by `time.time`

    def stamp(self) -> None:
        self.setsockopt(socket.SOL_SOCKET, SO_TIMESTAMPNS, 1)

    def recv(self, bufsize: int, flags: int = 0, /) -> bytes:
        data, notes, _, _ = self.recvmsg(bufsize, STAMP_BYTES, flags)
        for level, kind, stamp in notes:
            if (level, kind) == (socket.SOL_SOCKET, SO_TIMESTAMPNS):
                seconds, nanoseconds = struct.unpack("qq", stamp)
                self.arrived_at = seconds + nanoseconds / 1e9
        return data


class Connected:
    """A thin worker's connection."""

    def __init__(self, worker: LoadWorker, cluster: Cluster) -> None:
        self.worker = worker
        self.registered = anyio.Event()
        self.assigned_at: float | None = None  # when this process came to it
        self.arrived_at: float | None = None  # when it was there, by `time.time`
        self.done = anyio.Event()
        self.fenced = anyio.Event()
        self.lost = False  # the coordinator has given it up
        self.refused = ""  # why the coordinator does not take it
        self.scope = anyio.CancelScope()
        self._cluster = cluster
        self._is_welcome = False  # in this session
        self._answers = 0.0  # when the coordinator has said what came last
        self._messages: MessageStream[FromCoordinator]
        self._socket: StampedSocket

    async def run(self) -> None:
        """Connect, register, and answer what comes, until it is cancelled; again if the coordinator
        is another one.
        """
        with self.scope:
            while not (self.lost or self.refused):
                generation, self._is_welcome = self._cluster.generation, False
                with contextlib.suppress(ConnectionLost, OSError, tensorhub.TensorHubError):
                    await self._session()
                if self._is_welcome and self._cluster.generation == generation:
                    self.lost = True
                await anyio.sleep(random.uniform(RECONNECT_S / 2, RECONNECT_S))
            if self.worker.publishes:
                raise RuntimeError(f"the publisher is gone: {self.refused or 'it was lost'}")
            for each in (self.registered, self.done):
                each.set()  # it is counted, not waited for

    async def _session(self) -> None:
        cluster = self._cluster
        async with cluster.dialling:
            connection = self._socket = StampedSocket()
            try:
                connection.connect((cluster.host, cluster.port))
            except OSError:
                # not some time: all dial, many times a second, as long as nobody listens
                connection.close()
                raise
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            connection.stamp()
            connection.setblocking(False)
            stream = cluster.poller.stream(connection)
            self._messages = MessageStream(stream, FROM_COORDINATOR, Options().frame_bytes_max)
            nonce = secrets.token_bytes(NONCE_BYTES)
            try:
                await self._messages.handshake(
                    ClientHandshake("worker", self.worker.incarnation, b"", nonce), WAIT_S
                )
            except BaseException:
                cluster.handshakes_in_vain += 1
                with anyio.CancelScope(shield=True):
                    await self._messages.aclose()
                raise
        try:
            async with self._messages, anyio.create_task_group() as tasks:
                # a message of the previous session is not repeated
                self.worker.outbox = [self.worker.join()]
                await self.send()
                tasks.start_soon(self._beat, cluster.lease_s)
                async for message in self._messages:
                    await self._hear(message)
                tasks.cancel_scope.cancel()
        except* ConnectionLost:
            pass

    async def _hear(self, message: FromCoordinator) -> None:
        if (
            isinstance(message, Start | Write | AddSource)
            and self.worker.leases == {}
            and self.assigned_at is None
        ):
            grants = (message.grant,) if isinstance(message, AddSource) else message.grants
            if grants:
                self.assigned_at, self.arrived_at = time.perf_counter(), self._socket.arrived_at
        if isinstance(message, Welcome | HeartbeatAck):
            self._answers = message.said_at
        self.worker.hear(message)
        match message:
            case Welcome():
                self._is_welcome = True
                self.worker.say(self.worker.register(1))
            case Registered():
                self.registered.set()
                self.worker.call_again()
            case Start(write=True) | Write() | AddSource():
                for _ in range(REPORTS + 1):
                    self.worker.report()
            case Outcome():
                self.done.set()
            case LeaveGranted():
                self.fenced.set()
            case Refused():
                self.refused = message.error.message
                self.registered.set()
            case Dismissed():
                self.lost = True
        await self.send()

    async def _beat(self, lease_s: float) -> None:
        sequence = 0
        while True:
            await anyio.sleep(lease_s / BEATS_PER_LEASE)
            sequence += 1
            self.worker.say(Heartbeat(sequence, self._answers))
            await self.send()

    async def send(self) -> None:
        for message in self.worker.sent():
            await self._messages.send(message)

    def begin(self) -> None:
        """Forget how the last version went."""
        self.assigned_at = self.arrived_at = None
        if not self.lost:
            self.done, self.fenced = anyio.Event(), anyio.Event()


async def listens(port: int) -> None:
    """Wait until a coordinator leads there."""
    while True:
        try:
            await (await anyio.connect_tcp("127.0.0.1", port)).aclose()
        except OSError:
            await anyio.sleep(0.002)
        else:
            return


@dataclass(frozen=True)
class Went:
    """How a version went: milliseconds from its `Publish` until each reader was told a source,
    seconds until all have it.
    """

    arrived_ms: list[float]  # at the reader's socket
    assigned_ms: list[float]  # when the process of all readers came to it
    took_s: float


class Cluster:
    """A coordinator, and the workers that have joined. `versions` counts what was published."""

    def __init__(
        self, options: Options, ranks: int, manifest_bytes: int, dials: int = DIALS
    ) -> None:
        """`dials`: so many workers connect at a time."""
        self.lease_s = options.lease_s
        self.poller = Poller()
        self.dialling = anyio.Semaphore(dials)
        self.handshakes_in_vain = 0
        self.everybody: list[Connected] = []
        self.versions = 0
        self.generation = 0  # of the coordinator
        self.host, self.port = "", 0
        self._options = options
        self._ranks = ranks
        self._shard = make_shard(manifest_bytes)
        self._minted = 0
        self._remote: Remote
        self._tasks: anyio.abc.TaskGroup

    def __repr__(self) -> str:
        registered, done = (
            sum(getattr(each, name).is_set() for each in self.everybody)
            for name in ("registered", "done")
        )
        return (
            f"<Cluster: of {len(self.everybody)} workers {registered} are registered, {done} have "
            f"the version, {self.lost} are lost; {self.handshakes_in_vain} handshakes in vain>"
        )

    async def start(self, *arguments: Any) -> None:
        """The coordinator: `coordinator_main` with these arguments."""
        self._remote = Remote("coordinator", coordinator_main, self._options, *arguments)
        address = await anyio.to_thread.run_sync(self._remote.hear)
        self.host, self.port = parse_address(address)

    async def restart(
        self, state_dir: str, standby: tuple[Remote, str] | None = None
    ) -> tuple[float, float]:
        """Kill it and start it again on its state, or have the standby at that address take over.
        When it was killed, and when the next one listened.
        """
        self.generation += 1
        killed_at = time.perf_counter()
        await anyio.to_thread.run_sync(self._remote.kill)
        for each in self.everybody:
            if not each.lost:
                each.registered = anyio.Event()
        if standby is None:
            await self.start(self.port, state_dir)
        else:
            self._remote, self.port = standby[0], parse_address(standby[1])[1]
            await listens(self.port)
        return killed_at, time.perf_counter()

    async def usage(self) -> tuple[float, int]:
        """CPU seconds of the coordinator, and its resident bytes."""
        found: tuple[float, int] = await anyio.to_thread.run_sync(self._remote.ask, "usage")
        return found

    async def threads(self) -> dict[str, float]:
        """CPU seconds of the coordinator's threads, by name."""
        found: dict[str, float] = await anyio.to_thread.run_sync(self._remote.ask, "threads")
        return found

    async def join(self, workers: int) -> list[Connected]:
        """So many more workers, once they are registered."""
        come = []
        for _ in range(workers):
            come.append(Connected(LoadWorker.of(self._minted, self._ranks, self._shard), self))
            self._minted += 1
        for each in come:
            self._tasks.start_soon(each.run)
        self.everybody += come
        await self.are_registered(come)
        return come

    async def are_registered(self, workers: Iterable[Connected]) -> None:
        for each in workers:
            await each.registered.wait()

    def lose(self, workers: Sequence[Connected]) -> None:
        """They are gone without a word."""
        for each in workers:
            each.scope.cancel()
        gone = set(map(id, workers))
        self.everybody = [each for each in self.everybody if id(each) not in gone]

    async def wait_for_next(self, readers: Sequence[Connected]) -> None:
        """They call for the next version, which is not there yet."""
        for each in readers:
            each.begin()
            each.worker.call_newest(self.versions + 1)
            await each.send()
        await anyio.sleep(1.0)  # the calls have arrived, and wait: what is timed begins after that

    async def publish(self, publishers: Sequence[Connected]) -> float:
        """The next version. When that was said."""
        self.versions += 1
        for each in publishers:
            each.begin()
        if publishers[0].worker.held is not None:
            for each in publishers:
                each.worker.unpublish(2)
                await each.send()
            for each in publishers:
                await each.fenced.wait()
        began = time.perf_counter()
        for each in publishers:
            each.worker.publish_next(self.versions)
            await each.send()
        return began

    async def version(self, publishers: Sequence[Connected], readers: Sequence[Connected]) -> Went:
        """Publish the next version, for which all readers wait."""
        await self.wait_for_next(readers)
        began = await self.publish(publishers)
        began_at = time.time() - (time.perf_counter() - began)
        for each in (*publishers, *readers):
            await each.done.wait()
        took_s = time.perf_counter() - began
        assigned_ms = [
            (each.assigned_at - began) * 1e3 for each in readers if each.assigned_at is not None
        ]
        arrived_ms = [
            (each.arrived_at - began_at) * 1e3 for each in readers if each.arrived_at is not None
        ]
        return Went(arrived_ms, assigned_ms, took_s)

    @property
    def lost(self) -> int:
        return sum(each.lost for each in self.everybody)

    @contextlib.asynccontextmanager
    async def running(self, *arguments: Any) -> AsyncIterator[None]:
        """With a coordinator that was started with these arguments."""
        await self.start(*arguments)
        try:
            async with anyio.create_task_group() as self._tasks:
                self._tasks.start_soon(self.poller.keep)
                yield
                self._tasks.cancel_scope.cancel()
        finally:
            self._remote.end()
