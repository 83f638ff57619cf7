"""The blocking driver over real sockets: exact reads, scatter, gather, deadlines, ends."""

from __future__ import annotations

import socket
import struct
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import pytest

from tensorhub.errors import OperationTimeout, ProtocolError
from tensorhub.messages import ChunksFollow, Read, StillWaiting
from tensorhub.protocol import codec
from tensorhub.protocol.blocking import BlockingConnection
from tensorhub.protocol.codec import FROM_OWNER, FROM_READER
from tensorhub.protocol.frames import PREFACE, frame
from tensorhub.protocol.handshake import ClientHandshake, ServerHandshake
from tensorhub.protocol.lost import ConnectionLost
from tests.runtime.data_rig import WAIT_S

READ = Read(1, "lease", "registration", 5, "content", ((0, 4),))
Start = Callable[..., "Future[Any]"]


class Pair:
    """Two connected ends; `sock` is the raw socket of the second."""

    def __init__(self, stall_timeout_s: float = WAIT_S, *, tcp: bool = False) -> None:
        if tcp:
            with socket.create_server(("127.0.0.1", 0)) as listener:
                one = socket.create_connection(listener.getsockname())
                self.sock = listener.accept()[0]
        else:
            one, self.sock = socket.socketpair()
        self.one = BlockingConnection(one, stall_timeout_s=stall_timeout_s)
        self.two = BlockingConnection(self.sock, stall_timeout_s=stall_timeout_s)

    def close(self) -> None:
        self.one.close()
        self.two.close()


@pytest.fixture(params=[False, True], ids=["socketpair", "tcp"])
def pair(request: pytest.FixtureRequest) -> Iterator[Pair]:
    pair = Pair(tcp=request.param)
    yield pair
    pair.close()


@pytest.fixture
def impatient() -> Iterator[Pair]:
    pair = Pair(0.05)
    yield pair
    pair.close()


@pytest.fixture
def start() -> Iterator[Start]:
    """Runs a call in a thread of its own."""
    with ThreadPoolExecutor(2) as pool:
        yield pool.submit


def client(secret: bytes = b"secret") -> ClientHandshake:
    return ClientHandshake("reader", "reader-1", secret, b"c" * 32)


def server(secret: bytes = b"secret") -> ServerHandshake:
    return ServerHandshake("owner", "owner-1", [secret], b"s" * 32)


# ---------------------------------------------------------------------------------------------
# handshake


def test_both_sides_shake_hands_and_talk(pair: Pair, start: Start) -> None:
    other = start(pair.two.handshake, server(), WAIT_S)
    assert pair.one.handshake(client(), WAIT_S).incarnation == "owner-1"
    assert other.result(WAIT_S).incarnation == "reader-1"
    pair.one.send(READ)
    assert pair.two.receive(FROM_READER) == READ
    pair.two.send(StillWaiting(1, ((0, 2), (5, 1))))
    assert pair.one.receive(FROM_OWNER) == StillWaiting(1, ((0, 2), (5, 1)))


@pytest.mark.parametrize("how", ["closed", "reset"])
def test_a_peer_that_goes_away_upon_the_proof(pair: Pair, start: Start, how: str) -> None:
    other = start(pair.one.handshake, client(), WAIT_S)
    theirs = server()
    for _ in range(2):  # the preface, and the hello
        while not (answer := theirs.data_to_send()):
            theirs.receive_data(pair.sock.recv(theirs.bytes_wanted))
        pair.sock.sendall(answer)
    while theirs.bytes_wanted == 4:
        theirs.receive_data(pair.sock.recv(4))
    assert pair.sock.recv(theirs.bytes_wanted)  # the proof, which nobody looks at
    if how == "reset":
        pair.sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("@ii", 1, 0))
    pair.two.close()
    with pytest.raises(ProtocolError, match="no room just now, or is ending"):
        other.result(WAIT_S)


def test_silence_meets_the_deadline(pair: Pair) -> None:
    with pytest.raises(OperationTimeout, match=r"handshake took longer than 0\.05 s"):
        pair.one.handshake(server(), 0.05)


def test_dripping_bytes_do_not_extend_the_deadline(pair: Pair, start: Start) -> None:
    drops = PREFACE + frame(b"x" * 4096, 4096)
    enough = threading.Event()

    def drip() -> None:
        for drop in drops:
            if enough.wait(0.01):
                return
            pair.sock.sendall(bytes([drop]))

    dripping = start(drip)
    with pytest.raises(OperationTimeout, match="handshake"):
        pair.one.handshake(server(), 0.1)
    assert not dripping.done()
    enough.set()
    dripping.result(WAIT_S)


# ----------------------------------------------------------------------------------------------
# messages


def test_a_clean_end_is_none_and_a_broken_frame_is_an_error(pair: Pair) -> None:
    whole = frame(codec.encode(READ), 2**20)
    pair.sock.sendall(whole + whole[:-1])
    pair.sock.shutdown(socket.SHUT_WR)
    assert pair.one.receive(FROM_READER) == READ
    with pytest.raises(ProtocolError, match="ended inside a frame"):
        pair.one.receive(FROM_READER)


def send_until_it_fails(connection: BlockingConnection) -> None:
    for _ in range(1000):  # a socket takes some before it notices
        connection.send(READ)


def test_the_end_between_two_messages_is_none(pair: Pair) -> None:
    pair.two.close()
    assert pair.one.receive(FROM_READER) is None
    with pytest.raises(ConnectionLost):
        send_until_it_fails(pair.one)


def test_silence_is_a_timeout_after_which_the_call_can_be_repeated(impatient: Pair) -> None:
    whole = frame(codec.encode(READ), 2**20)
    for part in (b"", whole[:2], whole[2:9]):
        impatient.sock.sendall(part)
        with pytest.raises(OperationTimeout, match=r"sent nothing for 0\.05 s|whole within"):
            impatient.one.receive(FROM_READER)
    impatient.sock.sendall(whole[9:])
    assert impatient.one.receive(FROM_READER) == READ


def test_a_dripping_message_is_a_timeout(impatient: Pair, start: Start) -> None:
    enough = threading.Event()

    def drip() -> None:
        impatient.sock.sendall((2**20).to_bytes(4, "big"))
        while not enough.wait(0.01):
            impatient.sock.sendall(b"x")

    dripping = start(drip)
    with pytest.raises(OperationTimeout):
        impatient.one.receive(FROM_READER)
    enough.set()
    dripping.result(WAIT_S)


# ----------------------------------------------------------------------------------------------
# payloads


def pieces(memory: bytearray, sizes: list[int]) -> list[memoryview]:
    found, start = [], 0
    for size in sizes:
        found.append(memoryview(memory)[start : start + size])
        start += size
    return found


def pattern(size: int) -> bytearray:
    return bytearray((bytes(range(251)) * (size // 251 + 1))[:size])


@pytest.mark.parametrize(
    ("sent", "received"),
    [
        ([10], [10]),
        ([0, 3, 0, 7, 0], [5, 0, 5]),
        ([100] * 3000, [60] * 5000),
        ([0] * 1500 + [1] * 1025, [1] * 1025 + [0] * 1500),
        ([8 * 2**20], [2**20] * 8),
        ([3 * 2**20, 1, 2**20], [1, 4 * 2**20]),
    ],
    ids=["one", "with empty ones", "thousands", "many empty ones", "large", "uneven"],
)
def test_payload_arrives_in_its_buffers(
    pair: Pair, start: Start, sent: list[int], received: list[int]
) -> None:
    source, target = pattern(sum(sent)), bytearray(sum(received))
    message = ChunksFollow(1, ((0, 5),))

    def send() -> None:
        pair.two.send_with_payload(message, pieces(source, sent))
        pair.two.send(StillWaiting(2, ()))

    sending = start(send)
    assert pair.one.receive(FROM_OWNER) == message
    pair.one.receive_into(pieces(target, received))
    assert pair.one.receive(FROM_OWNER) == StillWaiting(2, ())
    assert target == source
    sending.result(WAIT_S)


@pytest.mark.parametrize("step", [1, 7, 1000])
def test_calls_that_move_little_are_repeated(
    monkeypatch: pytest.MonkeyPatch, start: Start, step: int
) -> None:
    """A kernel that moves at most `step` bytes per call, whatever it is given."""

    class Slow(socket.socket):
        def sendmsg(self, buffers: Any, *_: Any) -> int:
            return super().send(b"".join(buffers)[:step])

        def recvmsg_into(self, buffers: Any, *_: Any) -> Any:
            return super().recv_into(buffers[0][:step]), [], 0, None

    one, two = socket.socketpair()
    with (
        BlockingConnection(Slow(fileno=one.detach()), stall_timeout_s=WAIT_S) as sender,
        BlockingConnection(Slow(fileno=two.detach()), stall_timeout_s=WAIT_S) as receiver,
    ):
        source, target = pattern(3000), bytearray(3000)
        sending = start(sender.send_with_payload, READ, pieces(source, [1, 999, 2000]))
        assert receiver.receive(FROM_READER) == READ
        receiver.receive_into(pieces(target, [1500, 2, 1498]))
        sending.result(WAIT_S)
        assert target == source


def test_bytes_that_the_decoder_holds_are_payload_first(pair: Pair) -> None:
    pair.one._decoder.receive_data(b"held")
    pair.sock.sendall(b"sent")
    target = bytearray(8)
    pair.one.receive_into(pieces(target, [3, 5]))
    assert target == b"heldsent"
    pair.one._decoder.receive_data(b"ab" + frame(codec.encode(READ), 2**20))
    pair.one.receive_into(pieces(target, [1, 1]))
    assert target == b"abldsent"
    assert pair.one.receive(FROM_READER) == READ


def test_a_payload_that_stalls_or_ends(impatient: Pair) -> None:
    with pytest.raises(OperationTimeout, match="sent nothing"):
        impatient.one.receive_into([memoryview(bytearray(10))])
    impatient.sock.sendall(b"some")
    with pytest.raises(OperationTimeout, match="sent only 4 bytes"):
        impatient.one.receive_into([memoryview(bytearray(10))])
    impatient.sock.shutdown(socket.SHUT_WR)
    with pytest.raises(ConnectionLost, match="inside a payload"):
        impatient.one.receive_into([memoryview(bytearray(10))])


def test_a_peer_that_takes_nothing(impatient: Pair) -> None:
    with pytest.raises(OperationTimeout, match="took nothing"):
        impatient.one.send_with_payload(READ, [memoryview(bytes(64 * 2**20))])


# -----------------------------------------------------------------------------------------------
# the end


@pytest.mark.parametrize("what", ["receive", "receive_into", "send"])
def test_shutdown_from_another_thread_ends_a_blocked_call(
    pair: Pair, start: Start, what: str
) -> None:
    blocked = threading.Event()

    def call() -> object:
        blocked.set()
        if what == "receive":
            return pair.one.receive(FROM_READER)
        if what == "receive_into":
            pair.one.receive_into([memoryview(bytearray(10))])
        else:
            pair.one.send_with_payload(READ, [memoryview(bytes(64 * 2**20))])
        return "done"

    running = start(call)
    assert blocked.wait(WAIT_S)
    pair.one.shutdown()
    pair.one.shutdown()
    if what == "receive":
        assert running.result(WAIT_S) is None
    else:
        with pytest.raises(ConnectionLost):
            running.result(WAIT_S)


def test_a_closed_connection_is_lost(pair: Pair) -> None:
    pair.one.close()
    pair.one.close()
    pair.one.shutdown()
    assert "descriptor -1" in repr(pair.one)
    with pytest.raises(ConnectionLost):
        pair.one.receive(FROM_READER)
    with pytest.raises(ConnectionLost):
        pair.one.send(READ)
    with pytest.raises(ConnectionLost):
        pair.one.handshake(client(), WAIT_S)


@pytest.mark.parametrize("how", ["the peer closes", "shutdown", "close"])
def test_whether_it_has_ended_is_seen_without_reading(how: str) -> None:
    here, there = socket.socketpair()
    with there, BlockingConnection(here, stall_timeout_s=1) as connection:
        there.send(b"something that nobody reads")
        assert not connection.has_ended
        if how == "the peer closes":
            there.close()
        else:
            getattr(connection, how)()
        assert connection.has_ended
