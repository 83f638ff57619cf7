"""Round trips, and the refusal of every value and every byte string that is not exactly a
message.
"""

from __future__ import annotations

import dataclasses
import math
import tracemalloc
import typing
from functools import partial
from typing import Annotated, Any

import msgpack
import pytest
from hypothesis import given, settings, strategies as st

from tensorhub import messages as m
from tensorhub.errors import ProtocolError
from tensorhub.protocol import codec, forms
from tensorhub.protocol.codec import (
    ANYTHING,
    FROM_COORDINATOR,
    FROM_READER,
    FROM_WORKER,
    decode,
    encode,
)
from tensorhub.protocol.tags import TAGS
from tensorhub.types import Endpoint, Id, Length, Location, OpKey, OpKind, Range
from tests.protocol.strategies import MESSAGES, any_message, values

KEY = OpKey("actor", "g", 1, 2)
FILL = m.Fill(KEY, 0, "r", OpKind.UPDATE, 7, None, 3, False, False, 60.0)
fill = partial(dataclasses.replace, FILL)
wrong: Any = lambda value: value  # noqa: E731 - a value of another type than its field's


def raw(*items: object) -> bytes:
    packed: bytes = msgpack.packb(list(items))
    return packed


def refused(body: bytes, allowed: codec.Vocabulary[Any] = ANYTHING) -> str:
    with pytest.raises(ProtocolError) as caught:
        decode(body, allowed)
    assert len(str(caught.value)) < 250
    return str(caught.value)


def unsendable(message: object) -> str:
    with pytest.raises(ProtocolError) as caught:
        encode(typing.cast(Any, message))
    assert len(str(caught.value)) < 250
    return str(caught.value)


# ------------------------------------------------------------------------------------- what goes
# through


@pytest.mark.parametrize("kind", MESSAGES, ids=lambda kind: str(kind.__name__))
@settings(max_examples=30)
@given(data=st.data())
def test_every_message_comes_back_as_it_was(kind: type, data: st.DataObject) -> None:
    message = data.draw(values(kind))
    body = encode(message)
    again = decode(body, ANYTHING)
    assert type(again) is kind
    assert again == message
    assert encode(again) == body


def test_the_wire_form_is_what_it_was() -> None:
    assert encode(m.Heartbeat(5)) == b"\x93\x11\x05\xcb" + bytes(8)
    assert encode(m.Announce("a", None)) == b"\x94\x4f\xa1a\x90\xc0"
    assert encode(FILL) == raw(
        22, ["actor", "g", 1, 2], 0, "r", "update", 7, None, 3, False, False, 60.0, [], []
    )


def test_an_int_is_good_where_a_float_is_meant() -> None:
    again = decode(encode(fill(timeout_s=60)), FROM_WORKER)
    assert isinstance(again, m.Fill)
    assert type(again.timeout_s) is float


def test_values_at_their_bounds_go_through() -> None:
    for message in (
        m.Watch("n" * 512),
        m.Watch("\U0001f600" * 512),
        m.ReaderCut("i" * 64),
        m.Heartbeat(2**64 - 1),
        m.Proof(b"m" * 32),
        fill(rank=2**20, timeout_s=1e9, at_least=-(2**63)),
        m.ChunksFollow(1, ((-(2**63), 2**64 - 1),) * 1024),
    ):
        assert decode(encode(message), ANYTHING) == message


# --------------------------------------------------------------------------------------- what is
# refused

BREACHES = [
    (m.Watch("n" * 513), "Watch.model", "512"),
    (m.Watch("\ud800"), "Watch.model", "UTF-8"),
    (m.ReaderCut("i" * 65), "ReaderCut.lease", "64"),
    (m.Heartbeat(-1), "Heartbeat.sequence", str(2**64 - 1)),
    (m.Heartbeat(2**64), "Heartbeat.sequence", str(2**64 - 1)),
    (m.Heartbeat(10**5000), "Heartbeat.sequence", "bits"),
    (m.Heartbeat(True), "Heartbeat.sequence", "whole number"),
    (m.Proof(b"m" * 33), "Proof.mac", "32"),
    (fill(timeout_s=math.nan), "Fill.timeout_s", "finite"),
    (fill(timeout_s=math.inf), "Fill.timeout_s", "finite"),
    (fill(timeout_s=-0.1), "Fill.timeout_s", "from 0"),
    (fill(timeout_s=1e9 + 1), "Fill.timeout_s", "1000000000"),
    (fill(timeout_s=10**400), "Fill.timeout_s", "bits"),
    (fill(at_least=2**64), "Fill.at_least", str(2**64 - 1)),
    (fill(selector="s" * 513), "Fill.selector", "512"),
    (fill(key=OpKey("a", "g", -1, 0)), "Fill.key.epoch", "from 0"),
    (fill(rank=2**20 + 1), "Fill.rank", str(2**20)),
    (m.Join("w", Location(host="h"), (Endpoint("t", "a"),) * 17, 1, 0), "Join.endpoints", "16"),
    (
        m.Join("w", Location(host="h"), (Endpoint("t" * 513, "a"),), 1, 0),
        "Join.endpoints.transport",
        "512",
    ),
    (m.ChunksFollow(1, ((0, 0),) * 1025), "ChunksFollow.chunks", "1024"),
]


@pytest.mark.parametrize(
    ("message", "field", "bound"), BREACHES, ids=[f"{row[1]} {row[2]}" for row in BREACHES]
)
def test_a_bound_is_kept_by_the_sender_and_by_the_receiver(
    message: m.Message, field: str, bound: str
) -> None:
    text = unsendable(message)
    assert text.startswith(f"{field}: ")
    assert bound in text
    body = _unchecked(message)
    if body is not None:
        assert refused(body).startswith(f"{field}: ")


def _unchecked(message: m.Message) -> bytes | None:
    """The body that a sender without checks would make; None if msgpack itself cannot say it."""

    def plain(value: object) -> object:
        if dataclasses.is_dataclass(value):
            return [plain(getattr(value, field.name)) for field in dataclasses.fields(value)]
        return [plain(one) for one in value] if isinstance(value, tuple) else value

    fields = plain(message)
    assert isinstance(fields, list)
    try:
        return raw(TAGS[type(message)], *fields)
    except (OverflowError, UnicodeEncodeError):
        return None


WRONG_TYPES: list[Any] = [
    m.Watch(wrong(b"actor")),
    m.Watch(wrong(None)),
    m.Proof(wrong("mac")),
    m.Heartbeat(wrong(1.0)),
    m.Heartbeat(wrong("1")),
    m.Deregister(1, "r", wrong(1)),
    fill(selector=wrong(True)),
    fill(selector=wrong(None)),
    fill(at_least=wrong("7")),
    fill(kind=wrong("destroy")),
    fill(kind=wrong(3)),
    fill(key=wrong(None)),
    fill(timeout_s=wrong("soon")),
    m.ChunksFollow(1, wrong(5)),
    m.ChunksFollow(1, wrong(((1, 2, 3),))),
    m.ChunksFollow(1, wrong((1,))),
    m.Announce("a", wrong(5)),
]


@pytest.mark.parametrize("message", WRONG_TYPES)
def test_a_value_of_another_type_is_refused_on_both_sides(message: m.Message) -> None:
    assert unsendable(message).startswith(type(message).__name__ + ".")
    body = _unchecked(message)
    assert body is not None
    assert refused(body).startswith(type(message).__name__ + ".")


LONG = "seven77"


@pytest.mark.parametrize(
    "strange",
    ["\x1b[2Jxyz", "ab\rcdef", "abc\nxyz", "ab\x7fcdef", "\x9b2Jxy", "x\u202eabc", "a\u2028xyz"],
)
@pytest.mark.parametrize(
    "message",
    [
        m.Join(LONG, Location(), (), 1, 0),
        m.Join("a", Location(site=LONG), (), 1, 0),
        m.Join("a", Location(rack=LONG), (), 1, 0),
        m.Join("a", Location(host=LONG), (), 1, 0),
        m.Join("a", Location(), (Endpoint(LONG, "tcp://1.2.3.4:5"),), 1, 0),
        m.Join("a", Location(), (Endpoint("tcp", LONG),), 1, 0),
        m.Watch(LONG),
        m.Describe(1, LONG),
        m.GetManifest(1, "a", LONG, 0),
        m.Resolve(OpKey("a", LONG, 1, 1), 0),
    ],
)
def test_what_a_terminal_would_obey_is_refused(message: m.Message, strange: str) -> None:
    """Names, addresses and ids come to an operator's terminal: on both sides, as they are sent and
    as they come.
    """
    packed = encode(message).replace(msgpack.packb(LONG), msgpack.packb(strange))
    assert "not printable" in refused(packed)
    assert "\x1b" not in refused(packed)


def test_what_is_not_a_message_cannot_be_sent() -> None:
    assert "OpKey" in unsendable(KEY)


def test_only_what_the_peer_may_say_is_accepted() -> None:
    assert "Heartbeat is not for the coordinator" in refused(
        encode(m.Heartbeat(1)), FROM_COORDINATOR
    )
    assert "Proof is not for a worker" in refused(encode(m.Proof(b"")), FROM_WORKER)
    assert "Watch is not for a reader" in refused(encode(m.Watch("a")), FROM_READER)


@pytest.mark.parametrize(
    ("body", "says"),
    [
        (b"", "frame ends"),
        (b"\x00", "malformed"),
        (b"\xc0", "malformed"),
        (raw(), "frame ends"),
        (raw(200), "tag"),
        (raw(True, 1), "tag"),
        (raw("Heartbeat", 1), "tag"),
        (raw([], 1), "tag"),
        (raw({}, 1), "tag"),
        (raw(17), "Heartbeat: 0 fields, not 2"),
        (raw(17, 1, 0.0, *[0] * 65), "Heartbeat: 67 fields, not 2"),
        (b"\x94\x11\x01\xcb" + bytes(8), "Heartbeat.a field of a younger release: the frame ends"),
        (raw(17, 1, 0.0) + b"\x00", "1 bytes after"),
        (b"\x93\x11", "frame ends"),
        (raw(33, {"a": 1}), "Watch.model"),
        (raw(33, msgpack.ExtType(1, b"x")), "Watch.model"),
        (raw(33, msgpack.Timestamp(1)), "Watch.model"),
        (b"\x92\x21\xa2\xff\xfe", "UTF-8"),
        (b"\x92\x21\xc1", "Watch.model"),
        (b"\x92\x21\xdb\xff\xff\xff\xff", "frame ends"),
        (raw(24, ["a", "g", 1], 0, b"", []), "Prepared.key: 3 fields, not 4"),
        (raw(24, [], 0, b"", []), "Prepared.key: 0 fields, not 4"),
        (raw(79, "a", ["a", 1]), "Announce.newest: 2 fields"),
        (raw(79, "a", None), "Announce.newest"),
    ],
    ids=str,
)
def test_bytes_that_are_not_a_message_are_refused(body: bytes, says: str) -> None:
    assert says in refused(body)


@given(any_message(), st.data())
def test_damaged_messages_raise_nothing_but_protocol_errors(
    message: m.Message, data: st.DataObject
) -> None:
    body = bytearray(encode(message))
    for _ in range(data.draw(st.integers(1, 3))):
        body[data.draw(st.integers(0, len(body) - 1))] ^= 1 << data.draw(st.integers(0, 7))
    try:
        again = decode(bytes(body), ANYTHING)
    except ProtocolError:
        return
    decode(encode(again), ANYTHING)  # damaged into another good message


@given(any_message(), st.data())
def test_truncated_messages_are_refused(message: m.Message, data: st.DataObject) -> None:
    body = encode(message)
    refused(body[: data.draw(st.integers(0, len(body) - 1))])


# ------------------------------------------------------------------------------------------------
# memory

BOMBS = {
    "an array that claims 4 Gi items": b"\x93\x79\x01\xdd\xff\xff\xff\xff",
    "as many items as are allowed, and none there": b"\x93\x79\x01\xdc\x04\x00",
    "a million items of a description": b"\x93\x50\x01\xdd\x00\x01\x00\x00" + b"\x98" * 10,
    "arrays inside of arrays where a text belongs": b"\x92\x21" + b"\xdd\x00\x10\x00\x00" * 10_000,
    "arrays inside of arrays where pairs belong": b"\x93\x79\x01" + b"\xdc\x04\x00" * 10_000,
    "arrays as the tag": b"\x92" + b"\xdd\x00\x10\x00\x00" * 10_000,
    "a text that claims 4 GiB": b"\x92\x21\xdb\xff\xff\xff\xff",
    "bytes that claim 4 GiB": b"\x92\x03\xc6\xff\xff\xff\xff",
    "a map that claims 4 Gi items": b"\x92\x21\xdf\xff\xff\xff\xff",
    "an extension that claims 4 GiB": b"\x92\x21\xc9\xff\xff\xff\xff\x01",
}


@pytest.mark.parametrize("name", BOMBS)
def test_no_claim_makes_the_decoder_allocate(name: str) -> None:
    body = BOMBS[name]
    tracemalloc.start()
    try:
        refused(body)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 2**18 + 4 * len(body)


# -------------------------------------------------------------------------- types that do not fit a
# wire


@dataclasses.dataclass(frozen=True)
class _Empty:
    pass


@pytest.mark.parametrize(
    "annotation",
    [
        str,
        bytes,
        tuple[int, ...],
        dict[str, int],
        list[int],
        object,
        Location | Endpoint,
        int | Annotated[int, Range(0, 1)],
        Id | Annotated[str, Length(3)],
        _Empty,
    ],
    ids=str,
)
def test_a_type_without_a_bound_or_a_wire_form_is_refused_at_once(annotation: Any) -> None:
    with pytest.raises(TypeError):
        forms.form_of(annotation)
