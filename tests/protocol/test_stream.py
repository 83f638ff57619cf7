"""The async driver on asyncio and on trio, over streams in memory and over real sockets."""

from __future__ import annotations

import math
import socket
from collections.abc import AsyncIterator
from typing import Any

import anyio
import pytest
from anyio.abc import ByteStream, SocketStream

from tensorhub import messages as m
from tensorhub.errors import AuthenticationFailed, OperationTimeout, ProtocolError
from tensorhub.protocol import codec
from tensorhub.protocol.codec import FROM_COORDINATOR, FROM_WORKER
from tensorhub.protocol.frames import PREFACE, FrameEncoder, frame
from tensorhub.protocol.handshake import ClientHandshake, ServerHandshake
from tensorhub.protocol.lost import ConnectionLost
from tensorhub.protocol.polled_stream import Poller
from tensorhub.protocol.stream import MessageStream
from tests.runtime.data_rig import WAIT_S

MOST = 65_536
Ends = tuple[ByteStream, ByteStream]


class MemoryStream(ByteStream):
    """One end of a pair of byte streams in memory; `step` bytes at most arrive at a time."""

    def __init__(self, incoming: Any, outgoing: Any, step: int) -> None:
        self._incoming, self._outgoing, self._step = incoming, outgoing, step
        self._rest = b""

    async def receive(self, max_bytes: int = 65_536) -> bytes:
        if not self._rest:
            self._rest = await self._incoming.receive()
        data = self._rest[: min(self._step, max_bytes)]
        self._rest = self._rest[len(data) :]
        return data

    async def send(self, item: bytes) -> None:
        await self._outgoing.send(item)

    async def send_eof(self) -> None:
        await self._outgoing.aclose()

    async def aclose(self) -> None:
        await self._incoming.aclose()
        await self._outgoing.aclose()


class _BreaksAfter(ByteStream):
    """A stream that gives what has arrived once, and is broken from then on."""

    def __init__(self, inner: ByteStream) -> None:
        self._inner = inner
        self._broken = False

    async def receive(self, max_bytes: int = 65_536) -> bytes:
        if self._broken:
            raise anyio.BrokenResourceError
        self._broken = True
        return await self._inner.receive(max_bytes)

    async def send(self, item: bytes) -> None:
        await self._inner.send(item)

    async def send_eof(self) -> None:
        await self._inner.send_eof()

    async def aclose(self) -> None:
        await self._inner.aclose()


def memory_ends(step: int = 65_536, room: float = math.inf) -> Ends:
    there, there_out = anyio.create_memory_object_stream[bytes](room)
    back, back_out = anyio.create_memory_object_stream[bytes](room)
    return MemoryStream(back_out, there, step), MemoryStream(there_out, back, step)


@pytest.fixture(params=["asyncio", "trio"])
def anyio_backend(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(params=["memory", "drops", "tcp", "polled"])
async def ends(request: pytest.FixtureRequest, anyio_backend: str) -> AsyncIterator[Ends]:
    poller, tasks = Poller(), anyio.create_task_group()
    await tasks.__aenter__()
    tasks.start_soon(poller.keep)
    if request.param in ("tcp", "polled"):
        with socket.create_server(("127.0.0.1", 0)) as listener:
            one = socket.create_connection(listener.getsockname())
            two = listener.accept()[0]
        if request.param == "tcp":
            found: Ends = await SocketStream.from_socket(one), await SocketStream.from_socket(two)
        else:
            one.setblocking(False)
            two.setblocking(False)
            found = poller.stream(one), poller.stream(two)
    else:
        found = memory_ends(1 if request.param == "drops" else 65_536)
    yield found
    for end in found:
        await end.aclose()
    tasks.cancel_scope.cancel()
    await tasks.__aexit__(None, None, None)


def client(secret: bytes = b"secret") -> ClientHandshake:
    return ClientHandshake("worker", "worker-1", secret, b"c" * 32)


def server(secret: bytes = b"secret") -> ServerHandshake:
    return ServerHandshake("coordinator", "coordinator-1", [secret], b"s" * 32)


def streams(ends: Ends) -> tuple[MessageStream[m.FromCoordinator], MessageStream[m.FromWorker]]:
    return MessageStream(ends[0], FROM_COORDINATOR, MOST), MessageStream(ends[1], FROM_WORKER, MOST)


async def test_both_sides_shake_hands_and_talk(ends: Ends) -> None:
    worker, coordinator = streams(ends)
    with anyio.fail_after(WAIT_S):
        async with anyio.create_task_group() as tasks:

            async def serve() -> None:
                assert (await coordinator.handshake(server(), WAIT_S)).incarnation == "worker-1"
                async for message in coordinator:
                    assert isinstance(message, m.Heartbeat)
                    await coordinator.send(m.HeartbeatAck(message.sequence))
                await coordinator.aclose()

            tasks.start_soon(serve)
            assert (await worker.handshake(client(), WAIT_S)).incarnation == "coordinator-1"
            for sequence in range(3):
                await worker.send(m.Heartbeat(sequence))
            assert [await worker.receive() for _ in range(3)] == [
                m.HeartbeatAck(n) for n in range(3)
            ]
            await ends[0].send_eof()
            assert await worker.receive() is None


async def test_different_secrets_are_said_to_both_sides(ends: Ends) -> None:
    worker, coordinator = streams(ends)
    with anyio.fail_after(WAIT_S):
        async with anyio.create_task_group() as tasks:

            async def serve() -> None:
                with pytest.raises(AuthenticationFailed, match="did not prove"):
                    await coordinator.handshake(server(b"another"), WAIT_S)
                await coordinator.aclose()

            tasks.start_soon(serve)
            with pytest.raises(AuthenticationFailed, match="refused"):
                await worker.handshake(client(), WAIT_S)


async def test_silence_meets_the_deadline(ends: Ends) -> None:
    _, coordinator = streams(ends)
    with anyio.fail_after(WAIT_S), pytest.raises(OperationTimeout, match=r"longer than 0\.02 s"):
        await coordinator.handshake(server(), 0.02)


async def test_dripping_bytes_do_not_extend_the_deadline(ends: Ends) -> None:
    _, coordinator = streams(ends)
    async with anyio.create_task_group() as tasks:

        async def drip() -> None:
            for drop in PREFACE + frame(b"x" * 4096, 4096):
                await ends[0].send(bytes([drop]))
                await anyio.sleep(0.01)

        tasks.start_soon(drip)
        with anyio.fail_after(WAIT_S), pytest.raises(OperationTimeout):
            await coordinator.handshake(server(), 0.05)
        tasks.cancel_scope.cancel()


async def test_an_end_during_the_handshake(ends: Ends) -> None:
    _, coordinator = streams(ends)
    await ends[0].send(PREFACE)
    await ends[0].send_eof()
    with (
        anyio.fail_after(WAIT_S),
        pytest.raises(ProtocolError, match="closed the connection during"),
    ):
        await coordinator.handshake(server(), WAIT_S)


async def test_a_stream_that_breaks_upon_the_proof_is_no_matter_of_secrets(
    anyio_backend: str,
) -> None:
    one, two = memory_ends()
    worker = MessageStream(_BreaksAfter(one), FROM_COORDINATOR, MOST)
    theirs = server()
    theirs.receive_data(client().data_to_send())
    await two.send(theirs.data_to_send())
    with (
        anyio.fail_after(WAIT_S),
        pytest.raises(ProtocolError, match="no room just now, or is ending"),
    ):
        await worker.handshake(client(), WAIT_S)
    await worker.aclose()
    await two.aclose()


async def test_frames_that_come_with_the_last_proof_are_kept(ends: Ends) -> None:
    worker, _ = streams(ends)
    theirs = server()
    with anyio.fail_after(WAIT_S):
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(worker.handshake, client(), WAIT_S)
            last = b""
            while not theirs.done:
                if last:
                    await ends[1].send(last)
                theirs.receive_data(await ends[1].receive())
                last = theirs.data_to_send()
            encoder = FrameEncoder(MOST)
            encoder.authenticate(theirs.frame_keys[0])
            await ends[1].send(last + encoder.frames(codec.encode(m.HeartbeatAck(1))))
        assert await worker.receive() == m.HeartbeatAck(1)


async def test_what_the_peer_may_not_say_and_what_is_too_large(ends: Ends) -> None:
    worker, coordinator = streams(ends)
    await coordinator.send(m.Heartbeat(1))
    with (
        anyio.fail_after(WAIT_S),
        pytest.raises(ProtocolError, match="Heartbeat is not for the coordinator"),
    ):
        await worker.receive()
    with pytest.raises(ProtocolError, match="frame_bytes_max"):
        await coordinator.send(m.ManifestReply(1, b"x" * MOST))
    await ends[0].send((MOST + 1).to_bytes(4, "big"))
    with anyio.fail_after(WAIT_S), pytest.raises(ProtocolError, match=f"{MOST + 1} bytes"):
        await coordinator.receive()


async def send_until_it_fails(stream: MessageStream[Any]) -> None:
    for _ in range(1000):  # a socket takes some before it notices
        await stream.send(m.HeartbeatAck(1))


async def test_a_closed_stream_is_lost(ends: Ends) -> None:
    worker, coordinator = streams(ends)
    async with worker:
        pass
    await worker.aclose()
    with pytest.raises(ConnectionLost):
        await worker.send(m.Heartbeat(1))
    with pytest.raises(ConnectionLost):
        await worker.receive()
    with anyio.fail_after(WAIT_S):
        assert await coordinator.receive() is None
        with pytest.raises(ConnectionLost):
            await send_until_it_fails(coordinator)


async def test_a_receive_that_is_cancelled_loses_nothing(ends: Ends) -> None:
    _, coordinator = streams(ends)
    whole = frame(codec.encode(m.Watch("actor")), MOST)
    await ends[0].send(whole[:5])
    with anyio.move_on_after(0.02) as scope:
        await coordinator.receive()
    assert scope.cancelled_caught
    await ends[0].send(whole[5:])
    with anyio.fail_after(WAIT_S):
        assert await coordinator.receive() == m.Watch("actor")


async def test_messages_of_several_tasks_do_not_interleave(ends: Ends) -> None:
    worker, coordinator = streams(ends)
    texts = [letter * 10_000 for letter in "abcdefgh"]
    found = []
    with anyio.fail_after(WAIT_S):
        async with anyio.create_task_group() as tasks:
            for text in texts:
                tasks.start_soon(worker.send, m.Leave(text))
            for _ in texts:
                message = await coordinator.receive()
                assert isinstance(message, m.Leave)
                found.append(message.reason)
    assert sorted(found) == texts


async def test_after_a_send_that_was_cancelled_under_way_nothing_more_is_sent(
    anyio_backend: str,
) -> None:
    one, two = memory_ends(room=0)  # nobody receives, so that the send waits
    worker = MessageStream(one, FROM_COORDINATOR, MOST)
    with anyio.move_on_after(0.02) as scope:
        await worker.send(m.Heartbeat(1))
    assert scope.cancelled_caught
    assert "torn" in repr(worker)
    with pytest.raises(ConnectionLost, match="in part"):
        await worker.send(m.Heartbeat(2))
    await one.aclose()
    await two.aclose()
