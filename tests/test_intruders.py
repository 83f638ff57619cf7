"""Malformed frames on every kind of connection, with and without the secret, while others transfer
(G11).

Whoever sends them loses the connection. The transfer that runs meanwhile is not retried, nor gets
another source.
"""

from __future__ import annotations

import contextlib
import os
import socket
import tracemalloc
from collections.abc import Callable

import anyio
import anyio.to_thread
import pytest

from tensorhub.messages import (
    PROTOCOL_VERSION,
    ChunksFollow,
    ClientHello,
    Heartbeat,
    Join,
    Message,
    Proof,
    Read,
    Register,
    ServerHello,
    Watch,
    Welcome,
)
from tensorhub.protocol import codec
from tensorhub.protocol.frames import PREFACE, FrameEncoder, frame
from tensorhub.protocol.handshake import NONCE_BYTES, ClientHandshake
from tensorhub.types import Location, Medium, Purpose, parse_address
from tests.rig import CHUNK_BYTES, CHUNKS, WAIT_S, cluster, gated, holds, tensors, until, worker_of
from tests.test_floods import data_address, is_closed

Address = tuple[str, int]
MEMORY_MAX = 24 * 2**20  # of both hubs and the coordinator, for everything below
NONCE = bytes(NONCE_BYTES)


def said(*messages: Message) -> bytes:
    return b"".join(frame(codec.encode(message), 2**27) for message in messages)


def body(*values: int) -> bytes:
    return len(values).to_bytes(4, "big") + bytes(values)


def register(manifest: bytes) -> Register:
    return Register(
        1, "r", "m", "g", 0, 0, 1, True, False, Medium.DEVICE, Purpose.USE, "", 1, 1, manifest, None
    )


HELLO = ClientHello(PROTOCOL_VERSION, "worker", "intruder", NONCE)
UNPROVED = {
    "http": b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
    "noise": bytes(range(256)) * 64,
    "half a preface": PREFACE[:5],
    "another version": PREFACE[:-1] + b"\x63",
    "half a frame": PREFACE + b"\x00\x00\x00\x20abc",
    "a huge length": PREFACE + b"\xff\xff\xff\xff",
    "a length of zero": PREFACE + bytes(4),
    "a large hello": PREFACE + (2**20).to_bytes(4, "big") + bytes(2**20),
    "no array": PREFACE + body(0xC0),
    "an endless array": PREFACE + body(0xDD, 0xFF, 0xFF, 0xFF, 0xFF),
    "the proof first": PREFACE + said(Proof(NONCE), HELLO),
    "two hellos": PREFACE + said(HELLO, HELLO),
    "the server's words": PREFACE + said(ServerHello(PROTOCOL_VERSION, "coordinator", "x", NONCE)),
    "a wrong role": PREFACE + said(ClientHello(PROTOCOL_VERSION, "owner", "x", NONCE)),
    "a reflected proof": PREFACE + said(HELLO, Proof(b"")),
    "no handshake at all": PREFACE + said(Join("w", Location(), (), 1, 0), Heartbeat(1)),
}
PROVED = {
    "noise": bytes(range(1, 256)) * 64,
    "a huge length": b"\xff\xff\xff\xff",
    "half a frame": b"\x00\x00\x00\x20abc",
    "no message": body(0xC0),
    "an unknown tag": body(0x91, 0xCD, 0xFF, 0xFF),
    "a deep nest": body(*[0x91] * 5000),
    "another's words": said(Welcome("c", 1, 1.0, True), ChunksFollow(0, ((0, 0),))),
    "the handshake again": said(HELLO, Proof(NONCE)),
    "a second preface": PREFACE,
    "before Join": said(Heartbeat(1)),
    "a large frame before Join": said(register(bytes(10 * 2**20))),
    "wrong types": said(Watch("m")).replace(b"\xa1m", b"\x91\x01"),
    "a read of everything": said(Read(0, "l", "r", 1, "c", ((0, 2**31),) * 4096)),
}


def connect(address: Address) -> socket.socket:
    return socket.create_connection(address, WAIT_S)


def say(peer: socket.socket, words: bytes) -> None:
    """All of it, unless it is cut off before; then hear the other side out."""
    with contextlib.suppress(OSError):
        peer.sendall(words)
        peer.shutdown(socket.SHUT_WR)
    assert is_closed(peer)


def insult(address: Address, words: bytes) -> None:
    with connect(address) as peer:
        say(peer, words)


def prove(peer: socket.socket, role: str) -> tuple[bytes, bytes]:
    """Go through the handshake; returns all that this side said, and the key by which it goes
    on.
    """
    handshake = ClientHandshake(role, os.urandom(8).hex(), b"secret", os.urandom(NONCE_BYTES))
    words = b""
    while True:
        data = handshake.data_to_send()
        words += data
        peer.sendall(data)
        if handshake.done:
            return words, handshake.frame_keys[0]
        handshake.receive_data(peer.recv(handshake.bytes_wanted))


def authentic(words: bytes, key: bytes) -> bytes:
    """The same, each frame with its mac; what is no frame stays as it is."""
    encoder = FrameEncoder(2**27)
    encoder.authenticate(key)
    done = b""
    while (end := 4 + int.from_bytes(words[:4], "big")) <= len(words) and end > 4:
        done += encoder.frames(words[4:end])
        words = words[end:]
    return done + words


def insult_proved(address: Address, role: str, words: bytes) -> None:
    """By whoever has the token."""
    with connect(address) as peer:
        say(peer, authentic(words, prove(peer, role)[1]))


def replay(address: Address, role: str) -> None:
    """What an honest peer has said on the way in lets nobody in again."""
    with connect(address) as peer:
        words, _ = prove(peer, role)
    with connect(address) as peer:
        peer.sendall(words)
        answer = b""
        with contextlib.suppress(ConnectionError):
            while data := peer.recv(65536):
                answer += data
        assert answer.endswith(said(Proof(b"")))


async def during_a_transfer(role: str, insults: Callable[[Address], None]) -> None:
    """Do that to the party that this role connects to, in the midst of a transfer; nobody else
    notices.
    """
    with gated(CHUNKS // 2) as gate:
        async with cluster("trainer", "reader", token="secret") as c:
            source = await c.hubs[0].register("m", tensors(1))
            await source.publish(1)
            lives = [worker_of(hub).incarnation for hub in c.hubs]
            mine = tensors()
            weights = await c.hubs[1].register("m", mine)

            async def intrude() -> None:
                await until(lambda: gate.holds)
                address = parse_address(c.address if role == "worker" else data_address(c.hubs[0]))
                try:
                    await anyio.to_thread.run_sync(insults, address)
                finally:
                    gate.open()

            async with anyio.create_task_group() as tasks:
                tasks.start_soon(intrude)
                report = await weights.replicate()
            assert holds(mine, 1)
            assert (report.retries, report.reread_bytes, len(report.sources)) == (0, 0, 1)
            assert report.bytes_read == CHUNKS * CHUNK_BYTES
            assert [worker_of(hub).incarnation for hub in c.hubs] == lives
            assert source.state == "ready"


@pytest.mark.parametrize("role", ["worker", "reader"])
async def test_unauthenticated_and_authenticated_intruders_cost_a_running_transfer_nothing(
    role: str,
) -> None:
    def insults(address: Address) -> None:
        tracemalloc.start()
        try:
            for words in UNPROVED.values():
                insult(address, words)
            for words in PROVED.values():
                insult_proved(address, role, words)
            replay(address, role)
            peak = tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()
        assert peak < MEMORY_MAX

    await during_a_transfer(role, insults)
