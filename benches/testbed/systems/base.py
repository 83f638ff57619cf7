"""What the testbed asks of a system, in one process; and how a rollout of one that does not say so
hears of a version.
"""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from typing import Any, Final

import anyio
import anyio.to_thread

from benches.testbed.shares import Share

NEWS_PORT: Final = 7100
WAIT_S: Final = 120.0
PHASES: Final = ("stragglers", "wait", "transfer", "copy")
"""What a stall is spent on: other workers that are not free yet; answers, sources, permission to
write; bytes on their way into this worker; copies and checks within it."""

Phases = dict[str, float]


@dataclass(frozen=True, slots=True)
class Setting:
    """One process' place in a run; JSON. `addresses`: of hosts by name. `rank`: 0 is the trainer,
    the rollouts follow.

    `group_rank`, `group_size`: of the model-parallel group of which it is a rank.
    """

    role: str  # trainer, rollout, seed, coordinator or store
    name: str  # of this life of the process
    host: str
    site: str
    group: str
    group_rank: int
    group_size: int
    rank: int
    workers: int  # trainer and rollouts
    nbytes: int
    chunk_bytes: int
    wan_s: float  # what one copy takes over the WAN; 0: there is none
    addresses: Mapping[str, str]
    scratch: str
    options: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Got:
    """What an update came to. `sources`: bytes by who sent them."""

    version: int
    phases: Phases
    sources: Mapping[str, int]
    changed: bool = True  # False: it was there already


class System:
    """One process' side. The trainer is asked to `publish`, a rollout for `newest`, `newer` and
    `update`.
    """

    def __init__(self, setting: Setting, share: Share, stack: AsyncExitStack) -> None:
        self.setting = setting
        self.share = share
        self.stack = stack
        self.views = [memoryview(tensor.reshape(-1)).cast("B") for tensor in share.tensors.values()]  # type: ignore[arg-type]

    @property
    def decides_together(self) -> bool:
        """Whether all ranks of a group ask after each generation, since one alone may know of a
        newer version first.
        """
        return self.setting.group_size > 1

    async def open(self) -> None:
        """Connect: whatever a worker does once."""

    async def publish(self, version: int, write: Callable[[], None]) -> Phases:
        """Have the rollouts able to get what `write` writes into the memory. What it returns is
        stall; `write` is not.
        """
        raise NotImplementedError

    def newest(self) -> int:
        """The newest version that a rollout has heard of, and would update to now."""
        raise NotImplementedError

    async def newer(self, than: int) -> None:
        """Return once `newest` is."""
        while self.newest() <= than:  # noqa: ASYNC110 - a thread hears it
            await anyio.sleep(0.01)

    async def first(self) -> Got:
        """Have the newest version in memory that holds none yet, once there is one."""
        await self.newer(0)
        return await self.update()

    async def update(self) -> Got:
        """Have the newest version in the memory."""
        raise NotImplementedError


class Baseline(System):
    """A system whose trainer tells its rollouts each new number, over a connection to each."""

    async def open(self) -> None:
        if self.setting.role == "trainer":
            self.news = Announcer(self.setting.addresses[self.setting.name])
            self.stack.callback(self.news.close)
        elif self.setting.role == "rollout":
            self._heard = await anyio.to_thread.run_sync(Heard, self.setting.addresses["trainer"])
            self.stack.callback(self._heard.close)

    def newest(self) -> int:
        return self._heard.newest


# lines
class Announcer:
    """Tells whoever is connected each number, and whoever connects the last one."""

    def __init__(self, host: str) -> None:
        self._lock = threading.Lock()
        self._last = 0
        self._connections: list[socket.socket] = []
        self._listener = socket.create_server((host, NEWS_PORT), backlog=64)
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):  # closed
            while True:
                connection, _ = self._listener.accept()
                connection.settimeout(WAIT_S)
                connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                with self._lock:
                    self._connections.append(connection)
                    self._tell(connection)

    def _tell(self, connection: socket.socket) -> None:
        try:
            connection.sendall(self._last.to_bytes(8, "big"))
        except OSError:
            self._connections.remove(connection)
            connection.close()

    def announce(self, version: int) -> None:
        with self._lock:
            self._last = version
            for connection in list(self._connections):
                self._tell(connection)

    def close(self) -> None:
        with self._lock:
            with contextlib.suppress(OSError):
                self._listener.shutdown(socket.SHUT_RDWR)
            self._listener.close()
            for connection in self._connections:
                connection.close()


class Heard:
    """The newest number that the trainer has told; a thread listens."""

    def __init__(self, host: str) -> None:
        self.newest = 0
        self._connection = connect(host, NEWS_PORT)
        self._connection.settimeout(None)
        threading.Thread(target=self._listen, daemon=True).start()

    def _listen(self) -> None:
        with contextlib.suppress(OSError):
            while len(number := self._connection.recv(8, socket.MSG_WAITALL)) == 8:
                self.newest = int.from_bytes(number, "big")

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._connection.shutdown(socket.SHUT_RDWR)
        self._connection.close()


# end of lines


def connect(host: str, port: int) -> socket.socket:
    """To a server that may not be there yet."""
    deadline_s = time.monotonic() + WAIT_S
    while True:
        try:
            connection = socket.create_connection((host, port), timeout=WAIT_S)
        except ConnectionRefusedError:
            if time.monotonic() > deadline_s:
                raise
            time.sleep(0.02)
        else:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            return connection


def receive_into(connection: socket.socket, view: memoryview) -> None:
    while view:
        count = connection.recv_into(view)
        if count == 0:
            raise ConnectionError("the sender ended before everything was there")
        view = view[count:]
