"""Mutual proof of the cluster's secret, at the beginning of every connection; no I/O.

    client                                    server
      preface, ClientHello(nonce)      ->
                                       <-       preface, ServerHello(nonce)
      Proof(mac, "client")             ->
                                       <-       Proof(mac, "server"), or Proof(b""): refused

A mac is HMAC-SHA256 under the secret, over the side that makes it and both hellos: versions, roles,
incarnations, nonces; with TLS also over the hashes of both certificates. So a proof fits one
handshake, one side and one TLS connection, and can be neither replayed, reflected nor relayed. The
client proves itself first: a server says nothing under the secret to a client that does not know
it. Open access uses an empty secret.

Each direction has a key for the frames that follow (`frames.FrameMac`). The keys are made like the
macs, under the secret that the client has proved. A server also accepts the read-only secret that
belongs to each of its secrets, and can tell the two apart.

A client proposes one version of the protocol, its newest at first. A server that speaks it answers
in it; another server answers with its own version and closes, and the client connects once more
with that one, if it speaks it. A relay must not bring two peers to an older version than they
both have. So a server that answers in an older version than its newest says so in its nonce
(`OLDER_THAN_NEWEST`, as TLS does since 1.3), which no relay can change: a client that has a newer
version too refuses it, and connects again.

Responsible for that exchange, for the roles that may meet, and for its bounds. Not responsible for
its deadline (the drivers). Raises ProtocolError (not a peer, another version, roles or an
incarnation that do not fit) and AuthenticationFailed. After an error, send `data_to_send()` before
closing: it may tell the peer the reason.
"""

from __future__ import annotations

import abc
import functools
import hashlib
import hmac
from collections.abc import Sequence
from copy import copy
from typing import Final, Generic, TypeVar

from tensorhub.errors import AuthenticationFailed, ProtocolError, TensorHubError
from tensorhub.messages import (
    NEWLINES,
    PROTOCOL_VERSION,
    VERSIONS,
    ClientHello,
    Proof,
    ServerHello,
)
from tensorhub.protocol import codec
from tensorhub.protocol.frames import (
    PREFACE,
    PREFACE_BYTES,
    FrameDecoder,
    SpeaksTls,
    WrongVersion,
    check_preface,
    frame,
    preface,
)
from tensorhub.protocol.secret import TOKEN_VARIABLE, Secret, read_only_secret
from tensorhub.types import READ_ONLY

NONCE_BYTES: Final = 32
# the end of the nonce of a server that was asked for an older version than its newest
OLDER_THAN_NEWEST: Final = b"\0OLDER\r\n"
FRAME_BYTES_MAX: Final = 4096  # of a peer that has proved nothing yet
SERVER_OF: Final = {
    "worker": "coordinator",
    "observer": "coordinator",
    "reader": "owner",
}  # by the client's role

PeerHello = TypeVar("PeerHello", ClientHello, ServerHello)


def proof(
    secret: bytes, side: str, client: ClientHello, server: ServerHello, binding: bytes = b""
) -> bytes:
    """The mac by which `side` ("client" or "server") shows, after these hellos, that it knows
    `secret`.
    """
    return _derived(secret, side, client, server, binding)


def frame_key(
    secret: bytes, side: str, client: ClientHello, server: ServerHello, binding: bytes = b""
) -> bytes:
    """The key of the frames that `side` ("client" or "server") sends after this handshake; 32
    bytes.
    """
    return _derived(secret, f"frames of the {side}", client, server, binding)


def _derived(
    secret: bytes, what: str, client: ClientHello, server: ServerHello, binding: bytes
) -> bytes:
    """32 bytes for this use after these hellos. Only a peer that knows `secret` can make them."""
    return hmac.digest(
        secret,
        _fields(f"tensorhub/1 {what}".encode())
        + _transcript(client, server)
        + (_fields(binding) if binding else b""),
        hashlib.sha256,
    )


@functools.lru_cache(16)  # two proofs and two keys are made after each pair of hellos
def _transcript(client: ClientHello, server: ServerHello) -> bytes:
    return b"".join(
        _fields(
            hello.protocol.to_bytes(8, "big"),
            hello.role.encode(),
            hello.incarnation.encode(),
            hello.nonce,
        )
        for hello in (client, server)
    )


def _fields(*fields: bytes) -> bytes:
    return b"".join([len(field).to_bytes(4, "big") + field for field in fields])


class Handshake(abc.ABC, Generic[PeerHello]):
    """What both sides share: bytes in, bytes out, and the peer's hello once it is `done`."""

    def __init__(self, role: str, incarnation: str, nonce: bytes) -> None:
        self.role = role
        self.incarnation = incarnation
        self.version = PROTOCOL_VERSION  # that is spoken; of a server, once the preface has come
        self.done = False  # True once each side has proved itself to the other
        self._nonce = nonce
        # the peer's hello, from its arrival on; nothing vouches for it until `done`
        self._peer: PeerHello | None = None
        self._preface = bytearray()  # the arrived part of the peer's preface
        self._decoder = FrameDecoder(FRAME_BYTES_MAX)
        self._outgoing = bytearray()  # what `data_to_send` gives next
        self._error: TensorHubError | None = None  # what the handshake failed with
        # of the TLS connection that carries it (`Tls.binding`): set it before any byte is received
        self.binding = b""
        self._frame_keys = (b"", b"")  # of what this side sends, and receives; once `done`

    def __repr__(self) -> str:
        state = "done" if self.done else "failed" if self._error else "in progress"
        return f"<{type(self).__name__} as {self.role} {self.incarnation}: {state}>"

    @property
    def peer(self) -> PeerHello:
        """The hello of the peer, which has proved itself; RuntimeError before `done`."""
        if not self.done or self._peer is None:
            raise RuntimeError("the peer has not proved itself yet")
        return self._peer

    @property
    def frame_keys(self) -> tuple[bytes, bytes]:
        """Of the frames that this side sends from now on, and of those that it receives;
        RuntimeError before `done`.
        """
        if not self.done:
            raise RuntimeError("the peer has not proved itself yet")
        return self._frame_keys

    @property
    def has_heard(self) -> bool:
        """Whether the peer has said anything yet."""
        return bool(self._preface)

    @property
    def bytes_wanted(self) -> int:
        """How many bytes to receive next without taking any that lie beyond the handshake; 0 when
        `done`.
        """
        if self.done:
            return 0
        return PREFACE_BYTES - len(self._preface) or self._decoder.bytes_wanted

    @property
    def _relayed(self) -> str:
        """What else may be the cause if the proofs differ."""
        return "; or a relay with another certificate is between them" if self.binding else ""

    def data_to_send(self) -> bytes:
        """What to send to the peer now; each byte is given once."""
        data = bytes(self._outgoing)
        self._outgoing.clear()
        return data

    def take_rest(self) -> bytes:
        """The bytes received that lie beyond the handshake: they belong to the connection's first
        frames.
        """
        return self._decoder.take_rest()

    def receive_data(self, data: bytes) -> None:
        """Take received bytes. Raises ProtocolError or AuthenticationFailed; further calls raise it
        again.
        """
        self._raise_again()
        try:
            self._advance(data)
        except TensorHubError as error:
            self._error = copy(error)
            raise

    def receive_eof(self) -> None:
        """The peer closed, or the connection broke: raise what that means, unless the handshake is
        done.
        """
        if self._error is None and not self.done:
            self._error = self._closed()
        self._raise_again()

    def _raise_again(self) -> None:
        if self._error is not None:
            # its traceback holds frames that hold this object, and all that their callers have
            raise copy(self._error)

    def _advance(self, data: bytes) -> None:
        if not self.done and len(self._preface) < PREFACE_BYTES:
            missing = PREFACE_BYTES - len(self._preface)
            self._preface += data[:missing]
            data = data[missing:]
            self._check_preface(bytes(self._preface) + data[:16])
        self._decoder.receive_data(data)
        while not self.done:
            body = self._decoder.next_frame()
            if body is None:
                return
            self._receive_frame(body)

    def _check_hello(self, hello: PeerHello) -> None:
        if hello.protocol != self.version:
            raise ProtocolError(
                f"the peer's hello says version {hello.protocol}, its preface {self.version}"
            )
        if len(hello.nonce) != NONCE_BYTES:
            raise ProtocolError(
                f"the peer's nonce has {len(hello.nonce)} bytes instead of {NONCE_BYTES}"
            )

    def _send(self, message: ClientHello | ServerHello | Proof) -> None:
        body = codec.written_for(self.version).encode(message)
        self._outgoing += frame(body, FRAME_BYTES_MAX)

    @abc.abstractmethod
    def _check_preface(self, start: bytes) -> None: ...

    @abc.abstractmethod
    def _receive_frame(self, body: bytes) -> None: ...

    @abc.abstractmethod
    def _closed(self) -> TensorHubError: ...


class ClientHandshake(Handshake[ServerHello]):
    """The connecting side: a "worker", "observer" or "reader". `expected_incarnation`: refuse a
    server of another incarnation. `version`: to propose.

    After a WrongVersion: `older`, the version to connect again with; None: there is none.
    """

    def __init__(
        self,
        role: str,
        incarnation: str,
        secret: bytes,
        nonce: bytes,
        *,
        expected_incarnation: str | None = None,
        version: int = PROTOCOL_VERSION,
    ) -> None:
        super().__init__(role, incarnation, nonce)
        self.version = version
        self.older: int | None = None
        self._secret = Secret(secret)
        self._expected_incarnation = expected_incarnation
        self._hello = ClientHello(version, role, incarnation, nonce)
        self._outgoing += preface(version)
        self._send(self._hello)

    def _check_preface(self, start: bytes) -> None:
        theirs = check_preface(start)
        if theirs is not None and theirs != self.version:
            self.older = theirs if theirs < self.version else None
            raise WrongVersion(
                f"the peer answers in version {theirs} of the protocol, and this side has proposed "
                f"version {self.version}",
                retryable=True,
            )

    def _receive_frame(self, body: bytes) -> None:
        if self._peer is None:
            hello = codec.decode(body, codec.SERVER_HELLO)
            self._check_hello(hello)
            self._peer = hello
            mac = proof(self._secret, "client", self._hello, hello, self.binding)
            self._send(Proof(mac))
            return
        mac = codec.decode(body, codec.PROOF).mac
        if not mac:
            raise self._secrets_differ("refused this side")
        hellos = self._hello, self._peer
        if not hmac.compare_digest(mac, proof(self._secret, "server", *hellos, self.binding)):
            raise self._secrets_differ("did not prove itself")
        mine, theirs = (
            frame_key(self._secret, side, *hellos, self.binding) for side in ("client", "server")
        )
        self._frame_keys, self.done = (mine, theirs), True

    def _check_hello(self, hello: ServerHello) -> None:
        super()._check_hello(hello)
        if self.version < PROTOCOL_VERSION and hello.nonce.endswith(OLDER_THAN_NEWEST):
            raise ProtocolError(
                f"the {hello.role[:32]} speaks a newer version of the protocol than {self.version} "
                f"as well, in which it has refused this side before: it was upgraded in between, "
                f"or a relay has changed what was said (SECURITY.md)",
                retryable=True,
            )
        if hello.role != SERVER_OF[self.role]:
            raise ProtocolError(
                f"a {self.role} connects to a server of the role {SERVER_OF[self.role]!r}, and "
                f"this one is "
                f"{hello.role[:32]!r}: check the address"
            )
        if self._expected_incarnation not in (None, hello.incarnation):
            raise ProtocolError(
                f"the address belongs to another worker now ({hello.incarnation!r}, not "
                f"{self._expected_incarnation!r}): ask the coordinator for another source",
                retryable=True,
            )

    def _closed(self) -> TensorHubError:
        # A server that does not accept this side's secret says so. (If its answer was lost, the
        # next attempt finds out.)
        text = (
            f"the {SERVER_OF[self.role]} closed the connection during the handshake: it has no "
            f"room just now, or is ending"
        )
        return ProtocolError(text, retryable=True)

    def _secrets_differ(self, what: str) -> AuthenticationFailed:
        role = SERVER_OF[self.role]
        have = ("a token", "another one, or none") if self._secret else ("no token", "one")
        return AuthenticationFailed(
            f"the {role} {what}: this {self.role} has {have[0]}, and the {role} has {have[1]}. Set "
            f"the same {TOKEN_VARIABLE} (or token file) on both sides{self._relayed}"
        )


class ServerHandshake(Handshake[ClientHello]):
    """The listening side: a "coordinator" or an "owner". `secrets`: each is accepted, for a change
    of secrets without a stop, and so is the read-only secret that belongs to it; b"" is open
    access, and has none.

    Once `done`: `secret`, the accepted secret that the client knows, or to which its read-only
    secret belongs; `read_only`.
    """

    def __init__(self, role: str, incarnation: str, secrets: Sequence[bytes], nonce: bytes) -> None:
        super().__init__(role, incarnation, nonce)
        self.secret = Secret()
        self.read_only = False
        self._secrets = tuple(Secret(secret) for secret in secrets)
        self._hello: ServerHello

    @property
    def client_incarnation(self) -> str:
        """The client's incarnation. A read-only client's is derived from its claim. So it is never
        taken for a worker with more rights. RuntimeError before `done`.
        """
        claimed = self.peer.incarnation
        return (
            f"{READ_ONLY}{hashlib.blake2b(claimed.encode(), digest_size=16).hexdigest()}"
            if self.read_only
            else claimed
        )

    def _check_preface(self, start: bytes) -> None:
        try:
            version = check_preface(start)
        except (WrongVersion, SpeaksTls):
            # so that the client may connect again, in that version, or without TLS
            self._outgoing += PREFACE
            raise
        if version is not None:
            nonce = self._nonce
            if version < VERSIONS[-1]:
                nonce = nonce[: -len(OLDER_THAN_NEWEST)] + OLDER_THAN_NEWEST
            self.version = version
            self._hello = ServerHello(version, self.role, self.incarnation, nonce)
            self._outgoing += preface(version)

    def _receive_frame(self, body: bytes) -> None:
        if self._peer is None:
            hello = codec.decode(body, codec.CLIENT_HELLO)
            self._check_hello(hello)
            if hello.newlines != NEWLINES:
                raise ProtocolError("the peer's hello has something else in place of its newlines")
            self._send(self._hello)
            if SERVER_OF.get(hello.role) != self.role:
                raise ProtocolError(
                    f"a {hello.role[:32]!r} has no business with the {self.role} at this address"
                )
            self._peer = hello
            return
        mac = codec.decode(body, codec.PROOF).mac
        hellos = self._peer, self._hello
        found: Secret | None = None  # what the client has proved to know
        for secret in self._secrets:  # all of them, so that time does not tell which one it was
            for known in (secret, read_only_secret(secret)) if secret else (secret,):
                fits, lesser = (
                    hmac.compare_digest(mac, proof(known, "client", *hellos, self.binding)),
                    known is not secret,
                )
                # a secret that is both, by mistake, is read-only
                if fits and (found is None or lesser):
                    found, self.secret, self.read_only = known, secret, lesser
        if found is None:
            self._send(Proof(b""))
            raise AuthenticationFailed(
                f"the {self._peer.role} {self._peer.incarnation!r} did not prove that it knows the "
                f"secret of this {self.role}: set the same {TOKEN_VARIABLE} (or token file) on "
                f"both sides{self._relayed}"
            )
        self._send(Proof(proof(found, "server", *hellos, self.binding)))
        theirs, mine = (
            frame_key(found, side, *hellos, self.binding) for side in ("client", "server")
        )
        self._frame_keys, self.done = (mine, theirs), True

    def _closed(self) -> TensorHubError:
        return ProtocolError(
            "the client closed the connection during the handshake", retryable=True
        )
