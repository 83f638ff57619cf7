"""TLS 1.3 of one connection: mutual, and without I/O of its own.

Responsible for the handshake, for sealing and opening bytes, for the hashes of both certificates,
and for errors that say which side is to change what. Not responsible for files (`certificates`),
sockets, nor deadlines.

OpenSSL's objects are not for two threads at a time, and CPython calls OpenSSL without the GIL. A
data connection has a thread that receives, and others that send. So OpenSSL reads and writes
memory here, never a socket: its calls do not wait, and one lock guards them.

A client sends its last bytes of the handshake together with its first message: a server that
refuses the client's certificate has read everything then, and the client gets the reason instead
of a reset.
"""

from __future__ import annotations

import hashlib
import ssl
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from itertools import accumulate, takewhile
from typing import Final

from tensorhub.errors import AuthenticationFailed, ProtocolError, TensorHubError
from tensorhub.protocol.certificates import ADVICE, Certificates, Use
from tensorhub.protocol.frames import READ_BYTES_MAX, TLS_STARTS

SEALED_BYTES_MAX: Final = 2**18  # at a time: longer calls save nothing
RECORD_BYTES: Final = 2**14  # of one TLS record
# that a peer may send without content, or be owed in answer: handshakes have some kilobytes
EMPTY_BYTES_MAX: Final = 2**15
_REFUSAL: Final = bytes([0x15, 3, 3, 0, 2, 2, 10])  # an alert, which a peer without TLS is told
_HOST_ERRORS: Final = (62, 64)  # X509_V_ERR_HOSTNAME_MISMATCH, ..._IP_ADDRESS_MISMATCH
_CERTIFICATE_ADVICE: Final = {
    9: "compare the clocks of both machines",  # not valid yet
    10: "renew it: its files are read again without a restart",
    26: "it needs the extended key usages serverAuth and clientAuth",
}


class Tls:
    """TLS of one connection; for several threads. `is_open` once the handshake is over."""

    def __init__(
        self, certificates: Certificates, use: Use, *, peer: str, host: str | None = None
    ) -> None:
        """`peer`: what it is, for errors. `host`: the name or address that a coordinator's
        certificate must have.
        """
        context, self._own_hash = certificates.context(use)
        self.is_open = False
        # True once the peer has said that nothing follows
        self.has_ended = False
        # the SHA-256 of the client's certificate and of the server's, once `is_open`
        self.binding = b""
        self._files = certificates.tls
        self._peer = peer
        self._host = host
        self._is_server = use in ("server", "http")
        self._lock = threading.Lock()  # guards what follows
        self._has_heard = False
        self._empty_bytes = 0  # that have arrived since the last content
        self._incoming, self._outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
        self._ssl = context.wrap_bio(
            self._incoming, self._outgoing, server_side=self._is_server, server_hostname=host
        )
        # by the one thread that sends: what `send` has not got rid of yet, and the bytes in there
        # that it has not counted yet
        self._sealed, self._unsaid = memoryview(b""), 0

    def __repr__(self) -> str:
        return f"<Tls with the {self._peer}: {'open' if self.is_open else 'in its handshake'}>"

    @property
    def has_unread(self) -> bool:
        """Whether bytes have arrived that `read` has not given yet."""
        with self._lock:
            return bool(self._ssl.pending() or self._incoming.pending)

    # -- handshake

    def handshake(self, data: bytes | memoryview = b"") -> None:
        """Go on, with these bytes of the peer; then send `data_to_send`, also after an error.
        Raises AuthenticationFailed, ProtocolError.
        """
        self.receive_data(data)
        try:
            self._ssl.do_handshake()
        except ssl.SSLWantReadError:
            self._check_emptiness()
            return
        except ssl.SSLError as error:
            raise self._error(error) from error
        hashes = self._own_hash, hashlib.sha256(self._ssl.getpeercert(True) or b"").digest()
        self.binding = b"".join(reversed(hashes) if self._is_server else hashes)
        self.is_open = True

    def receive_eof(self) -> TensorHubError:
        """What it means that the connection has ended within the handshake."""
        text = f"the {self._peer} closed the connection during the TLS handshake"
        why = "" if self._is_server else ": it has no room just now, is ending, or speaks no TLS"
        return ProtocolError(text + why, retryable=True)

    def data_to_send(self) -> bytes:
        """What to send to the peer now; each byte is given once."""
        with self._lock:
            return self._outgoing.read()

    # -- bytes

    def receive_data(self, data: bytes | memoryview) -> None:
        """Take what has arrived. ProtocolError: the peer speaks no TLS."""
        if data and not self._has_heard:
            self._has_heard = True
            if bytes(data[:1]) not in TLS_STARTS:
                raise self._without_tls()
        with self._lock:
            self._empty_bytes += len(data)
            self._incoming.write(data)

    def read(self, bytes_max: int = READ_BYTES_MAX) -> bytes:
        """The next bytes of those that have arrived whole; none: `has_ended`, or more must arrive
        first.
        """
        with self._lock:  # (a part of a record may lie in OpenSSL's own buffer)
            most = self._ssl.pending() + self._incoming.pending + RECORD_BYTES
        room = memoryview(bytearray(min(bytes_max, most)))
        return bytes(room[: self.read_into([room])])

    def read_into(self, buffers: Sequence[memoryview]) -> int:
        """Fill buffers with what has arrived whole. Returns how many bytes that is."""
        total = 0
        with self._lock:
            try:
                for buffer in buffers:
                    at, size = 0, buffer.nbytes
                    while at < size:
                        count = self._ssl.read(size - at, buffer[at:])
                        if not count:
                            self.has_ended = True
                            return total
                        at += int(count)
                        total += int(count)
            except ssl.SSLWantReadError:
                pass
            except ssl.SSLError as error:
                raise self._error(error) from error
            if total:
                self._empty_bytes = 0
            self._check_emptiness()
        return total

    def seal(self, data: bytes | memoryview) -> bytes:
        """What to send in place of this."""
        with self._lock:
            self._ssl.write(data)
            return self._outgoing.read()

    def send(self, give: Callable[[memoryview], int], buffers: Sequence[memoryview]) -> int:
        """Seal some bytes of these buffers, or what is left of the last call, and have `give`, a
        socket's `send`, take it. Returns how many bytes of the buffers count as sent, perhaps 0;
        the next call is to have the rest. Raises what `give` raises.
        """
        if not self._sealed:
            data = _next_bytes(buffers)
            self._sealed, self._unsaid = memoryview(self.seal(data)), data.nbytes
        self._sealed = self._sealed[(taken := give(self._sealed)) :]
        # the last byte counts when all is taken
        said = min(taken, self._unsaid - 1) if self._sealed else self._unsaid
        self._unsaid -= said
        return said

    def close(self) -> bytes:
        """What to send last, so that the peer knows that this is the end."""
        with self._lock:
            with suppress(ssl.SSLError):
                self._ssl.unwrap()
            return self._outgoing.read()

    # -- errors

    def _check_emptiness(self) -> None:
        """An endless handshake would take memory, and so would answers to changes of keys; records
        without content would also keep a reader from its deadline.
        """
        if max(self._empty_bytes, self._outgoing.pending) > EMPTY_BYTES_MAX:
            raise ProtocolError(
                f"TLS with the {self._peer} has failed: it sent more than {EMPTY_BYTES_MAX} bytes "
                f"without content"
            )

    def _without_tls(self) -> TensorHubError:
        if self._is_server:
            self._outgoing.write(_REFUSAL)
        return ProtocolError(f"the {self._peer} speaks no TLS, and this side does: {ADVICE}")

    def _error(self, error: ssl.SSLError) -> TensorHubError:
        reason = str(error.reason or error)
        words = reason.replace("_", " ").lower()
        if isinstance(error, ssl.SSLCertVerificationError):
            code = error.verify_code
            if code in _HOST_ERRORS:
                advice = f"connect by a name that it has, or have it issued for {self._host!r}, too"
            else:
                advice = _CERTIFICATE_ADVICE.get(
                    code, f"an authority in {self._files.ca} must have signed it"
                )
            return AuthenticationFailed(
                f"the certificate of the {self._peer} is not accepted: {error.verify_message}; "
                f"{advice}"
            )
        if reason == "PEER_DID_NOT_RETURN_A_CERTIFICATE":
            return AuthenticationFailed(f"the {self._peer} has no certificate: give it one")
        if "ALERT" in reason and ("CERTIFICATE" in reason or "CA" in reason.split("_")):
            return AuthenticationFailed(
                f"the {self._peer} does not accept this side's certificate {self._files.cert} "
                f"({words}): compare it with the authorities there, and renew it if it is expired"
            )
        return ProtocolError(f"TLS with the {self._peer} has failed: {words}")


def _next_bytes(buffers: Sequence[memoryview]) -> memoryview:
    """The next bytes to seal. Small buffers are copied together, so that their records are
    large.
    """
    first = buffers[0]
    if first.nbytes < RECORD_BYTES:
        ends = takewhile(lambda end: end < SEALED_BYTES_MAX, accumulate(b.nbytes for b in buffers))
        first = memoryview(b"".join(buffers[: 1 + len(list(ends))]))
    return first[:SEALED_BYTES_MAX]
