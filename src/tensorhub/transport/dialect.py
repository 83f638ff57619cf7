"""The messages between the readers and owners of one transport.

A transport declares the messages in its own directory, as dataclasses like those of
`tensorhub.messages`, and numbers them in a `Dialect`. The transport's reader and its `OwnerSide`
name that dialect. On the wire such a message is the body of a TransportRequest or a TransportReply,
so only the two sides of the transport know of it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any

from tensorhub.errors import ProtocolError
from tensorhub.messages import Address, FromOwner, FromReader, TransportReply, TransportRequest
from tensorhub.protocol.codec import Vocabulary, decode
from tensorhub.types import U64, Id, Length


@dataclass(frozen=True, slots=True)
class Find:
    """Ask an owner how a registration is read this way. Each transport has an answer of its own."""

    registration: Id
    generation: U64


REGIONS_MAX = 2**16  # of one RegionsAre


@dataclass(frozen=True, slots=True)
class FindRegions:
    """Ask an owner where the regions of a registration are, from number `first` on. Answered by
    RegionsAre.
    """

    registration: Id
    generation: U64
    first: U64


@dataclass(frozen=True, slots=True)
class RegionsAre:
    """Where these regions are in the owner's memory, in their order; as many as there are, or as
    one message tells of.
    """

    addresses: Annotated[tuple[Address, ...], Length(REGIONS_MAX)]


class Dialect:
    """One transport's own messages, with their numbers. A number that was used once is never given
    to another message.
    """

    def __init__(
        self, transport: str, from_reader: Mapping[type, int], from_owner: Mapping[type, int]
    ) -> None:
        self.transport = transport
        self.numbers = {**from_reader, **from_owner}
        self.from_reader: Vocabulary[Any] = Vocabulary(
            f"a reader by {transport}", from_reader, self.numbers
        )
        self.from_owner: Vocabulary[Any] = Vocabulary(
            f"an owner read by {transport}", from_owner, self.numbers
        )

    def request(self, request: int, message: object) -> TransportRequest:
        """What a reader sends to say this."""
        return TransportRequest(request, self.transport, self.from_reader.encode(message))

    def reply(self, request: int, message: object) -> TransportReply:
        """What an owner sends to say this."""
        return TransportReply(request, self.transport, self.from_owner.encode(message))

    def message(self, said: FromReader | FromOwner) -> Any:
        """The dialect's message inside a message. ProtocolError: there is none."""
        match said:
            case TransportRequest(transport=self.transport):
                return decode(said.body, self.from_reader)
            case TransportReply(transport=self.transport):
                return decode(said.body, self.from_owner)
            case _:
                raise ProtocolError(f"a {type(said).__name__} is no message of {self.transport}")
