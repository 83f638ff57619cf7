"""Accepting the connections of a listening socket, and bounding those that have not authenticated:
pending connections.

There is a cap on pending connections. At the cap a new connection closes an old one: the oldest of
the address that has most (`Waiting`). So a flood closes its own connections, unless it comes from
as many addresses as connections may be pending; then a handshake that takes its usual milliseconds
is over before its connection is the oldest. The deadline of a handshake is the caller's: `serve`
runs it.
"""

from __future__ import annotations

import errno
import ipaddress
import resource
import select
import socket
import sys
from collections.abc import Awaitable, Callable
from functools import lru_cache, partial
from typing import Any
from weakref import WeakValueDictionary

import anyio
import anyio.abc
import anyio.lowlevel

from tensorhub.logs import Tally
from tensorhub.runtime.control.waiting import Waiting
from tensorhub.transport import unix
from tensorhub.transport.forks import close_in_children

PENDING_MAX = 4096  # at a coordinator
PENDING_READERS_MAX = 1024  # at each listener of an owner
ACCEPTED_PER_TURN = 128  # connections; then the other tasks of the loop have a turn
RETRY_S = 0.1  # after a connection that could not be accepted
ROOM_S = 0.01  # instead of RETRY_S, if pending connections were closed to make room
RESERVED_DESCRIPTORS = 128  # for whatever else the process has open
IPV6_NETWORK_BITS = 64  # what one peer has for itself, so what counts as one address

Serve = Callable[[socket.socket, Callable[[], None]], Awaitable[None]]


class _Pending:
    """One connection that has not authenticated."""

    __slots__ = ("connection", "is_served", "scope")

    def __init__(self, connection: socket.socket) -> None:
        self.connection = connection
        self.is_served = False  # its task has begun
        self.scope = anyio.CancelScope()


class Turns:
    """Of one loop's TLS handshakes, which cost a processor much: one step has its turn at a time,
    and of each address one step waits for that. So a flood from one address delays its own.
    """

    def __init__(self) -> None:
        self._all = anyio.Lock()
        self._by_address = WeakValueDictionary[str, anyio.Lock]()

    def of(self, connection: socket.socket) -> tuple[anyio.Lock, anyio.Lock]:
        """What to hold for a step, one after the other."""
        try:
            address = _address(connection, connection.getpeername())
        except OSError:  # its peer has gone already
            address = ""
        return self._by_address.setdefault(address, anyio.Lock()), self._all


class AcceptLoop:
    """The accept loop of one listener."""

    def __init__(
        self,
        listener: socket.socket,
        pending_max: int,
        serve: Serve,
        closings: Tally,
        shortages: Tally,
    ) -> None:
        """`listener`: a non-blocking one, which stays the caller's. `serve` serves a non-blocking
        connection to its end, and calls its second argument once the peer has authenticated; until
        then it may be cancelled.
        """
        self._listener = listener
        self._pending_max = pending_max
        self._serve = serve
        self._closings = closings
        self._shortages = shortages
        self._pending = Waiting[_Pending]()

    def __repr__(self) -> str:
        return (
            f"<AcceptLoop: {len(self._pending)} of {self._pending_max} pending, of "
            f"{len(self._pending.addresses)} addresses>"
        )

    @property
    def is_empty(self) -> bool:
        """Whether no connection is pending, nor waits in the kernel."""
        return not self._pending and not self._is_readable()

    async def run(self, tasks: anyio.abc.TaskGroup) -> None:
        """Accept until cancelled, and serve in these tasks. Raises OSError if the listener is
        unusable.
        """
        try:
            while True:
                await anyio.wait_readable(self._listener)
                try:
                    self._accept_some(tasks)
                except OSError as error:
                    if error.errno in (errno.EBADF, errno.EINVAL, errno.ENOTSOCK):
                        raise
                    await self._make_room(str(error))
                await anyio.lowlevel.checkpoint()
        finally:
            for pending in self._pending:
                if not pending.is_served:  # its task never begins
                    pending.connection.close()

    def _accept_some(self, tasks: anyio.abc.TaskGroup) -> None:
        """Accept the connections that wait. What keeps one of them out, such as a lack of
        descriptors, is raised.
        """
        for _ in range(ACCEPTED_PER_TURN):
            try:
                connection, address = self._listener.accept()
            except BlockingIOError:
                return
            except (ConnectionAbortedError, InterruptedError):
                continue
            close_in_children(connection).setblocking(False)
            pending = _Pending(connection)
            self._pending.add(pending, _address(connection, address))
            if len(self._pending) > self._pending_max:
                self._close_first(f"more than {self._pending_max} connections are pending")
            tasks.start_soon(self._run, pending)

    async def _run(self, pending: _Pending) -> None:
        pending.is_served = True
        try:
            with pending.scope:
                # all may have been cancelled before this task began
                await anyio.lowlevel.checkpoint_if_cancelled()
                await self._serve(pending.connection, partial(self._pending.discard, pending))
        finally:
            self._pending.discard(pending)
            pending.connection.close()

    async def _make_room(self, reason: str) -> None:
        """Descriptors are short: a quarter of the pending connections goes, and one at least,
        unless no connection waits: the kernel reports a lack of descriptors even then.
        """
        self._shortages.count(
            reason=reason, advice="raise `ulimit -n` if it is descriptors that are missing"
        )
        if not self._is_readable():
            return
        count = len(self._pending)
        for _ in range(max(1, count // 4)):
            self._close_first("descriptors are short")
        await anyio.sleep(ROOM_S if count else RETRY_S)

    def _close_first(self, why: str) -> None:
        if (pending := self._pending.first()) is not None:
            self._closings.count(reason=why)
            self._pending.discard(pending)
            pending.scope.cancel()

    def _is_readable(self) -> bool:
        waiting = select.poll()
        waiting.register(self._listener, select.POLLIN)
        return bool(waiting.poll(0))


def _address(connection: socket.socket, address: Any) -> str:
    """What counts as one address: see `network_of`. On a Unix socket it is the peer's user."""
    if connection.family != socket.AF_UNIX:
        return network_of(address[0])
    return f"user {unix.peer_uid(connection)}"


@lru_cache(1024)
def network_of(host: object) -> str:
    """An IPv4 address itself, the network of an IPv6 address, or "" for any other host."""
    try:
        address = ipaddress.ip_address(str(host).partition("%")[0])
    except ValueError:
        return ""
    if isinstance(address, ipaddress.IPv4Address):
        return str(address)
    if address.ipv4_mapped is not None:
        return str(address.ipv4_mapped)
    return str(ipaddress.ip_network((int(address), IPV6_NETWORK_BITS), strict=False))


def caps(sessions_max: int, descriptors: int | None = None) -> tuple[int, int]:
    """How many pending connections and how many sessions fit so many descriptors, at most
    `sessions_max` of these.

    None: this process' limit, `ulimit -n`. Each connection is one descriptor.
    """
    soft = _descriptors() if descriptors is None else descriptors
    pending = max(1, min(PENDING_MAX, soft // 4))
    return pending, max(1, min(sessions_max, soft - pending - min(RESERVED_DESCRIPTORS, soft // 4)))


def descriptors_for(sessions: int) -> int:
    """The least `ulimit -n` at which so many sessions fit."""
    kept = sessions + RESERVED_DESCRIPTORS
    return min(kept + PENDING_MAX, 4 * (kept - 1) // 3 + 1)


def pending_readers_max() -> int:
    """How many pending connections each listener of an owner may have: most descriptors of its
    process are its user's.
    """
    return max(1, min(PENDING_READERS_MAX, _descriptors() // 8))


def _descriptors() -> int:
    soft = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return sys.maxsize if soft == resource.RLIM_INFINITY else soft
