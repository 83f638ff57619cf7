"""Turns messages into the bodies of frames and back, and checks every bound in both directions.

Responsible for the wire form of a message, the MessagePack array `[tag, field, field, ...]`, for
refusing anything else, and for the messages that each role may send (`Vocabulary`). The forms of
the fields are made once, on import; a call inspects no types.

Every refusal is a `ProtocolError` that names the message, the field and the bound, and repeats
little of the input.
"""

from __future__ import annotations

import contextlib
import functools
import typing
from collections.abc import Mapping
from typing import Any, Final, Generic, TypeVar

import msgpack
from msgpack.exceptions import UnpackException

from tensorhub import messages
from tensorhub.errors import ProtocolError
from tensorhub.model.unpacking import unpacker
from tensorhub.protocol.forms import Record, Violation, brief, describe, record_of
from tensorhub.protocol.tags import QUESTIONS, SINCE, TAGS

M = TypeVar("M")


class UnknownMessage(ProtocolError):
    """A message of a younger peer. `request`: by which it can be refused; None: it is no question
    of a worker.
    """

    request: int | None = None


class UnspokenMessage(ProtocolError):
    """A message that the peer's version of the protocol does not have."""


class Vocabulary(Generic[M]):
    """What one kind of peer may say: messages with their tags. `speaker` names the peer in
    errors.
    """

    __slots__ = ("_by_tag", "_known", "_version", "forms", "speaker")

    def __init__(
        self,
        speaker: str,
        tags: Mapping[type, int],
        known: Mapping[type, int] = TAGS,
        version: int = messages.PROTOCOL_VERSION,
    ) -> None:
        """`known`: all messages of which the errors know the names. `version`: for which these
        messages are written.
        """
        self.speaker = speaker
        self._version = version
        self.forms = {
            kind: (tag, record_of(kind, version))
            for kind, tag in tags.items()
            if SINCE.get(kind, 0) <= version
        }
        self._by_tag = dict(self.forms.values())
        self._known = known

    def __repr__(self) -> str:
        return f"<Vocabulary of {self.speaker}: {len(self.forms)} messages>"

    def record(self, tag: object) -> Record:
        """The record that reads a message under `tag`. ProtocolError: there is none.
        UnknownMessage: there may be one in a younger release.
        """
        found = self._by_tag.get(tag) if type(tag) is int else None
        if found is None:
            names = [
                kind.__name__
                for kind, known in self._known.items()
                if type(tag) is int and known == tag
            ]
            if names:
                raise ProtocolError(f"{names[0]} is not for {self.speaker} to say here")
            is_tag = type(tag) is int and 0 < tag < 2**16
            raise (UnknownMessage if is_tag else ProtocolError)(
                f"{brief(tag)} is not the tag of any message that this side knows (version "
                f"{self._version} of the protocol): if the peer is a younger release, upgrade this "
                f"side"
            )
        return found

    def encode(self, message: M) -> bytes:
        """The body of the message's frame. ProtocolError: a field's value is not what its
        annotation allows.
        """
        try:
            tag, record = self.forms[type(message)]
        except KeyError:
            name, since = type(message).__name__, SINCE.get(type(message), 0)
            if since > self._version:
                raise UnspokenMessage(
                    f"{name} came with version {since} of the protocol, and the peer speaks "
                    f"version {self._version}: upgrade the peer"
                ) from None
            raise ProtocolError(f"a {name} is not a message and cannot be sent") from None
        try:
            fields = record.encode(message)
        except Violation as error:
            raise _refusal(record, error) from None
        body: bytes = msgpack.packb([tag, *fields])
        return body


def _said_by(speaker: str, union: object) -> Vocabulary[Any]:
    return Vocabulary(speaker, {kind: TAGS[kind] for kind in typing.get_args(union) or (union,)})


CLIENT_HELLO: Final[Vocabulary[messages.ClientHello]] = _said_by("a client", messages.ClientHello)
SERVER_HELLO: Final[Vocabulary[messages.ServerHello]] = _said_by("a server", messages.ServerHello)
PROOF: Final[Vocabulary[messages.Proof]] = _said_by("a peer that must prove itself", messages.Proof)
FROM_WORKER: Final[Vocabulary[messages.FromWorker]] = _said_by("a worker", messages.FromWorker)
FROM_COORDINATOR: Final[Vocabulary[messages.FromCoordinator]] = _said_by(
    "the coordinator", messages.FromCoordinator
)
FROM_READER: Final[Vocabulary[messages.FromReader]] = _said_by("a reader", messages.FromReader)
FROM_OWNER: Final[Vocabulary[messages.FromOwner]] = _said_by("an owner", messages.FromOwner)
ANYTHING: Final[Vocabulary[messages.Message]] = _said_by("anyone", messages.Message)

encode: Final = ANYTHING.encode


@functools.cache
def written_for(version: int) -> Vocabulary[messages.Message]:
    """All messages, as a peer of that version of the protocol reads them."""
    return Vocabulary("anyone", TAGS, version=version)


def decode(body: bytes, allowed: Vocabulary[M]) -> M:
    """The message in a frame's body. ProtocolError: it is not exactly one message of `allowed`.
    UnknownMessage: it may be one in a younger release.
    """
    parts = unpacker(body)
    try:
        length, tag = parts.read_array_header(), parts.unpack()
    except (ValueError, UnpackException) as error:
        start = bytes(body[:16]).hex(" ") or "nothing"
        raise ProtocolError(f"a frame without a message ({start}): {describe(error)}") from error
    try:
        record = allowed.record(tag)
    except UnknownMessage as error:
        with contextlib.suppress(ValueError, UnpackException):
            if tag in QUESTIONS and type(request := parts.unpack()) is int and request > 0:
                error.request = request
        raise
    try:
        message: M = record.decode(parts, length - 1)
    except Violation as error:
        raise _refusal(record, error) from error
    if parts.tell() != len(body):
        raise ProtocolError(
            f"{record.kind.__name__}: {len(body) - parts.tell()} bytes after its end"
        )
    return message


def _refusal(record: Record, error: Violation) -> ProtocolError:
    return ProtocolError(f"{'.'.join((record.kind.__name__, *error.where))}: {error.what}")
