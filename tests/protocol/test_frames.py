"""Frames and the preface: any cut of the stream gives the same frames; a bad one is a ProtocolError."""

from __future__ import annotations

import contextlib
import tracemalloc

import pytest
from hypothesis import given, strategies as st

from tensorhub.errors import ProtocolError
from tensorhub.messages import PROTOCOL_VERSION
from tensorhub.protocol.frames import PREFACE, FrameDecoder, WrongVersion, check_preface, frame, header

MOST = 100


def drain(decoder: FrameDecoder) -> list[bytes]:
    bodies = []
    while (body := decoder.next_frame()) is not None:
        bodies.append(body)
    return bodies


@given(st.lists(st.binary(min_size=1, max_size=MOST), max_size=5), st.data())
def test_frames_come_out_whichever_way_they_arrive(bodies: list[bytes], data: st.DataObject) -> None:
    stream = b"".join(frame(body, MOST) for body in bodies)
    decoder, found = FrameDecoder(MOST), []
    while stream:
        cut = data.draw(st.integers(1, len(stream)))
        decoder.receive_data(stream[:cut])
        stream = stream[cut:]
        found += drain(decoder)
    decoder.receive_eof()
    assert found == bodies


@given(st.lists(st.binary(min_size=1, max_size=MOST), min_size=1, max_size=3))
def test_reading_what_is_wanted_never_reads_beyond_a_frame(bodies: list[bytes]) -> None:
    stream = b"".join(frame(body, MOST) for body in bodies) + b"payload"
    decoder = FrameDecoder(MOST)
    for body in bodies:
        while (found := decoder.next_frame()) is None:
            wanted = decoder.bytes_wanted
            assert wanted > 0
            decoder.receive_data(stream[:wanted])
            stream = stream[wanted:]
        assert found == body
    assert decoder.take_rest() == b""
    assert stream == b"payload"


@pytest.mark.parametrize("size", [0, MOST + 1, 2**32 - 1])
def test_a_bad_length_is_refused_before_its_body_arrives(size: int) -> None:
    decoder = FrameDecoder(MOST)
    decoder.receive_data(frame(b"good", MOST) + size.to_bytes(4, "big"))
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


@given(st.lists(st.binary(max_size=2 * MOST), max_size=6))
def test_garbage_raises_nothing_but_protocol_errors(pieces: list[bytes]) -> None:
    decoder = FrameDecoder(MOST)
    try:
        for piece in pieces:
            decoder.receive_data(piece)
            assert all(0 < len(body) <= MOST for body in drain(decoder))
        decoder.receive_eof()
    except ProtocolError:
        pass


def test_frames_that_nobody_takes_do_not_pile_up() -> None:
    decoder = FrameDecoder(MOST)
    decoder.receive_data(frame(b"x" * MOST, MOST) * 2)
    with pytest.raises(ProtocolError, match="waiting to be taken"):
        decoder.receive_data(b"x")


@pytest.mark.parametrize("size", [0, MOST + 1])
def test_a_frame_that_the_peer_would_refuse_is_not_made(size: int) -> None:
    with pytest.raises(ProtocolError, match="frame_bytes_max"):
        header(size, MOST)


def test_the_preface_is_what_it_was() -> None:
    assert PREFACE == b"TENSRHUB\x00\x01"
    for size in range(len(PREFACE) + 1):
        check_preface(PREFACE[:size])
    check_preface(PREFACE + b"more")


@pytest.mark.parametrize("start", [b"G", b"GET / HTTP/1.1\r\n", b"TENSORHUB", b"\x00", b"TENSRHUb\x00\x01"])
def test_a_stranger_is_recognised_by_its_first_bytes(start: bytes) -> None:
    with pytest.raises(ProtocolError, match="not a TensorHub peer") as caught:
        check_preface(start)
    assert repr(start[:16]) in str(caught.value)


@pytest.mark.parametrize(("version", "older"), [(PROTOCOL_VERSION - 1, "peer"), (PROTOCOL_VERSION + 1, "this side")])
def test_another_version_names_both_and_who_must_upgrade(version: int, older: str) -> None:
    with pytest.raises(WrongVersion) as caught:
        check_preface(PREFACE[:8] + version.to_bytes(2, "big"))
    text = str(caught.value)
    assert f"version {version}" in text
    assert f"version {PROTOCOL_VERSION}" in text
    assert older in text[text.index("upgrade") :]


@given(st.binary(max_size=40))
def test_any_first_bytes_raise_nothing_but_protocol_errors(start: bytes) -> None:
    with contextlib.suppress(ProtocolError):
        check_preface(start)
