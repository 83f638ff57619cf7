"""Targets: what arrives over a connection before anybody knows what it means."""

from __future__ import annotations

import contextlib
import tracemalloc
import zlib
from collections.abc import Iterator
from typing import Any

from tensorhub.errors import AuthenticationFailed, ProtocolError, TensorHubError
from tensorhub.messages import VERSIONS, ErrorInfo, Heartbeat, Proof, Refused
from tensorhub.protocol import codec
from tensorhub.protocol.frames import (
    HEADER_BYTES,
    MAC_BYTES,
    MAGIC,
    PREFACE,
    FrameDecoder,
    FrameEncoder,
    check_preface,
    frame,
    preface,
)
from tensorhub.protocol.handshake import (
    FRAME_BYTES_MAX,
    NONCE_BYTES,
    ClientHandshake,
    Handshake,
    ServerHandshake,
)
from tests.fuzz.source import Source

SAMPLED = 32  # one input of so many is measured: that costs much more than decoding it
ERROR_CHARS_MAX = 400


@contextlib.contextmanager
def bounded(data: bytes, *, per_byte: int, most: int = 2**18) -> Iterator[None]:
    """Of some inputs: the block allocates no more than that at a time, whatever they claim."""
    if zlib.crc32(data) % SAMPLED or tracemalloc.is_tracing():
        yield
        return
    tracemalloc.start()
    try:
        yield
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < most + per_byte * len(data), f"{peak} bytes for {len(data)}"


# --------------------------------------------------------------------------------------------------
# frames


def frames(data: bytes) -> None:
    """However a stream is cut into pieces, the same frames come out of it, and no more is held than
    one frame.
    """
    source = Source(data)
    frame_bytes_max, piece_bytes = source.choice((1, 5, 300, 2**20)), 1 + source.byte()
    stream = source.rest()
    _check_prefaces(stream)
    with bounded(data, per_byte=4):
        found, refused = _decode(stream, frame_bytes_max, piece_bytes)
    assert (found, refused) == _plainly(stream, frame_bytes_max)


def _check_prefaces(stream: bytes) -> None:
    refused = False
    for end in range(min(len(stream), len(PREFACE) + 2) + 1):
        try:
            check_preface(stream[:end])
            assert not refused, "what more came has made a peer of it"
        except ProtocolError as error:
            refused = True
            assert len(str(error)) < ERROR_CHARS_MAX
    # half a version says nothing yet
    known = len(PREFACE) if len(stream) >= len(PREFACE) else len(MAGIC)
    assert refused or any(preface(version).startswith(stream[:known]) for version in VERSIONS)


def _decode(
    stream: bytes, frame_bytes_max: int, piece_bytes: int, key: bytes = b""
) -> tuple[list[bytes], bool]:
    """The frames, and whether the rest of the stream was refused, at its end as well."""
    decoder, found = FrameDecoder(frame_bytes_max), list[bytes]()
    if key:
        decoder.authenticate(key)
    most = HEADER_BYTES + frame_bytes_max + (MAC_BYTES if key else 0)
    try:
        for at in range(0, len(stream), piece_bytes):
            decoder.receive_data(stream[at : at + piece_bytes])
            while (body := decoder.next_frame()) is not None:
                found.append(body)
            assert len(decoder._buffer) < most
            assert 0 < decoder.bytes_wanted <= most
        decoder.receive_eof()
    except ProtocolError as error:
        assert len(str(error)) < ERROR_CHARS_MAX
        assert not decoder._buffer
        return found, True
    return found, False


def _plainly(stream: bytes, frame_bytes_max: int) -> tuple[list[bytes], bool]:
    found: list[bytes] = []
    while stream:
        size, body = int.from_bytes(stream[:HEADER_BYTES], "big"), stream[HEADER_BYTES:]
        if len(stream) < HEADER_BYTES or not 0 < size <= frame_bytes_max or len(body) < size:
            return found, True
        found.append(body[:size])
        stream = body[size:]
    return found, False


KEYS = (b"k" * 32, b"l" * 32)  # of each direction


def relays(data: bytes) -> None:
    """Whatever somebody without the key does to frames with macs: what is taken is their beginning,
    as they were sent, and whatever else comes is refused, however the stream is cut into pieces.
    """
    source = Source(data)
    sent = [bytes([n]) * (1 + source.byte() % 40) for n in range(source.below(6))]
    mine, theirs = (_sealed(sent, key) for key in KEYS)  # the other direction says the same
    passed = list(mine)
    for _ in range(source.below(4)):
        kind, at = source.below(6), source.below(len(passed) + 1)
        known = source.choice([b"", *mine, *theirs])
        if kind == 0:
            passed.insert(at, known)
        elif kind == 1:
            passed.insert(at, source.blob(60))
        elif at < len(passed):
            piece = passed.pop(at)
            if kind == 2 and piece:
                place = source.below(len(piece))
                passed.insert(
                    at, piece[:place] + bytes([piece[place] ^ source.byte()]) + piece[place + 1 :]
                )
            elif kind == 3:
                passed.insert(source.below(len(passed) + 1), piece)
            elif kind == 4:
                passed.insert(at, piece[: source.below(len(piece) + 1)])
    stream = b"".join(passed)
    with bounded(data, per_byte=200):
        found, refused = _decode(stream, 60, 1 + source.byte(), KEYS[0])
    assert found == sent[: len(found)]
    known_bytes = sum(map(len, mine[: len(found)]))
    assert stream[:known_bytes] == b"".join(mine)[:known_bytes]
    assert refused == (len(stream) > known_bytes)


def _sealed(bodies: list[bytes], key: bytes) -> list[bytes]:
    encoder = FrameEncoder(60)
    encoder.authenticate(key)
    return [encoder.frames(body) for body in bodies]


# --------------------------------------------------------------------------------------------------
# codec

VOCABULARIES: tuple[codec.Vocabulary[Any], ...] = (
    codec.ANYTHING,
    codec.CLIENT_HELLO,
    codec.SERVER_HELLO,
    codec.PROOF,
    codec.FROM_WORKER,
    codec.FROM_COORDINATOR,
    codec.FROM_READER,
    codec.FROM_OWNER,
)


def bodies(data: bytes) -> None:
    """A frame's body is a message that can be said again, or a ProtocolError that repeats little of
    it.
    """
    source = Source(data)
    allowed = source.choice(VOCABULARIES)
    body = source.rest()
    try:
        # A record of a few empty arrays takes one byte on the wire for each, and a Python object
        # here.
        with bounded(data, per_byte=400):
            message = codec.decode(body, allowed)
    except ProtocolError as error:
        assert len(str(error)) < ERROR_CHARS_MAX
        return
    assert type(message) in allowed.forms
    again = codec.decode(codec.encode(message), allowed)
    assert again == message
    assert codec.encode(again) == codec.encode(message)


def messages(data: bytes) -> None:
    """A message of any values that its annotations allow is heard as it was said; damaged, it is
    refused or another one.
    """
    source = Source(data)
    kind = source.choice(sorted(codec.ANYTHING.forms, key=lambda kind: kind.__name__))
    message = source.value(kind)
    body = codec.encode(message)
    assert codec.decode(body, codec.ANYTHING) == message
    damaged = bytearray(body)
    while source:
        damaged[source.below(len(damaged))] = source.byte()
    bodies(b"\0" + bytes(damaged))


# --------------------------------------------------------------------------------------------------
# handshake

SECRET = b"that the fuzzer does not know"
OTHERS = (b"", b"guess", SECRET[:-1])


def _nonce(number: int) -> bytes:
    return bytes([number]) * NONCE_BYTES


def _recorded(
    secret: bytes, number: int, client_role: str = "worker", server_role: str = "coordinator"
) -> list[bytes]:
    """All that both sides have said in an honest handshake, frame by frame."""
    client = ClientHandshake(client_role, f"client-{number}", secret, _nonce(number))
    server = ServerHandshake(server_role, f"server-{number}", [secret], _nonce(number + 100))
    said: list[bytes] = []
    while not (client.done and server.done):
        for one, other in ((client, server), (server, client)):
            data = one.data_to_send()
            if data.startswith(PREFACE):
                said.append(PREFACE)
                data = data[len(PREFACE) :]
                other.receive_data(PREFACE)
            said += [
                frame(body, FRAME_BYTES_MAX)
                for body in _decode(data, FRAME_BYTES_MAX, 1 + len(data))[0]
            ]
            other.receive_data(data)
    return said


# What somebody who listens has heard, under this secret and others; and what is never said.
HEARD: list[bytes] = [
    PREFACE,
    *_recorded(SECRET, 1),
    *_recorded(SECRET, 2),
    *_recorded(SECRET, 3, "reader", "owner"),
    *(said for secret in OTHERS for said in _recorded(secret, 4)),
    frame(codec.encode(Proof(b"")), FRAME_BYTES_MAX),
    frame(codec.encode(Heartbeat(0)), FRAME_BYTES_MAX),
]


def handshakes(data: bytes) -> None:
    """Whatever is said, replayed, reflected or reordered: without the secret nobody is let in, nor
    believed.
    """
    source = Source(data)
    is_server = source.flag()
    victim, oracle = (
        _party(is_server, 50),
        _party(is_server, 60),
    )  # the oracle cannot be used to relay: it is of the same side
    said: list[bytes] = []
    while source:
        said = [
            *HEARD,
            *_frames_of(victim.data_to_send()),
            *_frames_of(oracle.data_to_send()),
            *said,
        ][:200]
        kind = source.byte()
        piece = said[kind] if kind < len(said) else source.blob(200)
        party = oracle if source.byte() > 200 else victim
        _hear(party, piece, source)
    for party in (victim, oracle):
        assert not party.done
        with contextlib.suppress(AuthenticationFailed, ProtocolError):
            party.receive_eof()
            raise AssertionError("the end of the connection is the end of the handshake")


def _party(is_server: bool, number: int) -> Handshake[Any]:
    if is_server:
        return ServerHandshake(
            "coordinator", f"server-{number}", [b"another", SECRET], _nonce(number)
        )
    return ClientHandshake("worker", f"client-{number}", SECRET, _nonce(number))


def _frames_of(data: bytes) -> list[bytes]:
    return [
        frame(body, FRAME_BYTES_MAX)
        for body in _decode(data.removeprefix(PREFACE), FRAME_BYTES_MAX, 1 + len(data))[0]
    ]


def _hear(party: Handshake[Any], piece: bytes, source: Source) -> None:
    cut = source.below(len(piece) + 1)
    known = party._error
    try:
        party.receive_data(piece[:cut])
        party.receive_data(piece[cut:])
        assert known is None
        assert 0 < party.bytes_wanted <= HEADER_BYTES + FRAME_BYTES_MAX
    except (ProtocolError, AuthenticationFailed) as error:
        assert known is None or (type(known), str(known)) == (type(error), str(error))
        assert len(str(error)) < 3 * ERROR_CHARS_MAX
    assert len(party._decoder._buffer) <= HEADER_BYTES + FRAME_BYTES_MAX
    assert len(party._outgoing) < 2 * FRAME_BYTES_MAX


def errors(data: bytes) -> None:
    """An ErrorInfo of any kind is an exception, and can be told on."""
    info = Source(data).value(ErrorInfo)
    error = info.error()
    assert isinstance(error, TensorHubError)
    told = ErrorInfo.of(error)
    codec.encode(Refused(1, told))
