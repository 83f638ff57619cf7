"""Frames and the preface: any cut of the stream gives the same frames; a bad one is a
ProtocolError.
"""

from __future__ import annotations

import itertools
import tracemalloc

import pytest
from hypothesis import given, strategies as st

from tensorhub.errors import ProtocolError
from tensorhub.messages import PROTOCOL_VERSION, VERSIONS
from tensorhub.protocol.frames import (
    HEADER_BYTES,
    MAC_BYTES,
    PREFACE,
    FrameDecoder,
    FrameEncoder,
    NotAuthentic,
    WrongVersion,
    check_preface,
    frame,
)

MOST = 100
KEY = b"k" * 32
kinds = pytest.mark.parametrize("key", [b"", KEY], ids=["handshake", "authentic"])


def sealed(*bodies: bytes, key: bytes = KEY) -> list[bytes]:
    """Frames of these bodies, as one connection carries them; with a key, each has its mac."""
    encoder = FrameEncoder(MOST)
    if key:
        encoder.authenticate(key)
    return [encoder.frames(body) for body in bodies]


def decoder_with(key: bytes) -> FrameDecoder:
    decoder = FrameDecoder(MOST)
    if key:
        decoder.authenticate(key)
    return decoder


def drain(decoder: FrameDecoder) -> list[bytes]:
    bodies = []
    while (body := decoder.next_frame()) is not None:
        bodies.append(body)
    return bodies


@kinds
@given(bodies=st.lists(st.binary(min_size=1, max_size=MOST), max_size=5), data=st.data())
def test_frames_come_out_whichever_way_they_arrive(
    key: bytes, bodies: list[bytes], data: st.DataObject
) -> None:
    stream = b"".join(sealed(*bodies, key=key))
    decoder, found = decoder_with(key), []
    while stream:
        cut = data.draw(st.integers(1, len(stream)))
        decoder.receive_data(stream[:cut])
        stream = stream[cut:]
        found += drain(decoder)
    decoder.receive_eof()
    assert found == bodies


@kinds
@given(bodies=st.lists(st.binary(min_size=1, max_size=MOST), min_size=1, max_size=5))
def test_reading_what_is_wanted_never_reads_beyond_a_frame(key: bytes, bodies: list[bytes]) -> None:
    stream = b"".join(sealed(*bodies, key=key)) + b"payload"
    decoder = decoder_with(key)
    for body in bodies:
        while (found := decoder.next_frame()) is None:
            wanted = decoder.bytes_wanted
            assert 0 < wanted <= MOST + MAC_BYTES
            decoder.receive_data(stream[:wanted])
            stream = stream[wanted:]
        assert found == body
    assert (decoder.take_rest(), stream) == (b"", b"payload")


@kinds
@pytest.mark.parametrize("size", [0, MOST + 1, 2**32 - 1])
def test_a_bad_length_is_refused_before_its_body_arrives(key: bytes, size: int) -> None:
    decoder = decoder_with(key)
    decoder.receive_data(sealed(b"good", key=key)[0] + size.to_bytes(4, "big"))
    assert decoder.next_frame() == b"good"
    with pytest.raises(ProtocolError, match=f"frame of {size} bytes"):
        decoder.next_frame()
    for again in (lambda: decoder.receive_data(b"x"), decoder.next_frame, decoder.receive_eof):
        with pytest.raises(ProtocolError, match=f"frame of {size} bytes"):
            again()


def test_a_claimed_length_allocates_nothing() -> None:
    decoder = FrameDecoder(2**31)
    tracemalloc.start()
    try:
        decoder.receive_data((2**31).to_bytes(4, "big") + b"x" * 100)
        assert decoder.next_frame() is None
        assert tracemalloc.get_traced_memory()[1] < 10_000
    finally:
        tracemalloc.stop()


@given(st.binary(min_size=1, max_size=20), st.data())
def test_a_stream_that_ends_inside_a_frame_is_refused(body: bytes, data: st.DataObject) -> None:
    whole = frame(body, MOST)
    decoder = FrameDecoder(MOST)
    decoder.receive_data(whole[: data.draw(st.integers(1, len(whole) - 1))])
    assert decoder.next_frame() is None
    with pytest.raises(ProtocolError, match="ended inside a frame"):
        decoder.receive_eof()


def test_frames_that_nobody_takes_do_not_pile_up() -> None:
    decoder = FrameDecoder(MOST)
    decoder.receive_data(frame(b"x" * MOST, MOST) * 2)
    with pytest.raises(ProtocolError, match="waiting to be taken"):
        decoder.receive_data(b"x")


@pytest.mark.parametrize("size", [0, MOST + 1])
def test_a_frame_that_the_peer_would_refuse_is_not_made(size: int) -> None:
    with pytest.raises(ProtocolError, match="frame_bytes_max"):
        frame(bytes(size), MOST)


# ------------------------------------------------------------------------------------------- frames
# after the handshake

BODIES = [b"one", b"two", b"two", b"\0" * MOST, b"five"]


def opened(pieces: list[bytes], key: bytes = KEY) -> list[bytes]:
    """The bodies that a receiver takes; NotAuthentic is raised."""
    decoder, found = decoder_with(key), []
    for piece in pieces:
        decoder.receive_data(piece)
        found += drain(decoder)
    return found


def test_a_frame_after_the_handshake_is_what_it_was() -> None:
    assert [each.hex() for each in sealed(b"hello", b"hello")] == [
        "0000000568656c6c6f" + "c8b1172eef86f6c1698a2a5eec872d81",
        "0000000568656c6c6f" + "a82451f6011390c6cd4bbe5a202f9ef6",
    ]
    assert HEADER_BYTES + len(b"hello") + MAC_BYTES == len(sealed(b"hello")[0])


def test_whatever_is_changed_in_a_frame_is_noticed() -> None:
    (whole,) = sealed(b"body")
    for place, bit in itertools.product(range(HEADER_BYTES, len(whole)), range(8)):
        spoilt = bytearray(whole)
        spoilt[place] ^= 1 << bit
        with pytest.raises(NotAuthentic, match=r"not the next frame.*SECURITY\.md"):
            opened([bytes(spoilt)])


def test_a_frame_that_is_cut_or_stretched_is_noticed() -> None:
    (whole,) = sealed(b"body")
    for size in range(1, 12):
        if size != 4:
            with pytest.raises(NotAuthentic):
                opened([size.to_bytes(4, "big") + whole[HEADER_BYTES:] + bytes(MOST)])


@pytest.mark.parametrize(
    "order",
    [[1], [0, 2], [0, 0], [0, 1, 0], [1, 0], [0, 2, 1], [0, 1, 2, 2]],
    ids=lambda order: "".join(map(str, order)),
)
def test_frames_that_are_lost_repeated_or_reordered_are_noticed(order: list[int]) -> None:
    frames = sealed(*BODIES)
    with pytest.raises(NotAuthentic):  # also where two bodies are equal
        opened([frames[number] for number in order])


def test_frames_of_another_key_or_of_none_are_noticed() -> None:
    for wrong in (
        sealed(b"body", key=b"o" * 32),
        [frame(b"body", MOST) + bytes(MAC_BYTES)],
        [frame(b"b" * 40, MOST)] * 2,
    ):
        with pytest.raises(NotAuthentic):
            opened(wrong)


def test_after_a_frame_that_is_not_authentic_nothing_is_taken() -> None:
    good, after = sealed(b"good", b"after")
    decoder = FrameDecoder(MOST)
    decoder.authenticate(KEY)
    decoder.receive_data(good + frame(b"bad", MOST) + bytes(MAC_BYTES))
    assert decoder.next_frame() == b"good"
    for again in (
        decoder.next_frame,
        lambda: decoder.receive_data(after),
        decoder.next_frame,
        decoder.receive_eof,
    ):
        with pytest.raises(NotAuthentic):
            again()
    assert not decoder.take_rest()


def test_a_frame_that_is_too_large_to_send_takes_no_number() -> None:
    encoder = FrameEncoder(MOST)
    encoder.authenticate(KEY)
    with pytest.raises(ProtocolError):
        encoder.frames(bytes(MOST + 1))
    assert [encoder.frames(b"one")] == sealed(b"one")


# --------------------------------------------------------------------------------------------------
# preface


def test_the_preface_is_what_it_was() -> None:
    assert PREFACE == b"TENSRHUB\x00\x13"
    for size in range(len(PREFACE) + 1):
        check_preface(PREFACE[:size])
    check_preface(PREFACE + b"more")


@pytest.mark.parametrize(
    "start", [b"G", b"GET / HTTP/1.1\r\n", b"TENSORHUB", b"\x00", b"TENSRHUb\x00\x02"]
)
def test_another_protocol_is_recognised_by_its_first_bytes(start: bytes) -> None:
    with pytest.raises(ProtocolError, match="not a TensorHub peer") as caught:
        check_preface(start)
    assert repr(start[:16]) in str(caught.value)


@pytest.mark.parametrize(
    ("version", "older"), [(VERSIONS[0] - 1, "peer"), (PROTOCOL_VERSION + 1, "this side")]
)
def test_another_version_names_both_and_who_must_upgrade(version: int, older: str) -> None:
    with pytest.raises(WrongVersion) as caught:
        check_preface(PREFACE[:8] + version.to_bytes(2, "big"))
    text = str(caught.value)
    assert f"version {version}" in text
    assert "this side 18 or 19" in text
    assert older in text[text.index("upgrade") :]
