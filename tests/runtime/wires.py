"""Byte streams in memory between a coordinator and its workers, each of which can be cut: for tests in mock time.

A `Wire` carries what one worker dials. Cut, it holds back all that is said, in both directions, until it is healed;
broken, both ends see their connection reset, and what was under way is lost. Else nothing is lost or reordered, as with TCP.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from typing import Any

import anyio
import anyio.abc

BUFFER_BYTES_MAX = 2**20  # of one direction; whoever sends more waits


class _Pipe:
    """One direction of one connection."""

    def __init__(self, wire: Wire) -> None:
        self._wire = wire
        self._data = bytearray()
        self._ended = False  # nothing more is sent
        self._broken = False  # reset, or the reader is gone
        self._changed = anyio.Event()

    def notify(self) -> None:
        self._changed.set()
        self._changed = anyio.Event()

    async def send(self, data: bytes) -> None:
        await anyio.lowlevel.checkpoint()
        while len(self._data) > BUFFER_BYTES_MAX and not self._broken:
            await self._changed.wait()
        if self._broken:
            raise anyio.BrokenResourceError
        self._data += data
        self.notify()

    async def receive(self, bytes_max: int) -> bytes:
        await anyio.lowlevel.checkpoint()
        while not self._broken:
            if self._wire.is_open and self._data:
                taken = bytes(self._data[:bytes_max])
                del self._data[:bytes_max]
                self.notify()
                return taken
            if self._wire.is_open and self._ended:
                raise anyio.EndOfStream
            await self._changed.wait()
        raise anyio.BrokenResourceError

    def end(self) -> None:
        self._ended = True
        self.notify()

    def break_off(self) -> None:
        self._broken = True
        self.notify()


class WireEnd(anyio.abc.ByteStream):
    """One end of a connection over a wire."""

    def __init__(self, incoming: _Pipe, outgoing: _Pipe) -> None:
        self._incoming = incoming
        self._outgoing = outgoing

    @property
    def extra_attributes(self) -> Mapping[Any, Callable[[], Any]]:
        return {}

    async def receive(self, max_bytes: int = 65_536) -> bytes:
        return await self._incoming.receive(max_bytes)

    async def send(self, item: bytes) -> None:
        await self._outgoing.send(item)

    async def send_eof(self) -> None:
        self._outgoing.end()

    async def aclose(self) -> None:
        self._outgoing.end()
        self._incoming.break_off()
        await anyio.lowlevel.checkpoint()


class WireListener(anyio.abc.Listener[WireEnd]):
    """Where a coordinator takes what comes over wires."""

    def __init__(self) -> None:
        self.is_open = True
        self._arrived: deque[WireEnd] = deque()
        self._changed = anyio.Event()

    @property
    def extra_attributes(self) -> Mapping[Any, Callable[[], Any]]:
        return {}

    def arrive(self, stream: WireEnd) -> None:
        self._arrived.append(stream)
        self._changed.set()

    async def serve(self, handler: Callable[[WireEnd], Any], task_group: anyio.abc.TaskGroup | None = None) -> None:
        async with anyio.create_task_group() as tasks:
            while True:
                while self._arrived:
                    (task_group or tasks).start_soon(handler, self._arrived.popleft())
                self._changed = anyio.Event()
                await self._changed.wait()

    async def aclose(self) -> None:
        self.is_open = False
        await anyio.lowlevel.checkpoint()


class Wire:
    """The way between one worker and its coordinator, or (after `lead_to`) the next one."""

    def __init__(self, listener: WireListener) -> None:
        self.is_open = True
        self._listener = listener
        self._pipes: list[_Pipe] = []
        self._healed = anyio.Event()

    async def dial(self, host: str, port: int) -> WireEnd:
        """What a worker connects with. While the wire is cut nobody answers."""
        await anyio.lowlevel.checkpoint()
        while not self.is_open:
            await self._healed.wait()
        if not self._listener.is_open:
            raise ConnectionRefusedError(f"nobody listens at {host}:{port}")
        up, down = _Pipe(self), _Pipe(self)
        self._pipes += [up, down]
        self._listener.arrive(WireEnd(up, down))
        return WireEnd(down, up)

    def lead_to(self, listener: WireListener) -> None:
        self._listener = listener

    def cut(self) -> None:
        self.is_open = False
        self._healed = anyio.Event()

    def heal(self) -> None:
        self.is_open = True
        self._healed.set()
        for pipe in self._pipes:
            pipe.notify()

    def break_off(self) -> None:
        """Every connection over this wire is reset."""
        for pipe in self._pipes:
            pipe.break_off()
        self._pipes.clear()
