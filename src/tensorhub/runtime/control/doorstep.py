"""Accepting the connections of a listening socket in batches, so that no flood keeps others in the kernel's queue, and
having the handshake of each begun when it is its turn.

Responsible for sockets whose handshake has not begun, and for ending those that must go. Not responsible for whose turn it
is (`PendingHandshakes`), nor for the handshake: `meet` begins it, and takes the socket over.
"""

from __future__ import annotations

import errno
import select
import socket
import threading
from collections.abc import Callable
from typing import Any

import anyio
import anyio.lowlevel

from tensorhub.errors import shortage
from tensorhub.logs import Tally
from tensorhub.runtime import clock
from tensorhub.runtime.control.pending_handshakes import PendingHandshakes, origin_of
from tensorhub.runtime.wakeup import Wakeup
from tensorhub.transport import unix
from tensorhub.transport.forks import close_in_children

ACCEPTED_PER_TURN = 128  # connections; then everybody else in the loop has a turn
MET_PER_TURN = 16
RETRY_S = 0.1  # after a connection that could not be accepted
ROOM_S = 0.01  # the same, if strangers were thrown out to make room

_GONE = select.EPOLLRDHUP | select.EPOLLHUP | select.EPOLLERR


class Stranger:
    """One connection whose peer has not proved itself."""

    __slots__ = ("connection", "end", "origin")

    def __init__(self, connection: socket.socket, origin: str) -> None:
        self.connection = connection  # non-blocking; whoever meets it closes it
        self.origin = origin  # where it comes from
        self.end: Callable[[], object] = connection.close  # ends the connection; whoever meets it gives another way


class Doorstep:
    """One listener's. `dismiss` may be called from any thread; the rest belongs to the loop's."""

    def __init__(
        self,
        listener: socket.socket,
        strangers: PendingHandshakes[Stranger],
        meet: Callable[[Stranger], None],
        crowding: Tally,
        shortages: Tally,
        may_meet: Callable[[], bool] = lambda: True,
    ) -> None:
        """`listener`: a non-blocking one, which stays the caller's. `meet` has a handshake begun, which calls `dismiss` when
        it is over. `may_meet`: whether there is room for one more; call `look` when that has changed. StateError: this
        process lacks descriptors.
        """
        self._listener = listener
        self._strangers = strangers
        self._lock = threading.Lock()  # guards the strangers
        self._meet = meet
        self._may_meet = may_meet
        self._crowding = crowding
        self._shortages = shortages
        self._silent: dict[int, Stranger] = {}  # by descriptor: those that have said nothing yet
        try:
            self._words = select.epoll()  # tells which of them has
        except OSError as error:
            raise shortage(error) or error from None
        self._wakeup = Wakeup()

    def __repr__(self) -> str:
        return f"<Doorstep: {self._strangers!r}>"

    @property
    def is_empty(self) -> bool:
        """Whether nobody is there, nor waits in the kernel."""
        return not len(self._strangers) and not _is_readable(self._listener)

    async def keep(self) -> None:
        """Accept until cancelled; then close all that have not been met. Raises OSError if the listener is unusable."""
        try:
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(self._hear)
                tasks.start_soon(self._give_turns)
                await self._accept()
        finally:
            self._words.close()
            with self._lock:
                while (stranger := self._strangers.oldest_of_most()) is not None:
                    stranger.end()

    def proved(self, stranger: Stranger) -> None:
        """It has proved itself, and is none any more."""
        with self._lock:
            self._strangers.proved(stranger)
        self._wakeup.set()

    def dismiss(self, stranger: Stranger) -> None:
        """It is gone."""
        with self._lock:
            self._strangers.dismiss(stranger)
        self._wakeup.set()

    def look(self) -> None:
        """There may be room to meet somebody."""
        self._wakeup.set()

    # ----------------------------------------------------------------------------------------------- accepting

    async def _accept(self) -> None:
        while True:
            await anyio.wait_readable(self._listener)
            try:
                self._accept_some()
            except OSError as error:
                if error.errno in (errno.EBADF, errno.EINVAL, errno.ENOTSOCK):
                    raise
                await self._make_room(str(error))
            self._wakeup.set()  # there may be a deadline now

    def _accept_some(self) -> None:
        """Accept those that wait. What keeps one of them out, such as a lack of descriptors, is raised, and ends none."""
        for _ in range(ACCEPTED_PER_TURN):
            try:
                connection, address = self._listener.accept()
            except BlockingIOError:
                return
            except (ConnectionAbortedError, InterruptedError):
                continue
            close_in_children(connection).setblocking(False)
            stranger = Stranger(connection, _origin(connection, address))
            with self._lock:
                gone = self._strangers.came(stranger, stranger.origin, clock.now())
            if gone is not None:
                self._throw_out(gone, f"more than {self._strangers.most} connections have not proved themselves")
            if gone is not stranger:
                self._words.register(connection, select.EPOLLIN | select.EPOLLRDHUP)  # if it fails, it expires like others
                self._silent[connection.fileno()] = stranger

    async def _make_room(self, reason: str) -> None:
        """Descriptors are short: a quarter of the strangers goes, also for the sake of others in this process. At least one
        goes, unless nobody waits: the kernel reports a lack of descriptors even then.
        """
        self._shortages.count(reason=reason, advice="raise `ulimit -n` if it is descriptors that are missing")
        somebody_waits = _is_readable(self._listener)
        with self._lock:
            going = max(len(self._strangers) // 4, int(somebody_waits))
            gone = [self._strangers.oldest_of_most() for _ in range(going)]
        for stranger in filter(None, gone):
            self._throw_out(stranger, "descriptors are short")
        if somebody_waits:
            await anyio.sleep(ROOM_S if any(gone) else RETRY_S)

    def _throw_out(self, stranger: Stranger, why: str) -> None:
        self._crowding.count(reason=why)
        self._forget(stranger)
        stranger.end()

    def _forget(self, stranger: Stranger) -> None:
        """It is silent no more."""
        descriptor = stranger.connection.fileno()
        if self._silent.get(descriptor) is stranger:
            del self._silent[descriptor]
            self._words.unregister(descriptor)

    # ------------------------------------------------------------------------------------------------- meeting

    async def _hear(self) -> None:
        """Note who has spoken, or has gone."""
        while True:
            await anyio.wait_readable(self._words)
            for descriptor, events in self._words.poll(0):
                stranger = self._silent[descriptor]
                self._forget(stranger)
                with self._lock:
                    if events & _GONE:
                        self._strangers.dismiss(stranger)
                    else:
                        self._strangers.spoke(stranger)
                if events & _GONE:
                    stranger.end()
            self._wakeup.set()

    async def _give_turns(self) -> None:
        while True:
            met = 0
            while met < MET_PER_TURN and self._meet_next():
                met += 1
            if met:
                await anyio.lowlevel.checkpoint()
                continue
            with self._lock:
                expired = self._strangers.expired(clock.now())
                deadline = self._strangers.next_deadline(may_meet=self._may_meet())
            for stranger in expired:
                self._forget(stranger)
                stranger.end()
            with anyio.move_on_at(deadline) if deadline is not None else anyio.CancelScope():
                await self._wakeup.wait()

    def _meet_next(self) -> bool:
        if not self._may_meet():
            return False
        with self._lock:
            turn = self._strangers.meet(clock.now())
        if turn is None:
            return False
        stranger, gone = turn
        if gone is not None:
            self._throw_out(
                gone, f"its handshake took long, or its origin had most of the {self._strangers.met_max} at a time"
            )
        self._meet(stranger)
        return True


def _is_readable(listener: socket.socket) -> bool:
    waiting = select.poll()
    waiting.register(listener, select.POLLIN)
    return bool(waiting.poll(0))


def _origin(connection: socket.socket, address: Any) -> str:
    """Where a connection comes from: an address, or the user whose it is where there is none."""
    if connection.family != socket.AF_UNIX:
        return origin_of(address[0])
    return f"user {unix.peer_uid(connection)}"
