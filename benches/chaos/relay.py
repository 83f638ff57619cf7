"""TCP relays that lose, hold, slow, delay and cut what goes through them.

Responsible for passing on every byte in order, or not at all: what a fault holds up goes on when it
heals, as after a partition of a network; a connection that was cut is never completed. Not
responsible for which fault comes when. One thread serves all of them; each direction of a
connection buffers at most BUFFER_BYTES, and reads no more meanwhile.
"""

from __future__ import annotations

import contextlib
import selectors
import socket
import struct
import threading
import time
from collections import deque
from dataclasses import dataclass
from math import inf
from typing import Literal, Self

BUFFER_BYTES = 256 * 1024
PIECE_BYTES = 64 * 1024
TICK_S = 0.02  # of a rate: at most what it allows in so long goes on at once

Address = tuple[str, int]
Direction = Literal["up", "down"]  # up: from who connects to who listens


@dataclass(frozen=True, slots=True)
class Weather:
    """What a path does now. `hold`: directions that pass nothing on; `refuse`: new connections are
    reset.
    """

    hold: frozenset[Direction] = frozenset()
    refuse: bool = False
    bytes_per_s: float | None = None
    delay_s: float = 0.0


CLEAR = Weather()


class Path:
    """One listener and whom it leads to. `weather` may be set from any thread."""

    def __init__(self, relay: Relay, listener: socket.socket, target: Address) -> None:
        self._relay = relay
        self.listener = listener
        self.target = target
        self.weather = CLEAR
        self.cuts: deque[bool] = deque()  # asked for, not done: True for a reset, False for an end
        self.links: set[Link] = set()
        # accepted while their direction is held; not connected yet
        self.waiting: list[socket.socket] = []
        self.bytes_passed = 0

    def __repr__(self) -> str:
        return (
            f"<Path to {self.target[0]}:{self.target[1]}, {len(self.links)} links, {self.weather}>"
        )

    def set(self, weather: Weather) -> None:
        self.weather = weather
        self._relay.wake()

    def cut(self, *, reset: bool) -> None:
        """End every connection, in mid-frame where there is one: by a reset, or by an end of the
        stream on both sides.
        """
        self.cuts.append(reset)
        self._relay.wake()


class Link:
    """Two sockets and the bytes between them."""

    def __init__(self, path: Path, near: socket.socket, far: socket.socket) -> None:
        self.path = path
        self.up = Pipe(path, "up", near, far)
        self.down = Pipe(path, "down", far, near)
        self.is_connected = False
        self.socks = (near, far)

    def events(self, sock: socket.socket, now: float) -> int:
        """What to wait for at this socket."""
        if not self.is_connected:
            return selectors.EVENT_WRITE if sock is self.socks[1] else 0
        incoming, outgoing = (self.up, self.down) if sock is self.socks[0] else (self.down, self.up)
        return (selectors.EVENT_READ if incoming.can_read else 0) | (
            selectors.EVENT_WRITE if outgoing.can_write(now) else 0
        )

    @property
    def is_over(self) -> bool:
        return self.up.is_over and self.down.is_over


class Pipe:
    """One direction of a link."""

    def __init__(
        self, path: Path, direction: Direction, source: socket.socket, sink: socket.socket
    ) -> None:
        self._path = path
        self._direction: Direction = direction
        self._source = source
        self._sink = sink
        self._pieces: deque[tuple[float, memoryview]] = deque()  # due from then on
        self._size = 0
        self._has_ended = False  # the source's stream
        self._free_at = 0.0  # when the rate allows the next piece
        self.is_over = False  # and the sink knows

    @property
    def can_read(self) -> bool:
        return (
            not self._has_ended
            and self._size < BUFFER_BYTES
            and self._direction not in self._path.weather.hold
        )

    def can_write(self, now: float) -> bool:
        if self.is_over or self._direction in self._path.weather.hold:
            return False
        if self._pieces:
            return max(self._pieces[0][0], self._free_at) <= now
        return self._has_ended

    @property
    def due_at(self) -> float:
        """When the next piece may go on; never: it is not time that is in its way."""
        if self.is_over or not self._pieces or self._direction in self._path.weather.hold:
            return inf
        return max(self._pieces[0][0], self._free_at)

    def read(self, now: float) -> None:
        """Raises OSError if the connection has failed."""
        try:
            piece = self._source.recv(PIECE_BYTES)
        except BlockingIOError:
            return
        self._has_ended = not piece
        if piece:
            self._pieces.append((now + self._path.weather.delay_s, memoryview(piece)))
            self._size += len(piece)

    def write(self, now: float) -> None:
        """Pass on what is due. Raises OSError if the connection has failed."""
        while self._pieces and self.can_write(now):
            due, piece = self._pieces[0]
            rate = self._path.weather.bytes_per_s
            try:
                sent = self._sink.send(
                    piece if rate is None else piece[: max(1, int(rate * TICK_S))]
                )
            except BlockingIOError:
                return
            self._path.bytes_passed += sent
            self._size -= sent
            self._pieces.popleft()
            if sent < len(piece):
                self._pieces.appendleft((due, piece[sent:]))
            if rate is not None:
                self._free_at = now + sent / rate
        if self._has_ended and not self._pieces and self.can_write(now):
            self.is_over = True
            self._sink.shutdown(socket.SHUT_WR)


class Relay:
    """All paths, and the thread that serves them; ends with its `with` block."""

    def __init__(self) -> None:
        self._selector = selectors.DefaultSelector()
        self._lock = threading.Lock()
        self._new: list[Path] = []
        self._paths: list[Path] = []
        self._watched: dict[socket.socket, int] = {}
        self._due_at = inf  # what waits for time
        self._ears, self._bell = socket.socketpair()
        self._ears.setblocking(False)
        self._bell.setblocking(False)
        self._selector.register(self._ears, selectors.EVENT_READ)
        self._is_over = False
        # the thread's: a relay that fails must not look like the library
        self.failure: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="relay", daemon=True)

    def __repr__(self) -> str:
        return f"<Relay of {len(self._paths)} paths, {len(self._watched)} sockets>"

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._is_over = True
        self.wake()
        self._thread.join()

    def wake(self) -> None:
        with contextlib.suppress(BlockingIOError, OSError):
            self._bell.send(b"!")

    def add(self, listen: Address, target: Address) -> Path:
        """Listen there (port 0 takes a free one) and lead to the target, which need not listen yet.
        Raises OSError.
        """
        listener = socket.create_server(listen, backlog=128)
        listener.setblocking(False)
        path = Path(self, listener, target)
        with self._lock:
            self._new.append(path)
        self.wake()
        return path

    # ------------------------------------------------------------------------------------------ in
    # the relay's thread

    def _run(self) -> None:
        try:
            while not self._is_over:
                self._turn()
        except BaseException as error:
            self.failure = error
        finally:
            for path in [*self._paths, *self._new]:
                for link in list(path.links):
                    self._drop(link, reset=True)
                for sock in [*path.waiting, path.listener]:
                    sock.close()
            self._selector.close()
            self._ears.close()
            self._bell.close()

    def _turn(self) -> None:
        ready = self._selector.select(max(0.0, min(self._due_at - time.monotonic(), 1.0)))
        for key, events in ready:
            if key.fileobj is self._ears:
                with contextlib.suppress(BlockingIOError):
                    self._ears.recv(4096)
            elif isinstance(key.data, Path):
                self._accept(key.data)
            elif key.data in key.data.path.links:
                self._serve(key.data, key.fileobj, events)  # type: ignore[arg-type] # sockets are registered, no numbers
        with self._lock:
            new, self._new = self._new, []
        for path in new:
            self._paths.append(path)
            self._selector.register(path.listener, selectors.EVENT_READ, path)
        for path in self._paths:
            self._apply(path)
        now = time.monotonic()
        links = [link for path in self._paths for link in path.links]
        for link in links:
            for sock in link.socks:
                self._watch(sock, link, link.events(sock, now))
        # what is due by now waits for its socket
        due = [pipe.due_at for link in links for pipe in (link.up, link.down)]
        self._due_at = min((at for at in due if at > now), default=inf)

    def _apply(self, path: Path) -> None:
        """What was asked for since: cuts; connections that waited for better weather."""
        while path.cuts:
            reset = path.cuts.popleft()
            for link in list(path.links):
                self._drop(link, reset=reset)
        weather = path.weather
        if path.waiting and (weather.refuse or "up" not in weather.hold):
            waiting, path.waiting = path.waiting, []
            for near in waiting:
                self._lead(path, near)

    def _accept(self, path: Path) -> None:
        with contextlib.suppress(OSError):
            near, _ = path.listener.accept()
            if "up" in path.weather.hold and not path.weather.refuse:
                path.waiting.append(near)
            else:
                self._lead(path, near)

    def _lead(self, path: Path, near: socket.socket) -> None:
        if path.weather.refuse:
            _end(near, reset=True)
            return
        near.setblocking(False)
        far = socket.socket(path.listener.family, socket.SOCK_STREAM)
        far.setblocking(False)
        far.connect_ex(path.target)
        for sock in (near, far):
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        path.links.add(Link(path, near, far))

    def _serve(self, link: Link, sock: socket.socket, events: int) -> None:
        near, far = link.socks
        now = time.monotonic()
        try:
            if not link.is_connected:
                code = far.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
                if code:
                    raise OSError(code, "nobody listens")
                link.is_connected = True
                return
            incoming, outgoing = (link.up, link.down) if sock is near else (link.down, link.up)
            # the weather may have changed since it was watched
            if events & selectors.EVENT_READ and incoming.can_read:
                incoming.read(now)
            if events & selectors.EVENT_WRITE:
                outgoing.write(now)
        except OSError:
            self._drop(link, reset=True)
            return
        if link.is_over:
            self._drop(link, reset=False)

    def _watch(self, sock: socket.socket, link: Link, events: int) -> None:
        before = self._watched.get(sock, 0)
        if events == before:
            return
        if not before:
            self._selector.register(sock, events, link)
        elif not events:
            self._selector.unregister(sock)
        else:
            self._selector.modify(sock, events, link)
        if events:
            self._watched[sock] = events
        else:
            del self._watched[sock]

    def _drop(self, link: Link, *, reset: bool) -> None:
        for sock in link.socks:
            self._watch(sock, link, 0)
            _end(sock, reset=reset)
        link.path.links.discard(link)


def _end(sock: socket.socket, *, reset: bool) -> None:
    with contextlib.suppress(OSError):
        if reset:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        else:
            sock.shutdown(socket.SHUT_WR)
    sock.close()
