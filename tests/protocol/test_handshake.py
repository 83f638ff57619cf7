"""The handshake without I/O: who gets in, who does not, and what each side is told."""

from __future__ import annotations

import dataclasses
import gc
import hmac
import weakref
from collections.abc import Sequence
from typing import Any, TypeVar

import pytest
from hypothesis import given, strategies as st

from tensorhub.errors import AuthenticationFailed, ProtocolError
from tensorhub.messages import PROTOCOL_VERSION, ClientHello, Message, Proof, ServerHello
from tensorhub.protocol import codec
from tensorhub.protocol.frames import PREFACE, FrameDecoder, frame
from tensorhub.protocol.handshake import (
    FRAME_BYTES_MAX,
    ClientHandshake,
    Handshake,
    ServerHandshake,
    frame_key,
    proof,
)
from tensorhub.protocol.secret import READ_ONLY_LABEL, read_only_secret

LATER = PROTOCOL_VERSION + 1
SECRET = b"tell nobody"
M = TypeVar("M")


def client(secret: bytes = SECRET, role: str = "worker", **more: Any) -> ClientHandshake:
    return ClientHandshake(role, "client-1", secret, b"c" * 32, **more)


def server(*secrets: bytes, role: str = "coordinator", nonce: bytes = b"s" * 32) -> ServerHandshake:
    return ServerHandshake(role, "server-1", secrets or (SECRET,), nonce)


def deliver(one: Handshake[Any], other: Handshake[Any]) -> None:
    """Carry bytes both ways until nobody has any left to send; the first error is raised."""
    moved = True
    while moved:
        moved = False
        for sender, receiver in ((one, other), (other, one)):
            data = sender.data_to_send()
            if data:
                moved = True
                receiver.receive_data(data)


def wire(*messages: Message) -> bytes:
    return b"".join(frame(codec.encode(message), FRAME_BYTES_MAX) for message in messages)


def messages_in(data: bytes) -> list[Message]:
    decoder = FrameDecoder(FRAME_BYTES_MAX)
    decoder.receive_data(data)
    found: list[Message] = []
    while (body := decoder.next_frame()) is not None:
        found.append(codec.decode(body, codec.ANYTHING))
    return found


def hello(one: Handshake[Any]) -> tuple[bytes, Message]:
    """What `one` sends first: everything, and the hello in it."""
    data = one.data_to_send()
    assert data.startswith(PREFACE)
    return data, messages_in(data[len(PREFACE) :])[0]


# ------------------------------------------------------------------------------------------- who
# gets in


@pytest.mark.parametrize(
    ("role", "server_role"),
    [("worker", "coordinator"), ("observer", "coordinator"), ("reader", "owner")],
)
@pytest.mark.parametrize("secret", [SECRET, b""], ids=["secret", "open"])
def test_equal_secrets_meet(role: str, server_role: str, secret: bytes) -> None:
    a, b = client(secret, role), server(secret, role=server_role)
    deliver(a, b)
    assert a.done
    assert b.done
    assert (a.peer.role, a.peer.incarnation) == (server_role, "server-1")
    assert (b.peer.role, b.peer.incarnation) == (role, "client-1")
    a.receive_eof()
    b.receive_eof()
    assert a.bytes_wanted == b.bytes_wanted == 0


def test_a_read_only_token_is_known_from_the_one_that_it_belongs_to() -> None:
    for mine, read_only, secret in (
        (b"old", False, b"old"),
        (read_only_secret(b"new"), True, b"new"),
        (read_only_secret(b"old"), True, b"old"),
        (read_only_secret(b"both"), True, b"both"),
    ):
        a, b = client(mine), server(b"old", b"new", b"both", read_only_secret(b"both"))
        assert (b.read_only, b.secret) == (False, b"")
        deliver(a, b)
        assert a.done
        assert (b.read_only, b.secret) == (read_only, secret)
        assert b.client_incarnation.startswith("read-only-") is read_only
        assert (b.client_incarnation == "client-1") is not read_only


@pytest.mark.parametrize(
    ("mine", "theirs"),
    [
        (read_only_secret(b"other"), SECRET),
        (read_only_secret(read_only_secret(SECRET)), SECRET),
        (SECRET, read_only_secret(SECRET)),
        (hmac.new(b"", READ_ONLY_LABEL, "sha256").hexdigest().encode(), b""),
    ],
)
def test_a_read_only_token_is_good_for_nothing_else(mine: bytes, theirs: bytes) -> None:
    with pytest.raises(AuthenticationFailed, match="did not prove"):
        deliver(client(mine), server(theirs))


def test_two_read_only_clients_are_two_however_long_the_names_that_they_claim() -> None:
    found = set()
    for incarnation in ("x" * 64, "x" * 63, "read-only-x"):
        a, b = ClientHandshake("worker", incarnation, read_only_secret(SECRET), b"c" * 32), server()
        deliver(a, b)
        assert len(b.client_incarnation) <= 64
        found.add(b.client_incarnation)
    assert len(found) == 3
    with pytest.raises(RuntimeError):
        _ = server().client_incarnation


@given(st.data())
def test_any_cut_of_the_bytes_and_what_follows_them_is_kept(data: st.DataObject) -> None:
    a, b = client(), server()
    for sender, receiver, more in (
        (a, b, b""),
        (b, a, b""),
        (a, b, b"first frames"),
        (b, a, b"payload"),
    ):
        stream = sender.data_to_send() + more
        while stream:
            cut = data.draw(st.integers(1, len(stream)))
            receiver.receive_data(stream[:cut])
            stream = stream[cut:]
    assert b.take_rest() == b"first frames"
    assert a.take_rest() == b"payload"
    assert a.take_rest() == b""


# ------------------------------------------------------------------------------------------ who
# does not


@pytest.mark.parametrize(
    ("mine", "theirs"),
    [
        (b"wrong", SECRET),
        (b"", SECRET),
        (SECRET, b""),
        (SECRET, b"wrong"),
        (SECRET + b"\n", SECRET),
    ],
)
def test_different_secrets_fail_on_both_sides(mine: bytes, theirs: bytes) -> None:
    a, b = client(mine), server(theirs)
    with pytest.raises(
        AuthenticationFailed, match=r"worker 'client-1'.*TENSORHUB_TOKEN"
    ) as at_server:
        deliver(a, b)
    answer = b.data_to_send()
    assert messages_in(answer) == [Proof(b"")]
    with pytest.raises(
        AuthenticationFailed, match=r"coordinator refused.*TENSORHUB_TOKEN"
    ) as at_client:
        a.receive_data(answer)
    said = (
        "has a token, and the coordinator has another one, or none"
        if mine
        else "has no token, and the coordinator has one"
    )
    assert said in str(at_client.value)
    for error in (at_server.value, at_client.value):
        assert not error.retryable
        assert "tell nobody" not in str(error)
    assert not a.done
    assert not b.done
    with pytest.raises(AuthenticationFailed):
        b.receive_data(b"")
    with pytest.raises(RuntimeError):
        _ = b.peer


def test_a_server_that_cannot_prove_itself_is_refused() -> None:
    a = client()
    a.data_to_send()
    a.receive_data(
        PREFACE + wire(ServerHello(PROTOCOL_VERSION, "coordinator", "impostor", b"s" * 32))
    )
    with pytest.raises(AuthenticationFailed, match="did not prove itself"):
        a.receive_data(wire(Proof(b"m" * 32)))
    assert not a.done


class Caller:
    """What one of the frames has that an error has come through."""


@pytest.mark.parametrize("said", [b"", b"GET / HTTP/1.1\r\n\r\n"])
@pytest.mark.parametrize("times", [1, 2])
def test_a_handshake_that_has_failed_holds_nothing_of_its_callers(said: bytes, times: int) -> None:
    """A reader's callers have its memory."""

    def fail(caller: Caller) -> None:
        handshake = client()
        for _ in range(times):
            try:
                handshake.receive_data(said) if said else handshake.receive_eof()
            except ProtocolError:
                pass
            else:
                pytest.fail("it has not failed")

    caller = Caller()
    gone = weakref.ref(caller)
    gc.disable()
    try:
        fail(caller)
        del caller
        assert gone() is None
    finally:
        gc.enable()


def test_a_proof_of_one_side_is_not_one_of_the_other() -> None:
    mine, theirs = (
        ClientHello(PROTOCOL_VERSION, "worker", "c", b"n" * 32),
        ServerHello(PROTOCOL_VERSION, "coordinator", "s", b"n" * 32),
    )
    assert proof(SECRET, "client", mine, theirs) != proof(SECRET, "server", mine, theirs)
    a = client()
    a.data_to_send()
    a.receive_data(PREFACE + wire(theirs))
    own = messages_in(a.data_to_send())
    with pytest.raises(AuthenticationFailed):  # the client's own proof, reflected
        a.receive_data(wire(*own))


def test_a_proof_cannot_be_replayed() -> None:
    a, b = client(), server()
    first = a.data_to_send()
    b.receive_data(first)
    a.receive_data(b.data_to_send())
    second = a.data_to_send()
    b.receive_data(second)
    assert b.done
    again = server(nonce=b"t" * 32)
    again.receive_data(first)
    with pytest.raises(AuthenticationFailed):
        again.receive_data(second)


def test_a_server_says_nothing_under_the_secret_before_the_client_has_proved_itself() -> None:
    b = server()
    b.receive_data(PREFACE + wire(ClientHello(PROTOCOL_VERSION, "worker", "c", b"c" * 32)))
    sent = b.data_to_send()
    other = server(b"another secret")
    other.receive_data(PREFACE + wire(ClientHello(PROTOCOL_VERSION, "worker", "c", b"c" * 32)))
    assert sent == other.data_to_send()  # the same bytes whatever the secret


@pytest.mark.parametrize(
    "change",
    [{"role": "observer"}, {"incarnation": "other"}, {"nonce": b"d" * 32}, {"protocol": LATER}],
    ids=lambda change: str(next(iter(change))),
)
@pytest.mark.parametrize("side", [0, 1], ids=["client", "server"])
def test_a_proof_covers_every_field_of_both_hellos(change: dict[str, Any], side: int) -> None:
    hellos: list[Any] = [
        ClientHello(PROTOCOL_VERSION, "worker", "c", b"c" * 32),
        ServerHello(PROTOCOL_VERSION, "coordinator", "s", b"s" * 32),
    ]
    before = proof(SECRET, "client", *hellos)
    hellos[side] = dataclasses.replace(hellos[side], **change)
    assert proof(SECRET, "client", *hellos) != before


def test_fields_cannot_be_shifted_into_each_other() -> None:
    theirs = ServerHello(PROTOCOL_VERSION, "coordinator", "s", b"s" * 32)
    one, two = (
        ClientHello(PROTOCOL_VERSION, "ab", "c", b"c" * 32),
        ClientHello(PROTOCOL_VERSION, "a", "bc", b"c" * 32),
    )
    assert proof(SECRET, "client", one, theirs) != proof(SECRET, "client", two, theirs)


# ------------------------------------------------------------------------------------------ the
# keys of what follows


def keys_after(one: Handshake[Any], other: Handshake[Any]) -> tuple[bytes, bytes]:
    """Of what `one` sends and of what it receives, once both agree on them."""
    for each in (one, other):
        with pytest.raises(RuntimeError):
            _ = each.frame_keys
    deliver(one, other)
    assert one.frame_keys == other.frame_keys[::-1]
    return one.frame_keys


def test_each_direction_of_each_connection_under_each_secret_has_a_key_of_its_own() -> None:
    other = ClientHandshake("worker", "client-1", SECRET, b"d" * 32)
    in_tls = client(), server()
    for each in in_tls:
        each.binding = b"of the TLS connection"
    keys = [
        *keys_after(client(), server()),
        *keys_after(client(), server(nonce=b"t" * 32)),
        *keys_after(other, server()),
        *keys_after(client(role="observer"), server()),
        *keys_after(client(b"new"), server(b"old", b"new")),
        *keys_after(client(read_only_secret(SECRET)), server()),
        *keys_after(client(b""), server(b"")),
        *keys_after(*in_tls),
    ]
    assert len(set(keys)) == len(keys)
    assert all(len(key) == 32 for key in keys)


def test_the_keys_are_none_of_the_proofs() -> None:
    mine = ClientHello(PROTOCOL_VERSION, "worker", "c", b"c" * 32)
    theirs = ServerHello(PROTOCOL_VERSION, "coordinator", "s", b"s" * 32)
    sides = ("client", "server")
    made = [make(SECRET, side, mine, theirs) for make in (proof, frame_key) for side in sides]
    assert len(set(made)) == len(made)
    for field, value in (
        ("role", "observer"),
        ("incarnation", "d"),
        ("nonce", b"d" * 32),
        ("protocol", LATER),
    ):
        change: dict[str, Any] = {field: value}
        assert frame_key(SECRET, "client", dataclasses.replace(mine, **change), theirs) not in made
        assert frame_key(SECRET, "client", mine, dataclasses.replace(theirs, **change)) not in made


# ------------------------------------------------------------------------------------ not the right
# peer


@pytest.mark.parametrize("make", [client, server], ids=["client", "server"])
def test_a_peer_without_the_secret_is_refused_and_told_nothing(make: Any) -> None:
    one = make()
    one.data_to_send()
    with pytest.raises(ProtocolError, match=r"not a TensorHub peer.*GET / HTTP"):
        one.receive_data(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")
    assert one.data_to_send() == b""


@pytest.mark.parametrize("make", [client, server], ids=["client", "server"])
def test_another_version_is_refused_on_both_sides(make: Any) -> None:
    one = make()
    sent = one.data_to_send()
    with pytest.raises(ProtocolError, match=rf"version {LATER} .* or {PROTOCOL_VERSION}: upgrade"):
        one.receive_data(PREFACE[:8] + LATER.to_bytes(2) + b"whatever comes then")
    sent += one.data_to_send()
    assert sent.startswith(PREFACE)  # so that the other side can say the same


@pytest.mark.parametrize(
    ("role", "server_role"), [("reader", "coordinator"), ("worker", "owner"), ("observer", "owner")]
)
def test_roles_that_do_not_meet_are_refused_on_both_sides(role: str, server_role: str) -> None:
    a, b = client(role=role), server(role=server_role)
    with pytest.raises(ProtocolError, match="no business"):
        b.receive_data(a.data_to_send())
    with pytest.raises(ProtocolError, match="check the address"):
        a.receive_data(b.data_to_send())
    assert a.data_to_send() == b""  # no proof


def test_a_reader_notices_that_the_address_belongs_to_another_worker() -> None:
    a, b = client(role="reader", expected_incarnation="server-0"), server(role="owner")
    with pytest.raises(ProtocolError, match="belongs to another worker now") as caught:
        deliver(a, b)
    assert caught.value.retryable
    a, b = client(role="reader", expected_incarnation="server-1"), server(role="owner")
    deliver(a, b)
    assert a.done


@pytest.mark.parametrize(
    ("data", "says"),
    [
        (wire(Proof(b"m" * 32)), "Proof is not for a client"),
        (wire(ClientHello(LATER, "worker", "c", b"c" * 32)), f"hello says version {LATER}"),
        (wire(ClientHello(PROTOCOL_VERSION, "worker", "c", b"c" * 31)), "31 bytes"),
        (wire(ClientHello(PROTOCOL_VERSION, "worker", "c", b"")), "0 bytes"),
        ((FRAME_BYTES_MAX + 1).to_bytes(4, "big"), "4097 bytes"),
        (b"\x00\x00\x00\x01\xc1", "frame without a message"),
    ],
)
def test_a_bad_hello_is_refused(data: bytes, says: str) -> None:
    with pytest.raises(ProtocolError, match=says):
        server().receive_data(PREFACE + data)


@given(st.data())
def test_a_flipped_bit_never_lets_anybody_in(data: st.DataObject) -> None:
    a, b = client(), server()
    spoilt = data.draw(st.integers(0, 3))
    pairs: Sequence[tuple[Handshake[Any], Handshake[Any]]] = ((a, b), (b, a), (a, b), (b, a))
    try:
        for step, (sender, receiver) in enumerate(pairs):
            stream = bytearray(sender.data_to_send())
            if step == spoilt and stream:
                stream[data.draw(st.integers(0, len(stream) - 1))] ^= 1 << data.draw(
                    st.integers(0, 7)
                )
            receiver.receive_data(bytes(stream))
    except (ProtocolError, AuthenticationFailed):
        pass  # otherwise they wait for each other, until the deadline
    assert not a.done
    assert b.done == (spoilt == 3)  # the client had proved itself by then


# ------------------------------------------------------------------------------------- the caller's
# part
