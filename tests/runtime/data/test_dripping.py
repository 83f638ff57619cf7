"""Peers that move next to nothing: they are given up like those that move nothing, and what they
held goes on elsewhere.

Covers `runtime.data.lanes` and `runtime.data.acceptor`.
"""

from __future__ import annotations

import contextlib
import os
import socket
import threading

import anyio
import anyio.to_thread
import pytest

from tensorhub.messages import ChunksFollow, Read
from tensorhub.protocol.blocking import BlockingConnection
from tensorhub.protocol.codec import FROM_OWNER, FROM_READER
from tensorhub.protocol.handshake import NONCE_BYTES, ClientHandshake, ServerHandshake
from tensorhub.protocol.lost import ConnectionLost
from tensorhub.runtime.data.source_lane import SourceFailed
from tests.runtime.data_rig import (
    CONTENT,
    SECRET,
    WAIT_S,
    Node,
    finish,
    manifest_of,
    next_event,
    serving,
    until,
    waited_out_s,
)

pytestmark = pytest.mark.anyio
LARGE = 2**20  # one chunk


async def test_a_source_that_drips_is_given_up_and_another_one_brings_what_it_held() -> None:
    manifest = manifest_of((LARGE, LARGE), chunk_bytes=LARGE)
    a, b, c = (Node(name, manifest, filled=name != "c") for name in "abc")
    ended = threading.Event()

    def drip() -> None:
        a.listener.setblocking(True)
        sock = a.listener.accept()[0]
        with (
            BlockingConnection(sock, stall_timeout_s=WAIT_S) as connection,
            contextlib.suppress(OSError, ConnectionLost),
        ):
            connection.handshake(
                ServerHandshake("owner", a.incarnation, [SECRET], os.urandom(NONCE_BYTES)), WAIT_S
            )
            connection.receive(FROM_READER)
            connection.send_with_payload(ChunksFollow(0, ((0, a.memory.digest(0)),)), [])
            while not ended.wait(0.02):
                sock.sendall(b"x")

    source = threading.Thread(target=drip)
    source.start()
    async with (
        serving(b.open(complete=True), c.open(complete=False)),
        c.runner(stall_timeout_s=waited_out_s(0.3)) as runner,
    ):
        runner.add_source(a.grant())
        await until(lambda: runner.report().sources[0].seconds > 0)
        failed = await next_event(runner)
        assert isinstance(failed, SourceFailed)
        assert failed.reason == "stalled"
        assert "sent only" in failed.detail
        runner.add_source(b.grant())
        await finish(runner)
        ended.set()
        await anyio.to_thread.run_sync(source.join)
    a.listener.close()
    assert c.arrays == b.arrays


async def test_a_reader_that_takes_a_byte_at_a_time_is_given_up() -> None:
    """It would keep one of its owner's places, and an access open, for as long as it likes."""
    size = 32 * 2**20
    manifest = manifest_of((size,), digest="none", chunk_bytes=size)
    a = Node("a", manifest, filled=True, stall_timeout_s=waited_out_s(0.3)).open(complete=True)
    async with serving(a):
        sock = socket.create_connection(a.listener.getsockname())
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        with BlockingConnection(sock, stall_timeout_s=WAIT_S) as connection:

            def ask() -> None:
                handshake = ClientHandshake("reader", "slow-1", SECRET, os.urandom(NONCE_BYTES))
                connection.handshake(handshake, WAIT_S)
                connection.send(Read(0, "lease", a.registration, a.generation, CONTENT, ((0, 1),)))
                answer = connection.receive(FROM_OWNER)
                assert isinstance(answer, ChunksFollow)

            await anyio.to_thread.run_sync(ask)
            assert "1 accesses" in repr(a.owner)
            ended = threading.Event()

            def drip() -> None:
                with contextlib.suppress(OSError):
                    while not ended.wait(0.01):
                        sock.recv(512)

            async with anyio.create_task_group() as tasks:
                tasks.start_soon(anyio.to_thread.run_sync, drip)
                await until(lambda: "0 lanes" in repr(a.owner))
                ended.set()
