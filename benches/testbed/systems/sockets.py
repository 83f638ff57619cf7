"""Point to point: every rollout pulls from the trainer, over a connection of its own to it.

The trainer keeps copies, as many as are read or were published last, so that it never waits for
readers.
"""

from __future__ import annotations

import contextlib
import socket
import struct
import threading
import time
from collections.abc import Callable, Sequence

import anyio.to_thread

from benches.testbed.systems.base import WAIT_S, Baseline, Got, Phases, connect, receive_into

PORT = 7101
HEADER = struct.Struct("<QQ")  # the version, and which copy it is


# lines
class Copies:
    """The trainer's last versions, and how many read each. `grows`: it makes a new copy rather than
    wait for readers.
    """

    def __init__(self, views: Sequence[memoryview], count: int = 2, *, grows: bool = True) -> None:
        self.copies = [[memoryview(bytearray(view)) for view in views] for _ in range(count)]
        self._readers = [0] * count
        self._changed = threading.Condition()
        self._grows = grows
        self.newest, self.current = 0, 0

    def take(self, version: int, views: Sequence[memoryview]) -> Phases:
        """Copy this version to where nobody reads."""
        began_s = time.monotonic()
        with self._changed:
            if self._grows and not self._free():
                self.copies.append([memoryview(bytearray(view)) for view in views])
                self._readers.append(0)
            if not self._changed.wait_for(self._free, WAIT_S):
                raise TimeoutError("a reader does not end")
            place = self._free()[0]
        waited_s = time.monotonic()
        for copy, view in zip(self.copies[place], views, strict=True):
            copy[:] = view
        with self._changed:
            self.newest, self.current = version, place
        return {"wait": waited_s - began_s, "copy": time.monotonic() - waited_s}

    def _free(self) -> list[int]:
        return [
            place
            for place, readers in enumerate(self._readers)
            if not readers and place != self.current
        ]

    def serve(self, connection: socket.socket, *, send_bytes: bool = True) -> None:
        """Each byte that comes asks for the newest version; another one says that it has
        arrived.
        """
        with connection, contextlib.suppress(OSError):
            while connection.recv(1):
                with self._changed:
                    version, place = self.newest, self.current
                    self._readers[place] += 1
                try:
                    connection.sendall(HEADER.pack(version, place))
                    for view in self.copies[place] if send_bytes else ():
                        connection.sendall(view)
                    connection.recv(1)
                finally:
                    with self._changed:
                        self._readers[place] -= 1
                        self._changed.notify_all()

    def listen(self, host: str, *, send_bytes: bool = True) -> socket.socket:
        listener = socket.create_server((host, PORT), backlog=64)

        def accept() -> None:
            with contextlib.suppress(OSError):  # closed
                while True:
                    connection, _ = listener.accept()
                    connection.settimeout(WAIT_S)
                    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                    threading.Thread(
                        target=self.serve,
                        args=(connection,),
                        kwargs={"send_bytes": send_bytes},
                        daemon=True,
                    ).start()

        threading.Thread(target=accept, daemon=True).start()
        return listener


# end of lines


class System(Baseline):
    SENDS_BYTES = True

    async def open(self) -> None:
        await super().open()
        if self.setting.role == "trainer":
            self._copies = self.copies()
            listener = self._copies.listen(
                self.setting.addresses["trainer"], send_bytes=self.SENDS_BYTES
            )
            self.stack.callback(_shut, listener)
        elif self.setting.role == "rollout":
            self._connection = await anyio.to_thread.run_sync(
                connect, self.setting.addresses["trainer"], PORT
            )
            self.stack.callback(_shut, self._connection)

    def copies(self) -> Copies:
        return Copies(self.views)

    async def publish(self, version: int, write: Callable[[], None]) -> Phases:
        await anyio.to_thread.run_sync(write)
        phases = await anyio.to_thread.run_sync(self._copies.take, version, self.views)
        self.news.announce(version)
        return phases

    async def update(self) -> Got:
        return await anyio.to_thread.run_sync(self._pull)

    # lines
    def _pull(self) -> Got:
        began_s = time.monotonic()
        self._connection.sendall(b"?")
        header = bytearray(HEADER.size)
        receive_into(self._connection, memoryview(header))
        version, place = HEADER.unpack(header)
        answered_s = time.monotonic()
        self._read(place)
        self._connection.sendall(b"!")
        ended_s = time.monotonic()
        phases = {"wait": answered_s - began_s, "transfer": ended_s - answered_s}
        return Got(version, phases, {"trainer": self.setting.nbytes})

    def _read(self, place: int) -> None:
        for view in self.views:
            receive_into(self._connection, view)

    # end of lines


def _shut(connection: socket.socket) -> None:
    with contextlib.suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)
    connection.close()
