"""Accepting readers: how many are served, peers that do not behave, and what is left when the
listener ends.
"""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Callable

import anyio
import anyio.to_thread
import pytest

from tensorhub.messages import ReadRefused
from tensorhub.protocol.blocking import BlockingConnection
from tensorhub.protocol.codec import FROM_OWNER
from tensorhub.protocol.frames import PREFACE
from tensorhub.protocol.handshake import NONCE_BYTES, ClientHandshake, ServerHandshake
from tensorhub.protocol.secret import read_only_secret
from tensorhub.runtime.data import acceptor
from tensorhub.runtime.data.source_lane import SourceFailed
from tests.runtime.data.test_serving import LARGE, read
from tests.runtime.data_rig import (
    CHUNKS,
    SECRET,
    WAIT_S,
    Node,
    finish,
    manifest_of,
    next_event,
    serving,
    until,
)


async def test_more_readers_than_allowed_are_turned_away() -> None:
    manifest = manifest_of()
    a = Node("a", manifest, filled=True, readers_max=1).open(complete=False)
    b, c = (Node(name, manifest, filled=False).open(complete=False) for name in "bc")
    async with serving(a, b, c), b.runner() as to_b, c.runner() as to_c:
        to_b.add_source(a.grant())
        a.make_available(0)
        await until(lambda: b.has(0))
        to_c.add_source(a.grant())
        failed = await next_event(to_c)
        assert isinstance(failed, SourceFailed)
        assert failed.reason == "refused"
        assert "1 connections are served here already (Options.readers_max)" in failed.detail
        a.make_available(*range(CHUNKS))
        await finish(to_b)


async def test_read_only_readers_have_half_of_the_places_at_most() -> None:
    """Those that take what they asked for as slowly as they may kept a trainer's readers out for as
    long as they liked.
    """
    manifest = manifest_of((LARGE,), chunk_bytes=LARGE)
    a = Node("a", manifest, filled=True, readers_max=4).open(complete=True)
    b = Node("b", manifest, filled=False).open(complete=False)

    def are_inside(count: int) -> Callable[[], bool]:
        return lambda: f"{count} accesses" in repr(a.owner)

    async with serving(a, b), b.runner() as to_b:
        with contextlib.ExitStack() as stack:
            for name, inside in (("raw-1", 1), ("raw-2", 2), ("raw-3", 2)):
                peer = stack.enter_context(socket.create_connection(a.listener.getsockname()))
                connection = BlockingConnection(peer, stall_timeout_s=WAIT_S)
                handshake = ClientHandshake(
                    "reader", name, read_only_secret(SECRET), os.urandom(NONCE_BYTES)
                )
                await anyio.to_thread.run_sync(connection.handshake, handshake, WAIT_S)
                connection.send(read(a, (0, 1)))
                # each in its turn: a lane is let in by its own thread
                await until(are_inside(inside))
            refusal = await anyio.to_thread.run_sync(connection.receive, FROM_OWNER)
            assert isinstance(refusal, ReadRefused)
            assert (
                "2 read-only connections are served here already (half of Options.readers_max)"
                in refusal.reason
            )
            to_b.add_source(a.grant())
            await finish(to_b)
            await until(are_inside(2))  # its own one is over


class Hasty(socket.socket):
    """It is said to be readable before something has come."""

    looks = 0

    def recv(self, bufsize: int, flags: int = 0) -> bytes:
        self.looks += 1
        if self.looks == 1:
            raise BlockingIOError
        return super().recv(bufsize, flags)


async def test_a_handshake_goes_on_after_a_wakeup_for_nothing() -> None:
    here, there = socket.socketpair()
    server = ServerHandshake("owner", "a-1", [SECRET], os.urandom(NONCE_BYTES))
    client = ClientHandshake("reader", "raw-1", SECRET, os.urandom(NONCE_BYTES))
    with (
        Hasty(fileno=here.detach()) as hasty,
        BlockingConnection(there, stall_timeout_s=WAIT_S) as connection,
    ):
        hasty.setblocking(False)
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(acceptor._handshake, hasty, None, server)
            await anyio.to_thread.run_sync(connection.handshake, client, WAIT_S)
        assert server.done
        assert hasty.looks > 1


async def test_a_reader_that_has_gone_takes_no_place(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither among the readers, nor among the connections that end."""
    monkeypatch.setattr(acceptor, "ENDING_MAX", 1)
    manifest = manifest_of()
    a = Node("a", manifest, filled=True, readers_max=1).open(complete=True)
    readers = [Node(f"b{n}", manifest, filled=False).open(complete=False) for n in range(4)]
    async with serving(a, *readers):
        for reader in readers:
            async with reader.runner() as runner:
                runner.add_source(a.grant())
                await finish(runner)
            reader.ways.pop().close()  # with the connection that it keeps
            await until(lambda: "0 lanes" in repr(a.owner))
            assert reader.arrays == a.arrays


@pytest.mark.parametrize("data", [b"", b"GET / HTTP/1.1\r\n\r\n", PREFACE + b"\xff\xff\xff\xff"])
async def test_a_malformed_peer_loses_its_connection_and_nobody_else_anything(data: bytes) -> None:
    manifest = manifest_of()
    a = Node("a", manifest, filled=True).open(complete=True)
    b = Node("b", manifest, filled=False).open(complete=False)
    async with serving(a, b), b.runner() as runner:
        with socket.create_connection(a.listener.getsockname()) as peer:
            peer.sendall(data)
            peer.shutdown(socket.SHUT_WR)
            runner.add_source(a.grant())
            await finish(runner)
            await until(lambda: "1 lanes" in repr(a.owner))  # the reader's, which it keeps


async def test_a_listener_that_is_cancelled_ends_lanes_in_the_middle_of_a_send() -> None:
    a = Node("a", manifest_of((LARGE,), chunk_bytes=LARGE), filled=True).open(complete=True)
    with socket.create_connection(a.listener.getsockname()) as sock:
        # which checks, at its end, that the lane is over, though its reader takes nothing
        async with serving(a):
            connection = BlockingConnection(sock, stall_timeout_s=WAIT_S)
            handshake = ClientHandshake("reader", "raw-1", SECRET, os.urandom(NONCE_BYTES))
            await anyio.to_thread.run_sync(connection.handshake, handshake, WAIT_S)
            connection.send(read(a, (0, 1)))
            await until(lambda: "1 accesses" in repr(a.owner))
