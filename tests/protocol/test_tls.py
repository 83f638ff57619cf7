"""TLS of one connection: bytes come as they went, whatever pieces they come in and however little a
socket takes; and each thing that is wrong with a certificate is said to both sides.
"""

from __future__ import annotations

import contextlib
import os
import re
import select
import socket
import ssl
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from operator import attrgetter
from pathlib import Path
from typing import Any

import anyio
import pytest
import trustme
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from cryptography.hazmat.primitives.kdf.hkdf import HKDFExpand

from tensorhub.errors import AuthenticationFailed, OperationTimeout, ProtocolError
from tensorhub.messages import Read, StillWaiting
from tensorhub.protocol.blocking import BlockingConnection
from tensorhub.protocol.certificates import TLS, Certificates
from tensorhub.protocol.codec import FROM_OWNER, FROM_READER
from tensorhub.protocol.frames import PREFACE, SpeaksTls, check_preface
from tensorhub.protocol.polled_stream import Poller
from tensorhub.protocol.tls import EMPTY_BYTES_MAX, RECORD_BYTES, SEALED_BYTES_MAX, Tls
from tensorhub.protocol.tls_stream import TlsStream, accept
from tensorhub.runtime.control.accepting import Turns
from tests.certificates import HERE, LONG_AGO, issue, usual
from tests.runtime.data_rig import WAIT_S, waited_out_s

READ = Read(1, "lease", "registration", 1, "content", ((0, 1),))


def client(files: TLS | None = None, host: str | None = "localhost") -> Tls:
    use: Any = "reader" if host is None else "client"
    return Tls(Certificates(files or usual()), use, peer="coordinator", host=host)


def server(files: TLS | None = None) -> Tls:
    return Tls(Certificates(files or usual()), "server", peer="client")


def shake_hands(one: Tls, two: Tls) -> None:
    """Each side's failure is raised where it comes up; the other side is told before."""
    one.handshake()
    while not (one.is_open and two.is_open):
        tell(two, one.data_to_send())
        tell(one, two.data_to_send())


def tell(one: Tls, data: bytes) -> None:
    if one.is_open:
        one.receive_data(data)
        one.read()
    else:
        one.handshake(data)


def test_bytes_come_as_they_went_in_whatever_pieces() -> None:
    one, two = client(), server()
    shake_hands(one, two)
    assert one.binding == two.binding
    assert len(one.binding) == 64
    said = os.urandom(3 * RECORD_BYTES + 1)
    sealed, heard = one.seal(said), b""
    assert said[:16] not in sealed
    for at in range(0, len(sealed), 1000):
        two.receive_data(sealed[at : at + 1000])
        if at % 3:
            heard += two.read(777)
    while two.has_unread:
        heard += two.read()
    assert heard == said
    assert not two.has_ended
    two.receive_data(one.close())
    assert two.read() == b""
    assert two.has_ended


@pytest.mark.parametrize("sizes", [[1], [10, 5, SEALED_BYTES_MAX + 3], [100] * 5000, [0, 7]])
def test_a_socket_that_takes_little_is_given_each_byte_once(sizes: list[int]) -> None:
    one, two = client(), server()
    shake_hands(one, two)
    said, heard = os.urandom(sum(sizes)), bytearray()
    ends = [sum(sizes[: n + 1]) for n in range(len(sizes))]
    buffers = [memoryview(said)[end - size : end] for size, end in zip(sizes, ends, strict=True)]

    def give(data: memoryview) -> int:
        taken = min(len(data), 40_000)
        two.receive_data(data[:taken])
        return taken

    while buffers:
        count = one.send(give, buffers)
        while buffers and count >= buffers[0].nbytes:
            count -= buffers.pop(0).nbytes
        if count:
            buffers[0] = buffers[0][count:]
        while part := two.read():
            heard += part
    assert heard == said


def _by(authority: trustme.CA) -> Callable[[Path], TLS]:
    return lambda directory: issue(directory, by=authority)


STRANGER = trustme.CA()
WRONG: dict[str, tuple[Callable[[Path], TLS], str]] = {
    "expired": (lambda to: issue(to, not_before=LONG_AGO, not_after=LONG_AGO), "renew it"),
    "another authority": (_by(STRANGER), "must have signed it"),
}


@pytest.mark.parametrize("wrong", WRONG)
@pytest.mark.parametrize("side", ["client", "server"])
def test_a_certificate_that_is_not_accepted_is_said_to_both(
    tmp_path: Path, wrong: str, side: str
) -> None:
    make, advice = WRONG[wrong]
    files = make(tmp_path)
    one, two = (client(files), server()) if side == "client" else (client(), server(files))
    with pytest.raises(AuthenticationFailed, match=advice) as error:
        shake_hands(one, two)
    here, there = (two, one) if side == "client" else (one, two)
    assert f"the certificate of the {here._peer} is not accepted" in str(error.value)
    with pytest.raises(AuthenticationFailed, match="does not accept this side's") as told:
        tell(there, here.data_to_send())
    assert str(files.cert) in str(told.value)


@pytest.mark.parametrize("host", ["localhost", "127.0.0.1"])
def test_a_coordinators_name_is_checked_and_a_workers_is_not(tmp_path: Path, host: str) -> None:
    files = issue(tmp_path, "elsewhere")
    shake_hands(client(host=None), server(files))
    with pytest.raises(AuthenticationFailed, match=f"have it issued for '{host}', too"):
        shake_hands(client(host=host), server(files))
    for name in HERE:
        shake_hands(client(host=name), server())


def test_a_client_without_a_certificate_is_refused() -> None:
    bare, two = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT), server()
    bare.check_hostname, bare.verify_mode = False, ssl.CERT_NONE
    incoming, outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
    session = bare.wrap_bio(incoming, outgoing)
    with pytest.raises(ssl.SSLWantReadError):
        session.do_handshake()
    two.handshake(outgoing.read())
    incoming.write(two.data_to_send())
    session.do_handshake()
    with pytest.raises(AuthenticationFailed, match="has no certificate"):
        two.handshake(outgoing.read())


def test_a_peer_without_tls_is_told_of_it() -> None:
    two = server()
    with pytest.raises(ProtocolError, match="client speaks no TLS, and this side does"):
        two.handshake(PREFACE)
    with pytest.raises(SpeaksTls, match="set TLS up on both sides or on neither"):
        check_preface(two.data_to_send())
    one = client()
    one.handshake()
    with pytest.raises(SpeaksTls, match="this side does not"):
        check_preface(one.data_to_send())
    with pytest.raises(ProtocolError, match="coordinator speaks no TLS, and this side does"):
        one.handshake(PREFACE)


def test_an_older_tls_is_not_spoken() -> None:
    older = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    older.check_hostname, older.verify_mode = False, ssl.CERT_NONE
    older.maximum_version = ssl.TLSVersion.TLSv1_2
    outgoing = ssl.MemoryBIO()
    session = older.wrap_bio(ssl.MemoryBIO(), outgoing)
    with pytest.raises(ssl.SSLWantReadError):
        session.do_handshake()
    with pytest.raises(ProtocolError, match="unsupported protocol"):
        server().handshake(outgoing.read())


def test_a_byte_that_was_changed_ends_the_connection() -> None:
    one, two = client(), server()
    shake_hands(one, two)
    sealed = bytearray(one.seal(b"some bytes"))
    sealed[-1] ^= 1
    two.receive_data(bytes(sealed))
    with pytest.raises(ProtocolError, match="bad record mac"):
        two.read()


def records(kind: int, content: bytes) -> bytes:
    """Before encryption."""
    parts = [content[at : at + 1000] for at in range(0, len(content), 1000)]
    return b"".join([bytes([kind, 3, 3]) + len(part).to_bytes(2, "big") + part for part in parts])


def test_an_endless_hello_ends_at_a_bound() -> None:
    """It says that 100 kB follow: each pending connection would hold them."""
    two, said = server(), b"\x01" + (100_000).to_bytes(3, "big") + b"\x03\x03" + bytes(10**5)
    sealed = records(0x16, said)
    for at in range(0, EMPTY_BYTES_MAX, 512):
        two.handshake(sealed[at : at + 512])
    with pytest.raises(ProtocolError, match=f"more than {EMPTY_BYTES_MAX} bytes without content"):
        two.handshake(sealed[EMPTY_BYTES_MAX:][:512])


def test_a_hello_byte_by_byte_is_as_good_as_whole() -> None:
    one, two = client(), server()
    one.handshake()
    for byte in one.data_to_send():
        two.handshake(bytes([byte]))
    one.handshake(two.data_to_send())
    for byte in one.data_to_send():
        two.handshake(bytes([byte]))
    assert two.binding == one.binding


@pytest.mark.parametrize(
    "said",
    [
        b"\x17\x03\x03\xff\xff",  # a record of 64 kB
        records(0x16, b"\x01\x00\x00\x02\x03\x03"),  # another hello: a renegotiation
        records(0x16, b"\x00\x00\x00\x00"),  # a server's wish for one
        records(0x17, bytes(100)),  # in plain, or sealed by another key
        records(0x14, b"\x01"),  # a change of ciphers
        records(0x15, b"\x01\x5a"),  # a warning
        b"GET / HTTP/1.1\r\n\r\n",
    ],
)
@pytest.mark.parametrize("is_open", [False, True])
def test_what_does_not_belong_there_ends_the_connection(said: bytes, is_open: bool) -> None:
    one, two = client(), server()
    one.handshake()
    two.handshake(one.data_to_send())
    if is_open:
        one.handshake(two.data_to_send())
        two.handshake(one.data_to_send())
    with pytest.raises(ProtocolError):
        tell(two, said + bytes(2**15))


def changes_of_keys(secret: bytes, asks: bool) -> Iterator[bytes]:
    """Records of a client that changes its keys, again and again (RFC 8446, 4.6.3 and 7.2)."""

    def derived(label: bytes, length: int) -> bytes:
        label = b"tls13 " + label
        info = length.to_bytes(2, "big") + bytes([len(label)]) + label + b"\0"
        return HKDFExpand(hashes.SHA384(), length, info).derive(secret)

    said = b"\x18\x00\x00\x01" + bytes([asks]) + b"\x16"
    while True:
        head = b"\x17\x03\x03" + (len(said) + 16).to_bytes(2, "big")
        yield head + AESGCM(derived(b"key", 32)).encrypt(derived(b"iv", 12), said, head)
        secret = derived(b"traffic upd", 48)


@pytest.mark.parametrize("asks", [True, False])
def test_endless_changes_of_keys_end_at_a_bound(tmp_path: Path, asks: bool) -> None:
    """One that asks for a change in return is owed an answer; none of them has content."""
    certificates = Certificates(usual())
    certificates.context("client")[0].keylog_filename = str(tmp_path / "secrets")
    one, two = Tls(certificates, "client", peer="coordinator", host="localhost"), server()
    shake_hands(one, two)
    found = re.search(
        r"^CLIENT_TRAFFIC_SECRET_0 \w+ (\w+)$", (tmp_path / "secrets").read_text(), re.MULTILINE
    )
    assert found is not None
    records = changes_of_keys(bytes.fromhex(found[1]), asks)
    for _ in range(1000):
        two.receive_data(next(records))
        assert two.read() == b""
    two.receive_data(b"".join([next(records) for _ in range(1000)]))
    with pytest.raises(ProtocolError, match="without content"):
        two.read()


# --------------------------------------------------------------------------------------------------
# drivers


@contextlib.contextmanager
def connected() -> Iterator[tuple[socket.socket, socket.socket]]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        one = socket.create_connection(listener.getsockname())
        with one, listener.accept()[0] as two:
            yield one, two


def test_a_thread_receives_while_another_sends() -> None:
    """As a reader's do: OpenSSL's objects are not for two threads at a time."""
    count, payload = 200, os.urandom(300_000)
    with connected() as (here, there), ThreadPoolExecutor(3) as pool:
        ours = client(host=None)
        one = BlockingConnection(here, stall_timeout_s=WAIT_S, tls=ours)
        theirs = server()
        opening = pool.submit(one.open_tls, WAIT_S)
        theirs.handshake(there.recv(2**16))
        there.sendall(theirs.data_to_send())
        assert opening.result(WAIT_S) == ours.binding
        one.send(READ)  # brings the last bytes of the handshake
        theirs.handshake(there.recv(2**16))
        two = BlockingConnection(there, stall_timeout_s=WAIT_S, tls=theirs)
        assert two.receive(FROM_READER) == READ

        def answer() -> None:
            for n in range(count):
                assert two.receive(FROM_READER) == READ
                two.send_with_payload(StillWaiting(n, ((0, 1),)), [memoryview(payload)])

        def ask() -> None:
            for _ in range(count):
                one.send(READ)

        ends = [pool.submit(answer), pool.submit(ask)]
        room = memoryview(bytearray(len(payload)))
        for n in range(count):
            assert one.receive(FROM_OWNER) == StillWaiting(n, ((0, 1),))
            one.receive_into([room[:100_000], room[100_000:]])
            assert room == payload
        for end in ends:
            end.result(WAIT_S)
        quiet = attrgetter("is_quiet")
        assert quiet(one)
        two.send(StillWaiting(0, ((0, 1),)))
        two.send(StillWaiting(1, ((0, 1),)))
        assert one.receive(FROM_OWNER) is not None
        while quiet(one):  # until the second message is in the kernel, or decrypted here
            select.select([one.descriptor], [], [], 0.01)
        assert one.is_readable()
        one.receive(FROM_OWNER)
        two.close()
        assert one.receive(FROM_OWNER) is None


def test_a_record_that_drips_meets_the_deadline() -> None:
    ours, theirs, ends = client(), server(), threading.Event()
    shake_hands(ours, theirs)
    with connected() as (here, there), ThreadPoolExecutor(1) as pool:
        one = BlockingConnection(here, stall_timeout_s=waited_out_s(0.3), tls=ours)

        def drip() -> None:
            for byte in theirs.seal(bytes(RECORD_BYTES)):
                there.send(bytes([byte]))
                if ends.wait(0.01):
                    return

        dripping = pool.submit(drip)
        with pytest.raises(OperationTimeout, match="sent nothing for"):
            one.receive_into([memoryview(bytearray(10))])
        ends.set()
        dripping.result(WAIT_S)


async def test_streams_of_both_sides() -> None:
    said = os.urandom(10 * SEALED_BYTES_MAX)
    with socket.create_server(("127.0.0.1", 0)) as raw:
        raw.setblocking(False)
        async with anyio.create_task_group() as tasks:
            poller = Poller()
            tasks.start_soon(poller.keep)
            stream = await anyio.connect_tcp(*raw.getsockname())
            await anyio.wait_readable(raw)
            there = raw.accept()[0]
            there.setblocking(False)
            one, two = TlsStream(stream, client()), server()

            async def speak() -> None:
                async with one:
                    await one.open(WAIT_S)
                    await one.send(said)
                    assert await one.receive() == b"thanks"

            tasks.start_soon(speak)
            await accept(there, two, Turns().of(there), WAIT_S)
            async with poller.stream(there, two) as polled:
                heard = b""
                while len(heard) < len(said):
                    heard += await polled.receive()
                assert heard == said
                assert not polled.has_unread
                await polled.send(b"thanks")
                with pytest.raises(anyio.EndOfStream):
                    await polled.receive()
            tasks.cancel_scope.cancel()


async def test_a_flood_of_handshakes_leaves_the_loop_and_other_addresses_their_turns() -> None:
    """One step of one handshake in each turn, and of the address that floods every other one."""
    count, steps, turns = 0, dict[int, str](), Turns()
    certificates = Certificates(usual())

    class Counting(Tls):
        def handshake(self, data: bytes | memoryview = b"") -> None:
            assert count not in steps
            steps[count] = self._peer
            super().handshake(data)

    with contextlib.ExitStack() as stack:
        listener = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
        async with anyio.create_task_group() as tasks:
            for host in (*["127.0.0.2"] * 20, "127.0.0.3"):
                here = socket.create_connection(listener.getsockname(), source_address=(host, 0))
                there = stack.enter_context(listener.accept()[0])
                one = Tls(certificates, "reader", peer="owner")
                one.handshake()
                stack.enter_context(here).sendall(one.data_to_send())
                there.setblocking(False)
                two = Counting(certificates, "server", peer=host)
                tasks.start_soon(accept, there, two, turns.of(there), WAIT_S)
            with anyio.fail_after(WAIT_S):
                while len(steps) < 21:
                    await anyio.lowlevel.checkpoint()
                    count += 1
            tasks.cancel_scope.cancel()
    assert "127.0.0.3" in list(steps.values())[:3]
