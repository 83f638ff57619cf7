"""The handshake: on every kind of connection, a hello from each side, and then a proof from
each.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from tensorhub.types import U64, Id, Length, Name

PROTOCOL_VERSION = 19
VERSIONS = (18, PROTOCOL_VERSION)  # that this release speaks: its own, and that of the one before

NEWLINES = b"\r\n\r\n"

Nonce = Annotated[bytes, Length(32)]


@dataclass(frozen=True, slots=True)
class ClientHello:
    """First frame of a client. `role`: "worker" (to a coordinator), "observer", "reader" (to a
    worker).

    `newlines` say nothing to a TensorHub peer. A server of another protocol, HTTP for one, takes
    them for the end of a request and answers at once, so that the client does not wait in vain.
    """

    protocol: U64
    role: Name
    incarnation: Id
    nonce: Nonce
    newlines: Annotated[bytes, Length(4)] = NEWLINES


@dataclass(frozen=True, slots=True)
class ServerHello:
    """First answer; `incarnation` names the answering process' life."""

    protocol: U64
    role: Name
    incarnation: Id
    nonce: Nonce


@dataclass(frozen=True, slots=True)
class Proof:
    """Shows knowledge of the secret for this handshake, without sending it."""

    mac: Nonce


Handshake = ClientHello | ServerHello | Proof
