"""The accept loop: the caps on pending connections, and what counts as one address."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Iterator

import anyio
import anyio.to_thread
import pytest

from tensorhub.logs import Tally, get_logger
from tensorhub.runtime.control.accepting import (
    AcceptLoop,
    network_of,
)
from tensorhub.transport import sockets, unix
from tests.rig import WAIT_S, nothing_left, until

log = get_logger("tests.accepting")


@pytest.fixture(params=["tcp", "unix"])
def listener(request: pytest.FixtureRequest) -> Iterator[socket.socket]:
    with sockets.listen("127.0.0.1") if request.param == "tcp" else unix.listen() as made:
        yield made


class Served:
    """What an accept loop has served: every connection until its peer says something, or for
    ever.
    """

    def __init__(self, listener: socket.socket, pending_max: int) -> None:
        self.heard: list[bytes] = []
        self.calls = 0
        self.loop = AcceptLoop(
            listener, pending_max, self.serve, Tally(log.info, "x"), Tally(log.info, "y")
        )

    async def serve(self, connection: socket.socket, authenticated: Callable[[], None]) -> None:
        self.calls += 1
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


async def test_a_connection_is_pending_until_it_authenticates_or_ends(
    listener: socket.socket,
) -> None:
    async with accepted(listener) as served:
        with come(listener) as first, come(listener) as second:
            await until(lambda: served.pending == 2)
            assert not served.loop.is_empty
            first.sendall(b"hello")
            await until(lambda: served.heard == [b"hello"])
            assert served.pending == 1
            second.close()
            await until(lambda: served.loop.is_empty)


async def test_a_connection_that_comes_as_all_ends_is_closed_and_not_served(
    listener: socket.socket,
) -> None:
    """What serves it may have ended already."""
    served = Served(listener, 8)
    with come(listener) as peer:
        peer.sendall(b"hello")
        async with nothing_left(), anyio.create_task_group() as tasks:
            served.loop._accept_some(tasks)
            tasks.cancel_scope.cancel()
        assert not served.calls
        with contextlib.suppress(ConnectionResetError):  # what it has said was not read
            assert await is_closed(peer)


async def test_at_the_cap_the_oldest_pending_connection_is_closed_and_no_other(
    listener: socket.socket,
) -> None:
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


@pytest.mark.parametrize("addresses", [1, 2])
async def test_at_the_cap_a_flood_closes_its_own_connections(addresses: int) -> None:
    """Of fewer addresses than may be pending."""
    with sockets.listen("127.0.0.1") as listener:
        port = listener.getsockname()[1]
        async with accepted(listener, pending_max=3) as served:
            with contextlib.ExitStack() as stack:

                def come_from(host: str) -> socket.socket:
                    peer = socket.create_connection(
                        ("127.0.0.1", port), WAIT_S, source_address=(host, 0)
                    )
                    return stack.enter_context(peer)

                slow = come_from("127.0.0.2")
                await until(lambda: served.pending == 1)
                flood = [come_from(f"127.0.0.{3 + n % addresses}") for n in range(20)]
                for peer in flood[:18]:
                    assert await is_closed(peer)
                slow.sendall(b"hello")
                await until(lambda: served.heard == [b"hello"])


# --------------------------------------------------------------------------------------------------
# addresses

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
            with subprocess.Popen(  # noqa: ASYNC220
                [sys.executable, "-c", code, repr(name)], stdin=subprocess.PIPE
            ) as process:
                await until(lambda: served.pending == 1)
                found = set(served.loop._pending.addresses)
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
