"""Owners and readers on loopback, in one process, for tests of the data plane; and a check that
nothing of them is left.
"""

from __future__ import annotations

import contextlib
import os
import random
import socket
import sys
import threading
from collections.abc import AsyncIterator, Callable, Generator, Mapping, Sequence
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from types import FrameType

import anyio

from tensorhub.cuda.device import Device, Spread
from tensorhub.layouts.reading import Part
from tensorhub.memory.chunks import ChunkMemory
from tensorhub.messages import Grant
from tensorhub.model.manifest import Digest, Manifest, TensorDescription, build_manifest
from tensorhub.model.strips import Strip
from tensorhub.protocol.blocking import BlockingConnection
from tensorhub.protocol.codec import FROM_READER
from tensorhub.protocol.handshake import NONCE_BYTES, ServerHandshake
from tensorhub.protocol.lost import ConnectionLost
from tensorhub.runtime.data.acceptor import ServeSettings, serve_readers
from tensorhub.runtime.data.lanes import AllVerified, PullEvent, PullRunner
from tensorhub.runtime.data.serving import SharedOwner
from tensorhub.runtime.data.source_lane import Opened
from tensorhub.transport import cma, sockets
from tensorhub.transport.base import Channel, Cutter, Destination, ReadRight, Transport
from tensorhub.transport.cma import CmaOwner, CmaTransport
from tensorhub.transport.parallel import ParallelChannel
from tensorhub.transport.registry import Local
from tensorhub.transport.tcp import TcpTransport
from tensorhub.types import (
    ContentId,
    Endpoint,
    Incarnation,
    LeaseId,
    Location,
    Options,
    RegistrationId,
)

CONTENT = ContentId("content-1")
SECRET = b"a secret of the test"
CHUNK_BYTES = 4096
SIZES = (10, 3 * CHUNK_BYTES + 5, 0, 1, 5 * CHUNK_BYTES)  # 1 + 4 + 0 + 1 + 5 = 11 chunks
CHUNKS = 11
KINDS: Mapping[str, Callable[[Local], Transport]] = {"tcp": TcpTransport}
if cma.fault_here() is None:
    KINDS = {**KINDS, "cma": CmaTransport}
WAIT_S = 120.0  # no test waits so long unless something hangs, also beside 20 busy processes


def slowness() -> float:
    """How many times longer than in a run of all tests something takes here now: such a run has
    three tasks for each core.
    """
    load, *_, tasks, _ = Path("/proc/loadavg").read_text().split()
    wanted = max(float(load), float(tasks.partition("/")[0]))
    return max(1.0, wanted / len(os.sched_getaffinity(0)) / 3)


def waited_out_s(seconds: float = 1.0) -> float:
    """A deadline that a test waits out, and before which something else is to happen."""
    return round(max(0.1, seconds * slowness()), 1)


def manifest_of(
    sizes: tuple[int, ...] = SIZES, digest: Digest = "xxh3-64", chunk_bytes: int = CHUNK_BYTES
) -> Manifest:
    tensors = [
        TensorDescription(f"t{index}", "uint8", (size,), (index + 1) << 40, size)
        for index, size in enumerate(sizes)
    ]
    return build_manifest(tensors, chunk_bytes, digest)


class Node:
    """One worker with one registration, of zeros, or of random bytes that depend on the sizes
    only.
    """

    def __init__(
        self,
        name: str,
        manifest: Manifest,
        *,
        filled: bool,
        owner: SharedOwner | None = None,
        patience_s: float = 0.2,
        **settings: object,
    ) -> None:
        self.name = name
        self.incarnation = Incarnation(f"{name}-1")
        self.registration = RegistrationId(f"{name}-r")
        self.generation = 7
        self.manifest = manifest
        source = random.Random(0)
        self.arrays = [
            bytearray(source.randbytes(region.nbytes) if filled else region.nbytes)
            for region in manifest.regions
        ]
        self.memory = ChunkMemory(manifest, [memoryview(array) for array in self.arrays])
        self.owner = owner or SharedOwner([CmaOwner()], fence_grace_s=0.05)
        self.listener = sockets.listen("127.0.0.1")
        self.ways: list[Transport] = []  # by which it reads
        self.left: list[int] = []  # bytes that each channel was opened for
        self.settings = ServeSettings(self.incarnation, [SECRET], patience_s=patience_s, **settings)  # type: ignore[arg-type]

    def open(self, *, complete: bool) -> Node:
        self.owner.open(self.registration, self.generation, CONTENT, self.memory, complete=complete)
        return self

    def make_available(self, *chunks: int) -> None:
        named = [(chunk, self.memory.digest(chunk)) for chunk in chunks]
        assert self.owner.mark_available(self.registration, self.generation, named)

    def has(self, chunk: int) -> bool:
        with self.owner.access(
            None, self.registration, self.generation, CONTENT, [chunk], 1, 0.0
        ) as answer:
            return isinstance(answer, tuple)

    def grant(
        self,
        lease: str = "",
        *,
        address: str | None = None,
        complete: bool = True,
        **changes: object,
    ) -> Grant:
        fields: dict[str, object] = {
            "lease": lease or f"from-{self.name}",
            "source": self.name,
            "incarnation": self.incarnation,
            "registration": self.registration,
            "generation": self.generation,
            "endpoints": (Endpoint("any", address or sockets.address_of(self.listener)),),
            "location": Location(),
            "complete": complete,
        }
        return Grant(**(fields | changes))  # type: ignore[arg-type]

    def runner(
        self,
        *,
        batch_bytes: int = CHUNK_BYTES,
        secret: bytes = SECRET,
        stall_timeout_s: float = WAIT_S,
        transport: str = "tcp",
        lanes: int | None = None,
        connections: int = 1,
        **more: object,
    ) -> PullRunner:
        """A pull into this node's memory. `connections`: to each source."""
        options = Options(stall_timeout_s=stall_timeout_s, connect_timeout_s=WAIT_S)
        parts: Mapping[str, Part] = more.get("selections", {})  # type: ignore[assignment]
        way = KINDS[transport](Local(self.incarnation, (secret,), options))
        self.ways.append(way)

        def open_channel(
            grant: Grant, destination: Destination, cutter: Cutter, left: int
        ) -> Opened:
            self.left.append(left)
            right = ReadRight(
                LeaseId(grant.lease),
                Incarnation(grant.incarnation),
                RegistrationId(grant.registration),
                grant.generation,
                CONTENT,
                parts[grant.selection].selection if grant.selection in parts else None,
            )
            if connections > 1:
                opens = partial(way.open, grant.endpoints[0], right, destination)
                channel: Channel = ParallelChannel(opens, connections, destination.sizes, cutter)
                return Opened(way.name, channel, connections, batch_bytes, waits=True)
            channel = way.open(grant.endpoints[0], right, destination, cutter)
            return Opened(way.name, channel, lanes or way.lanes, batch_bytes)

        return PullRunner(
            self.memory,
            self.owner,
            self.registration,
            self.generation,
            open_channel,
            **more,  # type: ignore[arg-type]
        )


@asynccontextmanager
async def serving(*nodes: Node) -> AsyncIterator[None]:
    """Serve these nodes' readers; afterwards check that no lane, socket or thread of theirs is
    left.
    """
    before = open_sockets() - {os.fstat(node.listener.fileno()).st_ino for node in nodes}
    with anyio.fail_after(2 * WAIT_S):
        async with anyio.create_task_group() as tasks:
            for node in nodes:
                tasks.start_soon(serve_readers, node.listener, node.owner, node.settings)
            yield
            tasks.cancel_scope.cancel()
    for node in nodes:
        for way in node.ways:
            way.close()
        node.owner.check_invariants()
        assert "0 lanes" in repr(node.owner)
        assert "0 accesses" in repr(node.owner)
        node.listener.close()
    assert open_sockets() <= before
    assert not busy_threads()


def open_sockets() -> set[int]:
    """The inodes of this process' open sockets."""
    inodes = set()
    for descriptor in os.listdir("/proc/self/fd"):
        try:
            target = os.readlink(f"/proc/self/fd/{descriptor}")
        except FileNotFoundError:
            continue
        if target.startswith("socket:["):
            inodes.add(int(target[8:-1]))
    return inodes


def busy_threads() -> list[str]:
    """Other threads that are inside TensorHub; pools keep idle ones for a while."""
    found = []
    for thread, innermost in sys._current_frames().items():
        frame: FrameType | None = innermost
        while thread != threading.get_ident() and frame is not None:
            if "/tensorhub/" in frame.f_code.co_filename and not frame.f_code.co_filename.endswith(
                "/sigterm.py"
            ):
                found.append(f"{frame.f_code.co_filename}:{frame.f_lineno}")
            frame = frame.f_back
    return found


async def until(holds: Callable[[], bool]) -> None:
    """Let everything run until `holds`."""
    with anyio.fail_after(WAIT_S):
        while not holds():  # noqa: ASYNC110 - what threads do sets no event
            await anyio.sleep(0.001)


async def next_event(runner: PullRunner) -> PullEvent:
    with anyio.fail_after(WAIT_S):
        return await runner.next_event()


async def finish(runner: PullRunner) -> None:
    assert await next_event(runner) == AllVerified()


def received(peer: socket.socket) -> bytes:
    """What comes next; nothing at the end, however it came."""
    try:
        return peer.recv(65536)
    except OSError:
        return b""


class Nowhere:
    """A destination of one chunk or so, into which nothing is to be written."""

    is_digested = False
    is_strided = False

    def __init__(self, *sizes: int, device: Device | None = None) -> None:
        self.sizes = sizes or (8,)
        self.device = device

    def strips(self, chunk: int) -> tuple[Strip, ...]:
        raise AssertionError("it is not strided")

    def incoming(self, chunk: int) -> Generator[list[memoryview]]:
        raise AssertionError("it is not strided")

    def take_in(
        self, chunks: Sequence[int], at: int, gathered: Sequence[Spread] = ()
    ) -> Mapping[int, int]:
        raise AssertionError("it is not strided")

    def buffer(self, chunk: int) -> memoryview:
        return memoryview(bytearray(self.sizes[chunk]))

    def address(self, chunk: int) -> int:
        raise AssertionError("nothing is read")

    @property
    def spans(self) -> Sequence[tuple[int, int]]:
        raise AssertionError("nothing is registered")


def answers(
    listener: socket.socket,
    *says: Callable[[BlockingConnection], object],
    incarnation: str = "source",
) -> threading.Thread:
    """A source, in a thread, that answers its reader's first requests so, whatever they are, and
    then waits for the reader to go.
    """

    def run() -> None:
        listener.setblocking(True)
        with BlockingConnection(listener.accept()[0], stall_timeout_s=WAIT_S) as connection:
            connection.handshake(
                ServerHandshake("owner", incarnation, [SECRET], bytes(NONCE_BYTES)), WAIT_S
            )
            for say in says:
                connection.receive(FROM_READER)
                say(connection)
            with contextlib.suppress(ConnectionLost):
                while connection.receive(FROM_READER) is not None:
                    pass

    thread = threading.Thread(target=run)
    thread.start()
    return thread


class Proxy:
    """Passes one connection on; after `spoil_at` bytes from the source it closes, or (`flip`) flips
    one bit and goes on.
    """

    def __init__(self, target: Node, spoil_at: int, *, flip: bool) -> None:
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.address = sockets.address_of(self.listener)
        self._target = target.listener.getsockname()
        self._left = spoil_at
        self._flip = flip
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        reader, _ = self.listener.accept()
        source = socket.create_connection(self._target)
        up = threading.Thread(target=self._pass_on, args=(reader, source))
        up.start()
        while data := bytearray(received(source)):
            if self._left >= 0 and len(data) > self._left:
                if self._flip:
                    data[self._left] ^= 1
                else:
                    reader.sendall(data[: self._left])
                    break
                self._left = -1
            elif self._left >= 0:
                self._left -= len(data)
            try:
                reader.sendall(data)
            except OSError:
                break
        sockets.shutdown(reader)
        sockets.shutdown(source)
        up.join()
        reader.close()
        source.close()

    @staticmethod
    def _pass_on(reader: socket.socket, source: socket.socket) -> None:
        while data := received(reader):
            try:
                source.sendall(data)
            except OSError:
                break
        sockets.shutdown(source)

    def close(self) -> None:
        self._thread.join()
        self.listener.close()
