"""Who waits before a listening socket, and where each comes from."""

from __future__ import annotations

import errno
import os
import select
import socket
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import anyio
import anyio.lowlevel
import pytest

from tensorhub.logs import Tally, get_logger
from tensorhub.runtime.control.doorstep import Doorstep, Stranger
from tensorhub.runtime.control.pending_handshakes import PendingHandshakes
from tensorhub.transport import sockets, unix
from tests.rig import WAIT_S, nothing_left, until

log = get_logger("tests.doorstep")


@pytest.fixture(params=["tcp", "unix"])
def listener(request: pytest.FixtureRequest) -> Iterator[socket.socket]:
    with sockets.listen("127.0.0.1") if request.param == "tcp" else unix.listen() as made:
        yield made


def come(listener: socket.socket, words: bytes = b"") -> socket.socket:
    peer = socket.socket(listener.family)
    peer.settimeout(WAIT_S)
    peer.connect(listener.getsockname())
    peer.sendall(words)
    return peer


async def test_who_has_spoken_is_met_and_who_says_nothing_or_goes_is_closed(listener: socket.socket) -> None:
    met: list[Stranger] = []
    strangers = PendingHandshakes[Stranger](8, 2, 0.5)
    tally = Tally(log.info, "x")
    async with nothing_left(), anyio.create_task_group() as tasks:
        doorstep = Doorstep(listener, strangers, met.append, tally, tally)
        tasks.start_soon(doorstep.keep)
        with come(listener, b"hello") as speaks, come(listener) as silent:
            come(listener).close()
            await until(lambda: len(met) == 1 and len(strangers) == 2)
            assert await anyio.to_thread.run_sync(silent.recv, 1) == b""  # after half a second
            assert met[0].connection.recv(10) == b"hello"
            doorstep.dismiss(met[0])
            assert len(strangers) == 0
            met[0].connection.sendall(b"welcome")
            assert speaks.recv(10) == b"welcome"
            met[0].connection.close()
        with come(listener) as waits:
            await until(lambda: len(strangers) == 1)
            tasks.cancel_scope.cancel()
            with anyio.CancelScope(shield=True):
                assert await anyio.to_thread.run_sync(waits.recv, 1) == b""


class Words:
    """An epoll, of which there is one time no room for one more."""

    def __init__(self, real: select.epoll) -> None:
        self.real = real
        self.fails = True

    def register(self, *given: Any) -> None:
        if self.fails:
            self.fails = False
            raise OSError(errno.ENOSPC, "no space left")
        self.real.register(*given)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.real, name)


async def test_one_that_nobody_can_listen_to_is_counted_and_expires(listener: socket.socket) -> None:
    strangers, shortages = PendingHandshakes[Stranger](8, 2, 0.5), Tally(log.info, "x")
    async with nothing_left(), anyio.create_task_group() as tasks:
        doorstep = Doorstep(listener, strangers, lambda stranger: None, shortages, shortages)
        doorstep._words = Words(doorstep._words)  # type: ignore[assignment]
        tasks.start_soon(doorstep.keep)
        with come(listener) as peer:
            await until(lambda: len(strangers) == 1)
            assert not doorstep._silent
            assert await anyio.to_thread.run_sync(peer.recv, 1) == b""  # after half a second
            assert len(strangers) == 0
        with come(listener) as later:
            await until(lambda: len(doorstep._silent) == 1)
            later.close()
        tasks.cancel_scope.cancel()


async def test_nobody_is_met_for_whom_there_is_no_room() -> None:
    met: list[Stranger] = []
    room = [False]
    tally = Tally(log.info, "x")
    with sockets.listen("127.0.0.1") as listener:
        async with nothing_left(), anyio.create_task_group() as tasks:
            strangers = PendingHandshakes[Stranger](8, 2, WAIT_S)
            doorstep = Doorstep(listener, strangers, met.append, tally, tally, lambda: room[0])
            tasks.start_soon(doorstep.keep)
            with come(listener, b"hello"):
                await until(lambda: bool(strangers._spoken))
                assert not met
                room[0] = True
                doorstep.look()
                await until(lambda: len(met) == 1)
                met[0].connection.close()
                doorstep.dismiss(met[0])
            tasks.cancel_scope.cancel()


async def origins_of(listener: socket.socket, code: str) -> set[str]:
    """Where that Python code's connections to the listener come from."""
    tally = Tally(log.info, "x")
    async with nothing_left(), anyio.create_task_group() as tasks:
        strangers = PendingHandshakes[Stranger](8, 2, WAIT_S)
        tasks.start_soon(Doorstep(listener, strangers, lambda stranger: None, tally, tally).keep)
        name = listener.getsockname()
        with subprocess.Popen([sys.executable, "-c", code, repr(name)], stdin=subprocess.PIPE) as process:  # noqa: ASYNC220
            await until(lambda: len(strangers) == 1)
            found = set(strangers._by_origin)
            process.communicate(b"", WAIT_S)
        tasks.cancel_scope.cancel()
    return found


PEER = """
import ast, os, socket, sys
{first}
peer = socket.socket(socket.AF_UNIX if isinstance(address := ast.literal_eval(sys.argv[1]), bytes) else socket.AF_INET)
peer.connect(address)
sys.stdin.read()
"""


async def test_on_a_unix_socket_the_peers_user_is_the_origin() -> None:
    with unix.listen() as listener:
        assert await origins_of(listener, PEER.format(first="")) == {f"user {os.getuid()}"}


@pytest.mark.root
async def test_on_a_unix_socket_another_user_is_another_origin() -> None:
    with unix.listen() as listener:
        assert await origins_of(listener, PEER.format(first="os.setuid(12345)")) == {"user 12345"}


async def test_on_tcp_the_address_is_the_origin(listener: socket.socket) -> None:
    if listener.family == socket.AF_INET:
        assert await origins_of(listener, PEER.format(first="")) == {"127.0.0.1"}
