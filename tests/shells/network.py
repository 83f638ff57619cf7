"""TCP that fails: sockets whose connections are pairs of Unix sockets of this process.

The kernel still keeps the bytes and tells who is readable. A seed delays bytes, writes less than
was asked for, resets connections, and leaves them half-open: writes succeed and nothing arrives.
"""

from __future__ import annotations

import _socket
import contextlib
import errno
import itertools
import os
import random
import select
import socket
import struct
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Self
from unittest import mock

from tests.shells.strands import Scheduler

_Socket = socket.socket
_NAMES = itertools.count()
EMPTY_BYTES = 2048  # that every buffer has room for
INET = (socket.AF_INET, socket.AF_INET6)


class Way:
    """One direction of a connection."""

    def __init__(self, network: Network) -> None:
        self._network = network
        self.queue: deque[bytes | None] = deque()  # None: the end
        self.free_at = 0.0  # when the last of it arrives
        self.is_dead = False  # nothing arrives any more
        self.nbytes = 0  # that were sent
        self.raw: _socket.socket | None = None  # to send by, once its socket is closed
        self.sender: Sock

    def put(self, data: bytes | None) -> None:
        """It arrives later."""
        scheduler, network = self._network.scheduler, self._network
        self.queue.append(data)
        delay = network.rng.uniform(0.0, network.delay_s) if network.is_faulty else 0.0
        self.free_at = max(self.free_at, scheduler.now + delay)
        scheduler.at(self.free_at, self._arrives)

    def _arrives(self) -> None:
        """What is due arrives, if there is room."""
        if not self.queue:
            return
        data = self.queue[0]
        via = self.raw or self.sender
        with contextlib.suppress(OSError):
            if self.is_dead:
                pass
            elif data is None:
                _socket.socket.shutdown(via, socket.SHUT_WR)
            else:
                try:
                    sent = _socket.socket.send(via, data, socket.MSG_NOSIGNAL)
                except BlockingIOError:
                    sent = 0
                if sent < len(data):
                    self.queue[0] = data[sent:]
                    self.free_at = max(self.free_at, self._network.scheduler.now + 0.001)
                    self._network.scheduler.at(self.free_at, self._arrives)
                    return
        self.queue.popleft()
        if not self.queue and not self.is_dead:
            self.let_go()

    def let_go(self) -> None:
        """Of a closed socket's descriptor."""
        if self.raw is not None:
            self.raw.close()
            self.raw = None


class Link:
    """One connection, with its two ends."""

    def __init__(self, client: Sock) -> None:
        self.client, self.server = client, None
        self.is_reset = False
        network = client.network
        self.ways = (Way(network), Way(network))
        self.ways[0].sender = client
        network.links.append(self)

    server: Sock | None

    def reset(self) -> None:
        """Both ends fail from now on."""
        self.is_reset = True
        for end in (self.client, self.server):
            if end is not None and end.fileno() >= 0:
                with contextlib.suppress(OSError):
                    _Socket.shutdown(end, socket.SHUT_RDWR)

    def half_open(self, which: int) -> None:
        """Nothing of these directions (bits) arrives any more."""
        for bit, way in enumerate(self.ways):
            way.is_dead = way.is_dead or bool(which >> bit & 1)

    @property
    def is_open(self) -> bool:
        return self.client.fileno() >= 0 and not self.is_reset


class Network:
    """What listens, what is connected, and what fails."""

    def __init__(self, scheduler: Scheduler, seed: int) -> None:
        self.scheduler = scheduler
        self.rng = random.Random(f"network {seed}")
        choose = self.rng.choice
        self.delay_s = choose((0.0, 0.0, 0.001, 0.02, 0.2))
        self.fault_share = choose((0.0, 0.0, 0.0005, 0.003, 0.01))  # of the calls
        self.short_share = choose((0.0, 0.1, 0.5))  # of the writes
        self.buffer_bytes = choose((0, 4608, 32768))  # 0: the kernel's own choice
        self.is_faulty = False
        self.faults: dict[str, int] = {}
        self.ports: dict[int, str] = {}  # those that are listened at: the name of the Unix socket
        self.waiting: dict[str, deque[Link]] = {}  # to be accepted
        self.links: list[Link] = []
        self._next_port = 20_000

    def port(self) -> int:
        self._next_port += 1
        return self._next_port

    def count(self, fault: str) -> None:
        self.faults[fault] = self.faults.get(fault, 0) + 1

    def strike(self, link: Link) -> None:
        """Something may happen to a connection at this call."""
        if self.is_faulty and self.rng.random() < self.fault_share:
            if self.rng.random() < 0.6:
                self.count("reset at a call")
                link.reset()
            else:
                self.count("half-open at a call")
                link.half_open(self.rng.choice((1, 2, 3)))

    def short(self, way: Way, nbytes: int) -> int:
        """How much of so many bytes one write takes. A handshake finds an empty buffer."""
        if self.is_faulty and way.nbytes > EMPTY_BYTES and self.rng.random() < self.short_share:
            nbytes = self.rng.randint(1, max(1, nbytes))
        way.nbytes += nbytes
        return nbytes

    def open_links(self) -> list[Link]:
        return [each for each in self.links if each.is_open]

    def heal(self) -> None:
        """No fault from now on. What is half-open, the kernels find out now."""
        self.is_faulty = False
        for link in self.links:
            if any(way.is_dead for way in link.ways):
                link.reset()
                for way in link.ways:
                    way.let_go()
        self.links = self.open_links()


def _ready(descriptor: int, events: int) -> Callable[[], bool]:
    poll = select.poll()
    poll.register(descriptor, events)
    return lambda: bool(poll.poll(0))


class Sock(_Socket):
    """A socket of a strand. Of an internet family it is a Unix socket in disguise."""

    network: Network  # of the run

    def __init__(
        self,
        family: int = -1,
        type: int = -1,
        proto: int = -1,
        fileno: int | None = None,
    ) -> None:
        self.is_inet = fileno is None and (family == -1 or family in INET)
        self.seconds: float | None = None  # of its own timeout
        self.limits = {socket.SO_RCVTIMEO: 0.0, socket.SO_SNDTIMEO: 0.0}  # 0: none
        self.link: Link | None = None
        self.here: tuple[str, int] = ("0.0.0.0", 0)
        self.there: tuple[str, int] | None = None
        self.name = ""  # while it listens
        if self.is_inet:
            family, proto = socket.AF_UNIX, 0
        super().__init__(family, type, proto, fileno)
        if self.is_inet or self.family == socket.AF_UNIX:
            _Socket.setblocking(self, False)
        if self.is_inet and self.network.buffer_bytes:
            nbytes = self.network.buffer_bytes
            _Socket.setsockopt(self, socket.SOL_SOCKET, socket.SO_SNDBUF, nbytes)

    @property
    def family(self) -> socket.AddressFamily:
        return socket.AF_INET if self.is_inet else super().family

    # -- blocking

    def setblocking(self, flag: bool) -> None:
        self.settimeout(None if flag else 0.0)

    def settimeout(self, value: float | None) -> None:
        _Socket.fileno(self)
        self.seconds = value

    def gettimeout(self) -> float | None:
        return self.seconds

    def getblocking(self) -> bool:
        return self.seconds != 0.0

    def _do(self, call: Callable[[], Any], events: int, limit: int = 0, flags: int = 0) -> Any:
        """Make a call that may block, as this socket may."""
        scheduler, blocks = self.network.scheduler, self.seconds != 0.0
        if blocks or self.is_inet:
            scheduler.point()
        until = float("inf")
        if self.seconds:
            until = scheduler.now + self.seconds
        elif limit and self.limits[limit]:
            until = scheduler.now + self.limits[limit]
        while True:
            if self.link is not None:
                self.network.strike(self.link)
                if self.link.is_reset:
                    raise ConnectionResetError(errno.ECONNRESET, "Connection reset by peer")
            try:
                return call()
            except BlockingIOError:
                if not blocks or flags & socket.MSG_DONTWAIT:
                    raise
                if not scheduler.block(_ready(_Socket.fileno(self), events), until):
                    if self.seconds:
                        raise TimeoutError("timed out") from None
                    raise

    # -- receiving

    def recv(self, bufsize: int, flags: int = 0) -> bytes:
        room = bytearray(bufsize)
        nbytes = self.recvmsg_into([room], 0, flags)[0]
        return bytes(room[:nbytes])

    def recv_into(self, buffer: Any, nbytes: int = 0, flags: int = 0) -> int:
        view = memoryview(buffer).cast("B")
        return int(self.recvmsg_into([view[:nbytes] if nbytes else view], 0, flags)[0])

    def recvmsg_into(self, buffers: Any, ancbufsize: int = 0, flags: int = 0) -> Any:
        """As the kernel's: with MSG_WAITALL until all is full, the end, or a timeout."""
        left = [memoryview(each).cast("B") for each in buffers]
        left, total = [each for each in left if each], 0
        receive = super().recvmsg_into
        while left:
            try:
                found = self._do(
                    lambda: receive(left, ancbufsize, flags & ~socket.MSG_WAITALL),
                    select.POLLIN,
                    socket.SO_RCVTIMEO,
                    flags,
                )
            except OSError:
                if total:
                    break
                raise
            count = found[0]
            total += count
            while left and count >= len(left[0]):
                count -= len(left.pop(0))
            if left:
                left[0] = left[0][count:]
            if not found[0] or not flags & socket.MSG_WAITALL:
                break
        return total, [], 0, None

    def recvmsg(self, bufsize: int, ancbufsize: int = 0, flags: int = 0) -> Any:
        receive = super().recvmsg
        return self._do(
            lambda: receive(bufsize, ancbufsize, flags), select.POLLIN, socket.SO_RCVTIMEO, flags
        )

    # -- sending

    def send(self, data: Any, flags: int = 0) -> int:
        return int(self.sendmsg([data], (), flags))

    def sendall(self, data: Any, flags: int = 0) -> None:
        view = memoryview(data).cast("B")
        while view:
            view = view[self.send(view, flags) :]

    def sendmsg(self, buffers: Any, ancdata: Any = (), flags: int = 0, address: Any = None) -> int:
        send, way = super().sendmsg, self._way
        if way is None:
            ancillary = list(ancdata)
            return int(
                self._do(
                    lambda: send(buffers, ancillary, flags), select.POLLOUT, socket.SO_SNDTIMEO
                )
            )
        return int(
            self._do(
                lambda: self._give(way, buffers, flags), select.POLLOUT, socket.SO_SNDTIMEO, flags
            )
        )

    @property
    def _way(self) -> Way | None:
        return None if self.link is None else self.link.ways[self.link.server is self]

    def _give(self, way: Way, buffers: Sequence[Any], flags: int) -> int:
        _Socket.getsockname(self)  # a socket that is closed says so
        data = b"".join(buffers)
        data = data[: self.network.short(way, len(data))]
        if way.is_dead:
            return len(data)
        if way.queue or (self.network.is_faulty and self.network.delay_s):
            if self._peer_is_gone():
                raise BrokenPipeError(errno.EPIPE, "Broken pipe")
            way.put(data)
            return len(data)
        return _socket.socket.send(self, data, flags | socket.MSG_NOSIGNAL)

    def _peer_is_gone(self) -> bool:
        poll = select.poll()
        poll.register(_Socket.fileno(self), 0)
        return any(events & (select.POLLHUP | select.POLLERR) for _, events in poll.poll(0))

    # -- connecting

    def bind(self, address: Any) -> None:
        if not self.is_inet:
            return super().bind(address)
        self.here = (address[0], address[1] or self.network.port())
        return None

    def listen(self, backlog: int = 4096) -> None:
        if self.is_inet:
            port = self.here[1]
            if port in self.network.ports:
                raise OSError(errno.EADDRINUSE, "Address already in use")
            name = f"\0shells-{os.getpid()}-{next(_NAMES)}"
            super().bind(name)
            self.name = name
            self.network.ports[port], self.network.waiting[self.name] = self.name, deque()
        super().listen(backlog)

    def accept(self) -> tuple[Self, Any]:
        number, address = self._do(super()._accept, select.POLLIN)  # type: ignore[misc]
        accepted = type(self)(socket.AF_UNIX, socket.SOCK_STREAM, 0, number)
        if self.is_inet:
            accepted.is_inet, link = True, self.network.waiting[self.name].popleft()
            accepted.link, link.server = link, accepted
            link.ways[1].sender = accepted
            accepted.here, accepted.there = self.here, link.client.here
            address = link.client.here
        return accepted, address

    def connect(self, address: Any) -> None:
        if not self.is_inet:
            connect = super().connect
            self._do(lambda: connect(address), select.POLLOUT, socket.SO_SNDTIMEO)
            return
        self.network.scheduler.point()
        name = self.network.ports.get(address[1])
        if self.network.is_faulty and self.network.rng.random() < 4 * self.network.fault_share:
            self.network.count("refused")
            name = None
        if name is None:
            raise ConnectionRefusedError(errno.ECONNREFUSED, "Connection refused")
        super().connect(name)
        self.here, self.there = ("127.0.0.1", self.network.port()), address[:2]
        self.link = Link(self)
        self.network.waiting[name].append(self.link)
        self.network.strike(self.link)

    def connect_ex(self, address: Any) -> int:
        try:
            self.connect(address)
        except OSError as error:
            return error.errno or errno.EIO
        return 0

    def getsockname(self) -> Any:
        name = super().getsockname()
        return self.here if self.is_inet else name

    def getpeername(self) -> Any:
        name = super().getpeername()
        return self.there if self.is_inet else name

    # -- settings

    def setsockopt(self, level: int, optname: int, value: Any, optlen: Any = None) -> None:
        if level == socket.SOL_SOCKET and optname in self.limits:
            whole, part = struct.unpack("@ll", value)
            self.limits[optname] = whole + part / 1e6
        elif not self.is_inet and level != socket.IPPROTO_TCP:
            super().setsockopt(level, optname, value)
        _Socket.getsockname(self)  # a socket that is closed says so

    def getsockopt(self, level: int, optname: int, *buflen: int) -> Any:
        if level == socket.IPPROTO_TCP:
            raise OSError(errno.EOPNOTSUPP, "Operation not supported")
        return super().getsockopt(level, optname, *buflen)

    # -- ending

    def shutdown(self, how: int) -> None:
        way = self._way
        if way is not None and (way.queue or way.is_dead) and how != socket.SHUT_RD:
            way.put(None)
            how = socket.SHUT_RD
        super().shutdown(how)

    def close(self) -> None:
        if self.fileno() < 0:
            return super().close()
        if self.name:
            del self.network.ports[self.here[1]], self.network.waiting[self.name]
        link, way = self.link, self._way
        if link is None or way is None or link.is_reset:
            return super().close()
        if (way.queue or way.is_dead) and way.raw is None:
            way.raw = _socket.socket(socket.AF_UNIX, socket.SOCK_STREAM, 0, os.dup(self.fileno()))
            way.put(None)
        return super().close()


@contextmanager
def network(scheduler: Scheduler, seed: int) -> Iterator[Network]:
    """Every socket that is made in the block is one of this network, or a Unix socket."""
    made = Network(scheduler, seed)
    kind = type("socket", (Sock,), {"network": made})
    with mock.patch.object(socket, "socket", kind):
        yield made
