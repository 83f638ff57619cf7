"""A source for the conformance suite: a real owner that serves its readers as a worker does, on a
thread of its own.
"""

from __future__ import annotations

import os
import threading

import anyio
import anyio.from_thread

from tensorhub.cuda.device import Device
from tensorhub.memory.addresses import Bytes, copy_bytes
from tensorhub.memory.chunks import ChunkMemory
from tensorhub.model.manifest import TensorDescription, build_manifest
from tensorhub.protocol.certificates import Certificates
from tensorhub.runtime.data.acceptor import ServeSettings, serve_readers
from tensorhub.runtime.data.serving import SharedOwner
from tensorhub.testing.checking import Source
from tensorhub.testing.strided_target import SIZES, bytes_of
from tensorhub.transport import sockets, unix
from tensorhub.transport.base import ReadRight
from tensorhub.transport.owner import OwnerSide
from tensorhub.transport.segments import Segment
from tensorhub.transport.tcp import TcpOwner
from tensorhub.types import ContentId, Endpoint, Incarnation, LeaseId, RegistrationId

CHUNK_BYTES = max(SIZES)
REGISTRATION = RegistrationId("registration")
CONTENT = ContentId("content")


def _shared(nbytes: int) -> memoryview:
    return Segment(nbytes).bytes_at(0, nbytes)


class ServedSource(Source):
    """See `checking.Source`. `secret`: what its readers present; `backend`: of anyio, on which it
    serves; `side`: that of the transport by which it is read, closed with the source (None: tcp's).
    `device`: on which its memory and its readers' destinations are. `certificates`: for TLS.
    """

    def __init__(
        self,
        secret: bytes = b"",
        backend: str = "asyncio",
        side: OwnerSide | None = None,
        *,
        device: Device | None = None,
        certificates: Certificates | None = None,
    ) -> None:
        self.side = side or TcpOwner()
        shares = self.side.shares_memory
        self.device = device
        tensors = [
            TensorDescription(f"t{n}", "uint8", (size,), (n + 1) << 40, size)
            for n, size in enumerate(SIZES)
        ]
        self._bytes = [self._allocate(size, shares) for size in SIZES]
        self._memory = ChunkMemory(build_manifest(tensors, CHUNK_BYTES, "xxh3-64"), self._bytes)
        self.owner = SharedOwner([self.side], fence_grace_s=0.1)
        self.right = ReadRight(
            LeaseId("lease"), Incarnation(os.urandom(8).hex()), REGISTRATION, 1, CONTENT
        )
        self._listener = unix.listen() if shares else sockets.listen("127.0.0.1")
        there = unix.address_of(self._listener) if shares else sockets.address_of(self._listener)
        address = self.side.endpoint(there, there)
        assert address is not None
        self.endpoint = Endpoint(self.side.name, address)
        self._settings = ServeSettings(self.right.incarnation, [secret], certificates=certificates)
        self._backend = backend
        self._end: anyio.Event | None = None
        self._thaw = threading.Event()
        self._held: list[threading.Thread] = []
        self.owner.open(REGISTRATION, 1, CONTENT, self._memory, complete=False)
        self._started = threading.Event()
        self._thread: threading.Thread | None = threading.Thread(target=self._run)
        self._thread.start()
        self._started.wait()

    def __repr__(self) -> str:
        return f"<ServedSource {self.owner!r}>"

    def _allocate(self, nbytes: int, shares: bool) -> Bytes:
        if self.device is not None:
            return self.device.allocate(nbytes)
        return _shared(nbytes) if shares and nbytes else memoryview(bytearray(nbytes))

    def _write(self, chunk: int, content: bytes) -> None:
        copy_bytes(memoryview(bytearray(content)), self._bytes[chunk])

    def _run(self) -> None:
        anyio.run(self._serve, backend=self._backend)

    async def _serve(self) -> None:
        self._end = anyio.Event()
        async with anyio.from_thread.BlockingPortal() as portal, anyio.create_task_group() as tasks:
            self._portal = portal
            tasks.start_soon(serve_readers, self._listener, self.owner, self._settings)
            self._started.set()
            await self._end.wait()
            tasks.cancel_scope.cancel()

    def fill(self, chunk: int, content: bytes) -> None:
        """See `Source.fill`."""
        self._write(chunk, content)
        named = [(chunk, self._memory.digest(chunk))]
        self.owner.mark_available(REGISTRATION, self.right.generation, named)

    def spoil(self, chunk: int) -> None:
        """See `Source.spoil`."""
        held = bytes_of(self._bytes[chunk])
        self._write(chunk, bytes([held[0] ^ 0xFF]) + held[1:])

    def take_back(self) -> None:
        """See `Source.take_back`."""
        self.owner.fence(REGISTRATION)
        for chunk, size in enumerate(SIZES):
            self._write(chunk, b"\xee" * size)

    def freeze(self) -> bool:
        """See `Source.freeze`: every request to the owner waits."""
        holds = threading.Event()

        def hold() -> None:
            with self.owner._changed:
                holds.set()
                self._thaw.wait()

        self._held.append(threading.Thread(target=hold))
        self._held[-1].start()
        holds.wait()
        return True

    def die(self) -> None:
        """See `Source.die`."""
        if self._thread is None or self._end is None:
            return
        self._thaw.set()
        self._portal.start_task_soon(self._end.set)
        self._thread.join()
        self._thread = None
        self._listener.close()
        self.owner.fence(REGISTRATION)
        self.owner.end_reading()

    def close(self) -> None:
        """See `Source.close`."""
        self.die()
        for thread in self._held:
            thread.join()
