"""Messages to the bodies of frames and back, with every bound checked in both directions.

Responsible for the wire form of a message, the MessagePack array `[tag, field, field, ...]`; for refusing
all that is not exactly that; and for who may say what (`Vocabulary`). The forms of the fields are made
once, on import; a call inspects no types.

Every refusal is a `ProtocolError` that names the message, the field and the bound, and repeats little of
the input.
"""

from __future__ import annotations

import typing
from typing import Final, Generic, TypeVar

import msgpack
from msgpack.exceptions import UnpackException

from tensorhub import messages
from tensorhub.errors import ProtocolError
from tensorhub.protocol.forms import Record, Violation, brief, describe, record_of
from tensorhub.protocol.tags import TAGS
from tensorhub.unpacking import unpacker

M = TypeVar("M")

_RECORDS: Final[dict[type, tuple[int, Record]]] = {kind: (tag, record_of(kind)) for kind, tag in TAGS.items()}
_NAMES: Final[dict[int, str]] = {tag: kind.__name__ for kind, tag in TAGS.items()}


class Vocabulary(Generic[M]):
    """What one kind of peer may say: a union of messages. `speaker` names the peer in errors."""

    __slots__ = ("_by_tag", "kinds", "speaker")

    def __init__(self, speaker: str, union: object) -> None:
        self.speaker = speaker
        self.kinds: frozenset[type[M]] = frozenset(typing.get_args(union) or (union,))
        self._by_tag = dict(_RECORDS[kind] for kind in self.kinds)

    def __repr__(self) -> str:
        return f"<Vocabulary of {self.speaker}: {len(self.kinds)} messages>"

    def record(self, tag: object, length: int) -> Record:
        """What reads a message of `length` items under `tag`; ProtocolError if nothing does."""
        found = self._by_tag.get(tag) if type(tag) is int else None
        if found is None:
            name = _NAMES.get(tag) if type(tag) is int else None
            raise ProtocolError(
                f"{name} is not for {self.speaker} to say here"
                if name is not None
                else f"{brief(tag)} is not the tag of any message; peers of equal versions have equal tags"
            )
        if length != found.size + 1:
            raise ProtocolError(f"{found.kind.__name__}: {length - 1} fields instead of {found.size}")
        return found


CLIENT_HELLO: Final[Vocabulary[messages.ClientHello]] = Vocabulary("a client", messages.ClientHello)
SERVER_HELLO: Final[Vocabulary[messages.ServerHello]] = Vocabulary("a server", messages.ServerHello)
PROOF: Final[Vocabulary[messages.Proof]] = Vocabulary("a peer that must prove itself", messages.Proof)
FROM_WORKER: Final[Vocabulary[messages.FromWorker]] = Vocabulary("a worker", messages.FromWorker)
FROM_COORDINATOR: Final[Vocabulary[messages.FromCoordinator]] = Vocabulary("the coordinator", messages.FromCoordinator)
FROM_READER: Final[Vocabulary[messages.FromReader]] = Vocabulary("a reader", messages.FromReader)
FROM_OWNER: Final[Vocabulary[messages.FromOwner]] = Vocabulary("an owner", messages.FromOwner)
ANYTHING: Final[Vocabulary[messages.Message]] = Vocabulary("anyone", messages.Message)


def encode(message: messages.Message) -> bytes:
    """The body of `message`'s frame; ProtocolError if a field's value is not what its annotation allows."""
    try:
        tag, record = _RECORDS[type(message)]
    except KeyError:
        raise ProtocolError(f"a {type(message).__name__} is not a message and cannot be sent") from None
    try:
        fields = record.encode(message)
    except Violation as error:
        raise _refusal(record, error) from None
    body: bytes = msgpack.packb([tag, *fields])
    return body


def decode(body: bytes, allowed: Vocabulary[M]) -> M:
    """The message in a frame's body; ProtocolError if it is not exactly one message of `allowed`."""
    parts = unpacker(body)
    try:
        length, tag = parts.read_array_header(), parts.unpack()
    except (ValueError, UnpackException) as error:
        start = bytes(body[:16]).hex(" ") or "nothing"
        raise ProtocolError(f"a frame without a message ({start}): {describe(error)}") from error
    record = allowed.record(tag, length)
    try:
        message: M = record.decode(parts)
    except Violation as error:
        raise _refusal(record, error) from error
    if parts.tell() != len(body):
        raise ProtocolError(f"{record.kind.__name__}: {len(body) - parts.tell()} bytes after its end")
    return message


def _refusal(record: Record, error: Violation) -> ProtocolError:
    return ProtocolError(f"{'.'.join((record.kind.__name__, *error.where))}: {error.what}")
