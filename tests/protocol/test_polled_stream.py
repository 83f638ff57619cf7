"""Sockets that one epoll watches: nothing that comes is missed, neither bytes nor an end, on
asyncio and on trio.

What a byte stream does for messages is in `tests/protocol/test_stream.py`, which runs over these,
too.
"""

from __future__ import annotations

import contextlib
import socket
from collections.abc import AsyncIterator

import anyio
import anyio.lowlevel
import pytest
from anyio.abc import SocketAttribute

from tensorhub.protocol.polled_stream import PolledStream, Poller
from tests.rig import WAIT_S, nothing_left


@pytest.fixture(params=["asyncio", "trio"])
def anyio_backend(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@contextlib.asynccontextmanager
async def pair() -> AsyncIterator[tuple[socket.socket, PolledStream]]:
    """A blocking socket, and the stream at its other end."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        peer = socket.create_connection(listener.getsockname())
        connection = listener.accept()[0]
    connection.setblocking(False)
    async with nothing_left(), anyio.create_task_group() as tasks:
        poller = Poller()
        tasks.start_soon(poller.keep)
        with peer, anyio.fail_after(WAIT_S):
            async with poller.stream(connection) as stream:
                yield peer, stream
        assert repr(poller) == "<Poller of 0 streams>"
        tasks.cancel_scope.cancel()


async def settle() -> None:
    """Let whoever waits for the kernel see what lies there."""
    for _ in range(10):
        await anyio.lowlevel.checkpoint()


@pytest.mark.parametrize("is_there_before", [False, True])
async def test_bytes_and_an_end_that_come_together_are_both_heard(is_there_before: bool) -> None:
    async with pair() as (peer, stream), anyio.create_task_group() as tasks:
        heard: list[bytes] = []

        async def hear() -> None:
            with contextlib.suppress(anyio.EndOfStream):
                while True:
                    heard.append(await stream.receive())

        if not is_there_before:
            tasks.start_soon(hear)
            await settle()
        peer.sendall(b"last words")
        peer.shutdown(socket.SHUT_WR)
        await settle()
        if is_there_before:
            tasks.start_soon(hear)
        await anyio.lowlevel.checkpoint()
        while not heard:
            await anyio.lowlevel.checkpoint()
        assert heard == [b"last words"]


async def test_an_end_that_comes_after_a_short_read_is_heard() -> None:
    async with pair() as (peer, stream):
        peer.sendall(b"words")
        assert await stream.receive() == b"words"
        peer.close()
        with pytest.raises(anyio.EndOfStream):
            await stream.receive()


async def test_what_follows_an_urgent_byte_is_heard() -> None:
    """A read stops there, and what lies behind has been told already."""
    async with pair() as (peer, stream), anyio.create_task_group() as tasks:
        heard: list[bytes] = []

        async def hear() -> None:
            while sum(map(len, heard)) < len(b"before after"):
                heard.append(await stream.receive())

        tasks.start_soon(hear)
        await settle()
        peer.sendall(b"before ")
        peer.send(b"!", socket.MSG_OOB)
        peer.sendall(b"after")
    assert b"".join(heard) == b"before after"


async def test_a_sender_waits_until_its_peer_takes_the_rest() -> None:
    async with pair() as (peer, stream), anyio.create_task_group() as tasks:
        peer.settimeout(WAIT_S)
        sent = anyio.Event()
        data = bytes(range(256)) * 2**15

        async def send() -> None:
            await stream.send(data)
            sent.set()

        tasks.start_soon(send)
        await settle()
        assert not sent.is_set()
        assert stream.send_nowait(b"too much") == 0
        heard = bytearray()
        while len(heard) < len(data):
            heard += await anyio.to_thread.run_sync(peer.recv, 2**20)
        await sent.wait()
        assert heard == data
        assert stream.send_nowait(b"next") == 4


async def test_closing_wakes_whoever_waits_and_closes_the_socket() -> None:
    async with pair() as (_peer, stream), anyio.create_task_group() as tasks:
        failures: list[type[BaseException]] = []

        async def until_closed(receives: bool) -> None:
            try:
                while True:
                    await (stream.receive() if receives else stream.send(bytes(2**20)))
            except anyio.ClosedResourceError as error:
                failures.append(type(error))

        tasks.start_soon(until_closed, True)
        tasks.start_soon(until_closed, False)
        await settle()
        await stream.aclose()
        await stream.aclose()
        await settle()
        assert failures == [anyio.ClosedResourceError] * 2
        assert stream.extra(SocketAttribute.raw_socket).fileno() == -1
        with pytest.raises(anyio.ClosedResourceError):
            await stream.receive()
