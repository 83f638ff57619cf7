"""The accept loop: the caps on pending connections, and what counts as one address."""

from __future__ import annotations

import contextlib
import errno
import os
import resource
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

import anyio
import anyio.to_thread
import pytest

from tensorhub.logs import Tally, get_logger
from tensorhub.runtime.control import accepting
from tensorhub.runtime.control.accepting import (
    PENDING_MAX,
    PENDING_READERS_MAX,
    AcceptLoop,
    caps,
    descriptors_for,
    network_of,
    pending_readers_max,
)
from tensorhub.transport import sockets, unix
from tests.rig import WAIT_S, nothing_left, until

log = get_logger("tests.accepting")


@pytest.fixture(params=["tcp", "unix"])
def listener(request: pytest.FixtureRequest) -> Iterator[socket.socket]:
    with sockets.listen("127.0.0.1") if request.param == "tcp" else unix.listen() as made:
        yield made


class Served:
    """What an accept loop has served: every connection until its peer says something, or for ever."""

    def __init__(self, listener: socket.socket, pending_max: int) -> None:
        self.heard: list[bytes] = []
        self.loop = AcceptLoop(listener, pending_max, self.serve, Tally(log.info, "x"), Tally(log.info, "y"))

    async def serve(self, connection: socket.socket, authenticated: Callable[[], None]) -> None:
        await anyio.wait_readable(connection)
        if words := connection.recv(10):
            authenticated()
            self.heard.append(words)
            await anyio.sleep_forever()

    @property
    def pending(self) -> int:
        return len(self.loop._pending)


@contextlib.asynccontextmanager
async def accepted(listener: socket.socket, pending_max: int = 8) -> AsyncIterator[Served]:
    served = Served(listener, pending_max)
    async with nothing_left(), anyio.create_task_group() as tasks:
        tasks.start_soon(served.loop.run, tasks)
        yield served
        tasks.cancel_scope.cancel()


def come(listener: socket.socket) -> socket.socket:
    peer = socket.socket(listener.family)
    peer.settimeout(WAIT_S)
    peer.connect(listener.getsockname())
    return peer


async def is_closed(peer: socket.socket) -> bool:
    return await anyio.to_thread.run_sync(peer.recv, 1) == b""


async def test_a_connection_is_pending_until_it_authenticates_or_ends(listener: socket.socket) -> None:
    async with accepted(listener) as served:
        with come(listener) as first, come(listener) as second:
            await until(lambda: served.pending == 2)
            assert not served.loop.is_empty
            first.sendall(b"hello")
            await until(lambda: served.heard == [b"hello"])
            assert served.pending == 1
            second.close()
            await until(lambda: served.loop.is_empty)


async def test_at_the_cap_the_oldest_pending_connection_is_closed_and_no_other(listener: socket.socket) -> None:
    async with accepted(listener, pending_max=2) as served:
        with come(listener) as authentic:
            authentic.sendall(b"hello")
            await until(lambda: served.heard == [b"hello"])
            peers = [come(listener) for _ in range(4)]
            assert await is_closed(peers[0])
            assert await is_closed(peers[1])
            peers[2].sendall(b"late")
            await until(lambda: served.heard == [b"hello", b"late"])
            for peer in peers:
                peer.close()


async def test_at_the_cap_an_address_with_many_pending_connections_closes_its_own(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(accepting, "PENDING_PER_ADDRESS_MAX", 2)
    with sockets.listen("127.0.0.1") as listener:
        port = listener.getsockname()[1]
        async with accepted(listener, pending_max=3) as served:
            with contextlib.ExitStack() as stack:

                def come_from(host: str) -> socket.socket:
                    peer = socket.create_connection(("127.0.0.1", port), WAIT_S, source_address=(host, 0))
                    return stack.enter_context(peer)

                slow = come_from("127.0.0.2")
                await until(lambda: served.pending == 1)
                flood = [come_from("127.0.0.3") for _ in range(20)]
                for peer in flood[:18]:
                    assert await is_closed(peer)
                slow.sendall(b"hello")
                await until(lambda: served.heard == [b"hello"])


async def test_where_descriptors_are_short_the_oldest_pending_connections_are_closed(listener: socket.socket) -> None:
    class Short:
        """A listener that lacks a descriptor one time."""

        fails = False

        def accept(self) -> Any:
            if Short.fails:
                Short.fails = False
                raise OSError(errno.EMFILE, "too many open files")
            return listener.accept()

        def fileno(self) -> int:
            return listener.fileno()

    async with accepted(Short()) as served:  # type: ignore[arg-type]
        with come(listener) as first, come(listener) as second:
            await until(lambda: served.pending == 2)
            Short.fails = True
            with come(listener):
                assert await is_closed(first)
                await until(lambda: served.pending == 2)
                second.sendall(b"hello")
                await until(lambda: served.heard == [b"hello"])


async def test_a_loop_that_ends_closes_its_connections(listener: socket.socket) -> None:
    with come(listener) as peer:
        async with accepted(listener) as served:
            await until(lambda: served.pending == 1)
        assert peer.recv(1) == b""


# ---------------------------------------------------------------------------------------------------- addresses

PEER = """
import ast, os, socket, sys
{first}
peer = socket.socket(socket.AF_UNIX)
peer.connect(ast.literal_eval(sys.argv[1]))
sys.stdin.read()
"""


async def address_of(code: str) -> set[str]:
    """Where the connection of that Python code comes from."""
    with unix.listen() as listener:
        async with accepted(listener) as served:
            name = listener.getsockname()
            with subprocess.Popen([sys.executable, "-c", code, repr(name)], stdin=subprocess.PIPE) as process:  # noqa: ASYNC220
                await until(lambda: served.pending == 1)
                found = set(served.loop._by_address)
                process.communicate(b"", WAIT_S)
    return found


async def test_on_a_unix_socket_the_peers_user_is_the_address() -> None:
    assert await address_of(PEER.format(first="")) == {f"user {os.getuid()}"}


@pytest.mark.root
async def test_on_a_unix_socket_another_user_is_another_address() -> None:
    assert await address_of(PEER.format(first="os.setuid(12345)")) == {"user 12345"}


@pytest.mark.parametrize(
    ("host", "network"),
    [
        ("10.0.0.1", "10.0.0.1"),
        ("::ffff:10.0.0.1", "10.0.0.1"),
        ("2001:db8:1:2:3:4:5:6", "2001:db8:1:2::/64"),
        ("fe80::1%eth0", "fe80::/64"),
        ("", ""),
    ],
)
def test_an_ipv6_network_counts_as_one_address(host: str, network: str) -> None:
    assert network_of(host) == network


# -------------------------------------------------------------------------------------------------- descriptors


@pytest.mark.parametrize(
    ("soft", "expected"),
    [
        (resource.RLIM_INFINITY, (PENDING_MAX, 9999)),
        (20_000, (PENDING_MAX, 9999)),
        (4096, (1024, 2944)),
        (1024, (256, 640)),
        (64, (16, 32)),
        (3, (1, 2)),
    ],
)
def test_descriptors_bound_both_caps(monkeypatch: pytest.MonkeyPatch, soft: int, expected: tuple[int, int]) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda _: (soft, soft))
    assert caps(9999) == expected


@pytest.mark.parametrize("sessions", [1000, 12159, 12161, 16384])
def test_so_many_descriptors_are_enough_and_one_less_is_not(monkeypatch: pytest.MonkeyPatch, sessions: int) -> None:
    soft = descriptors_for(sessions)
    monkeypatch.setattr(resource, "getrlimit", lambda _: (soft, soft))
    assert caps(sessions)[1] == sessions
    monkeypatch.setattr(resource, "getrlimit", lambda _: (soft - 1, soft - 1))
    assert caps(sessions)[1] == sessions - 1


@pytest.mark.parametrize(
    ("soft", "expected"),
    [(resource.RLIM_INFINITY, PENDING_READERS_MAX), (20_000, PENDING_READERS_MAX), (1024, 128), (3, 1)],
)
def test_pending_connections_of_an_owner_leave_its_user_most_descriptors(
    monkeypatch: pytest.MonkeyPatch, soft: int, expected: int
) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda _: (soft, soft))
    assert pending_readers_max() == expected
