"""Two versions of the protocol: what each peer is sent, and which version two peers speak."""

from __future__ import annotations

import dataclasses
import hashlib
import typing
from dataclasses import dataclass
from typing import Annotated, Any

import msgpack
import pytest

from tensorhub import messages as m
from tensorhub.errors import AuthenticationFailed, ProtocolError
from tensorhub.messages import VERSIONS, ClientHello, ServerHello
from tensorhub.protocol import codec, forms, tags
from tensorhub.protocol.codec import FROM_WORKER, UnknownMessage, UnspokenMessage, written_for
from tensorhub.protocol.frames import WrongVersion, preface
from tensorhub.protocol.handshake import OLDER_THAN_NEWEST, ClientHandshake, ServerHandshake
from tensorhub.transport.dialect import Dialect
from tensorhub.types import U64, Location, ModelInfo, Since, WorkerView
from tests.protocol.test_handshake import SECRET, client, deliver, server, wire
from tests.protocol.test_tags import OWN

OLD, NEW = VERSIONS
JOIN = m.Join("w", Location("s", "r", "h"), (), 1, 2, release="9.9")
OF_VERSION_18 = "e9f33b709c53a1ad"  # all records' fields, as the release before sends them


def fields_of(kind: type, found: dict[str, list[str]]) -> None:
    """The names of the fields that are written for version 18, of a record and of those in it."""
    hints = typing.get_type_hints(kind, include_extras=True)
    known = [
        field.name
        for field in dataclasses.fields(kind)
        if not any(
            isinstance(each, Since) for each in getattr(hints[field.name], "__metadata__", ())
        )
    ]
    found[kind.__name__] = known
    annotations = [hints[name] for name in known]
    while annotations:
        each = annotations.pop()
        if isinstance(each, type) and dataclasses.is_dataclass(each):
            if each.__name__ not in found:
                fields_of(each, found)
        else:
            annotations += typing.get_args(each)


def test_the_release_before_is_sent_the_fields_that_it_knows() -> None:
    """If this fails, a field was added without `Since`, or one of version 18 was changed."""
    found: dict[str, list[str]] = {}
    for kind in tags.TAGS.keys() - tags.SINCE.keys():
        fields_of(kind, found)
        forms.record_of(kind, OLD)
    digest = hashlib.blake2b(repr(sorted(found.items())).encode(), digest_size=8).hexdigest()
    assert digest == OF_VERSION_18


@pytest.mark.parametrize("dialect", OWN, ids=lambda dialect: dialect.transport)
def test_messages_of_a_transport_are_equal_in_all_versions(dialect: Dialect) -> None:
    for kind in dialect.numbers:
        assert forms.record_of(kind, OLD).size == forms.record_of(kind).size


def test_a_younger_field_is_left_out_for_an_older_peer_and_has_its_default_there() -> None:
    view = WorkerView("w", "i", "live", Location("s", "r", "h"), (), "9.9")
    told = m.Description(1, (ModelInfo("m", 0, None, 0, (), (), (), (view,)),))
    for message in (JOIN, told):
        assert codec.decode(written_for(NEW).encode(message), codec.ANYTHING) == message
    body = written_for(OLD).encode(JOIN)
    assert len(msgpack.unpackb(body)) == 6
    assert codec.decode(body, FROM_WORKER) == dataclasses.replace(JOIN, release="")
    nested = codec.decode(written_for(OLD).encode(told), codec.ANYTHING)
    assert isinstance(nested, m.Description)
    assert nested.models[0].workers == (dataclasses.replace(view, release=""),)


def test_fields_that_a_younger_peer_has_appended_are_passed_over() -> None:
    fields = msgpack.unpackb(codec.encode(JOIN))
    fields[2] = [*fields[2], "of a location"]
    assert codec.decode(msgpack.packb([*fields, 1, ["x", {"y": [2]}], None]), FROM_WORKER) == JOIN
    with pytest.raises(ProtocolError, match="74 fields, not 9 as a Join has"):
        codec.decode(msgpack.packb([*fields, *range(65)]), FROM_WORKER)
    deep = msgpack.packb([*fields, 1])[:-1] + b"\x91" * 5000 + b"\x00"
    with pytest.raises(ProtocolError, match="a field of a younger release"):
        codec.decode(deep, FROM_WORKER)


@dataclass(frozen=True)
class _Question:
    request: U64


@pytest.mark.parametrize(
    "fields",
    [
        {"a": Annotated[U64, Since(19)], "b": U64},  # it is not the last one
        {"a": U64, "b": Annotated[U64, Since(19)]},  # it has no default
    ],
    ids=["first", "needed"],
)
def test_a_field_that_an_older_peer_would_misread_is_refused_at_once(fields: Any) -> None:
    with pytest.raises(TypeError, match="comes last, and has a default"):
        forms.record_of(dataclasses.make_dataclass("_Wrong", fields.items()))


def test_an_unknown_message_is_told_from_a_broken_one_and_can_be_refused() -> None:
    for tag, fields, request in (
        (128, [7, "x"], 7),
        (128, [], None),
        (128, [True], None),
        (63, [7], None),
    ):
        with pytest.raises(
            UnknownMessage, match=rf"^{tag} is not the tag.*upgrade this side"
        ) as caught:
            codec.decode(msgpack.packb([tag, *fields]), FROM_WORKER)
        assert caught.value.request == request


def test_a_message_that_an_older_peer_lacks_is_not_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(codec, "SINCE", {_Question: NEW})
    said: dict[type, int] = {_Question: 128}
    codec.Vocabulary[Any]("a worker", said, version=NEW).encode(_Question(1))
    with pytest.raises(UnspokenMessage, match=r"_Question came with version 19.*speaks version 18"):
        codec.Vocabulary[Any]("a worker", said, version=OLD).encode(_Question(1))


# --------------------------------------------------------------------------------------------------
# which version two peers speak


def older_client(**more: Any) -> ClientHandshake:
    return client(version=OLD, **more)


@pytest.mark.parametrize("version", VERSIONS)
def test_a_server_answers_in_the_version_that_is_proposed(version: int) -> None:
    a, b = client(version=version), server()
    b.receive_data(a.data_to_send())
    assert b.version == version
    assert b.data_to_send().startswith(preface(version))


def test_a_client_hears_of_the_version_to_connect_again_with() -> None:
    one = client()
    with pytest.raises(WrongVersion):
        one.receive_data(preface(OLD))
    assert one.older == OLD
    for theirs, mine in ((OLD - 1, NEW), (NEW + 1, NEW), (NEW, OLD)):
        one = client(version=mine)
        with pytest.raises(WrongVersion):
            one.receive_data(preface(theirs))
        assert one.older is None


def test_a_client_of_the_release_before_is_served() -> None:
    """It knows of no mark in a nonce."""
    a, b = older_client(), server()
    b.receive_data(a.data_to_send())
    said = b.data_to_send()
    hello = codec.decode(said[14:], codec.SERVER_HELLO)
    assert hello.nonce.endswith(OLDER_THAN_NEWEST)
    assert len(hello.nonce) == 32
    assert hello.nonce[:24] == b"s" * 24  # what is left of it is chance


def test_a_relay_cannot_bring_two_new_peers_to_the_older_version() -> None:
    a, b = older_client(), server()  # the client was told, by the relay, that there is no newer one
    with pytest.raises(ProtocolError, match="a newer version of the protocol than 18") as caught:
        deliver(a, b)
    assert caught.value.retryable
    assert not a.done
    assert not b.done


def test_a_relay_cannot_take_the_mark_away() -> None:
    a, b = older_client(), server()
    b.receive_data(a.data_to_send())
    b.data_to_send()
    a.receive_data(preface(OLD) + wire(ServerHello(OLD, "coordinator", "server-1", b"s" * 32)))
    with pytest.raises(AuthenticationFailed, match="did not prove"):
        b.receive_data(a.data_to_send())


def test_a_hello_of_another_version_than_its_preface_is_refused() -> None:
    for version, hello in ((NEW, OLD), (OLD, NEW)):
        one = ServerHandshake("coordinator", "server-1", [SECRET], b"s" * 32)
        with pytest.raises(
            ProtocolError, match=f"hello says version {hello}, its preface {version}"
        ):
            one.receive_data(preface(version) + wire(ClientHello(hello, "worker", "c", b"c" * 32)))
