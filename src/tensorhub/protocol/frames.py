"""The preface of a connection, and the frames that follow it; no I/O.

Responsible for cutting a stream of bytes into bodies, whichever way the stream arrives in pieces,
and for refusing another protocol, another version, an oversized frame, a truncated frame, and a
frame that is not the peer's next: always `ProtocolError`, and before anything is allocated for the
length that a peer claims. Not responsible for the contents of a body, nor for payload that follows
a frame.

    preface   "TENSRHUB"  u16 version                           once, from each side, before anything else;
                                                                the server's is the answer to the client's
    frame     u32 length  body of so many bytes                 in the handshake; numbers are big-endian
    frame     u32 length  body of so many bytes  mac (16)       after it

A mac is keyed BLAKE2b over the frame's number (u64, from 0; it is not sent), its length and its
body, under a key that one direction of one connection has. So only the peer's next frame is
accepted, and no frame that an attacker made, changed, kept back, sent twice, in another order, back
to its sender, or on another connection.
"""  # noqa: E501 - a table

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Sequence
from copy import copy
from typing import Final

from tensorhub.errors import ProtocolError
from tensorhub.messages import PROTOCOL_VERSION, VERSIONS
from tensorhub.protocol.certificates import ADVICE

MAGIC: Final = b"TENSRHUB"
VERSION_BYTES: Final = 2
PREFACE_BYTES: Final = len(MAGIC) + VERSION_BYTES
HEADER_BYTES: Final = 4
MAC_BYTES: Final = 16
_NOT_AUTHENTIC: Final = (
    "what came is not the next frame that this peer sent: on the way, a relay without the token "
    "(or a defect) has changed, "
    "kept back, repeated or put in a frame; see SECURITY.md"
)
TLS_STARTS: Final = (b"\x16", b"\x15")  # a record with a handshake, or with an alert
READ_BYTES_MAX: Final = 64 * 2**10  # what a driver reads at a time where it may read ahead


class WrongVersion(ProtocolError):
    """The peer is a TensorHub peer, of another version of the protocol than was expected."""


class SpeaksTls(ProtocolError):
    """The peer begins with TLS, which this side does not expect."""


class NotAuthentic(ProtocolError):
    """The received bytes are not the peer's next frame: there is an attacker, or a defect, between
    the peers.
    """


def preface(version: int) -> bytes:
    """The first bytes of a side that speaks this version."""
    return MAGIC + version.to_bytes(VERSION_BYTES, "big")


PREFACE: Final = preface(PROTOCOL_VERSION)


def check_preface(data: bytes, versions: Sequence[int] = VERSIONS) -> int | None:
    """Check the first bytes of a connection, as many as there are; of ten or more, the first ten
    are the preface. Returns its version, None while it has not come whole.

    Raises ProtocolError if no TensorHub peer begins like that, WrongVersion if one of a version
    that is none of these does, SpeaksTls if one with TLS does.
    """
    if data[:1] in TLS_STARTS:
        raise SpeaksTls(f"the peer speaks TLS, and this side does not: {ADVICE}")
    magic, version = data[: len(MAGIC)], data[len(MAGIC) : PREFACE_BYTES]
    if not MAGIC.startswith(magic):
        raise ProtocolError(
            f"not a TensorHub peer: its first bytes are {bytes(data[:16])!r}; check the address"
        )
    if len(version) < VERSION_BYTES:
        return None
    theirs = int.from_bytes(version, "big")
    if theirs not in versions:
        older = "peer" if theirs < versions[0] else "TensorHub on this side"
        raise WrongVersion(
            f"the peer speaks version {theirs} of the protocol, this side "
            f"{' or '.join(map(str, versions))}: upgrade the {older}, which is the older one"
        )
    return theirs


class FrameMac:
    """The macs of one direction's frames, in order."""

    __slots__ = ("_keyed", "_number")

    def __init__(self, key: bytes) -> None:
        self._keyed = hashlib.blake2b(key=key, digest_size=MAC_BYTES)
        self._number = 0  # of the next frame

    def __repr__(self) -> str:
        return f"<FrameMac of frame {self._number}>"

    def next(self, *parts: bytes | memoryview) -> bytes:
        """The mac of the next frame, with these parts as its header and body."""
        mac = self._keyed.copy()
        mac.update(self._number.to_bytes(8, "big"))
        for part in parts:
            mac.update(part)
        self._number += 1
        return mac.digest()


class FrameEncoder:
    """Makes frames of bodies, in order. ProtocolError for a body that the peer would refuse."""

    __slots__ = ("_frame_bytes_max", "_mac")

    def __init__(self, frame_bytes_max: int) -> None:
        self._frame_bytes_max = frame_bytes_max
        self._mac: FrameMac | None = None

    def __repr__(self) -> str:
        return f"<FrameEncoder of at most {self._frame_bytes_max} bytes, {self._mac!r}>"

    def authenticate(self, key: bytes) -> None:
        """The handshake is over: from now on frames carry macs under this key."""
        self._mac = FrameMac(key)

    def frames(self, *bodies: bytes) -> bytes:
        """The frames that are sent next. If one of them cannot be sent, none is."""
        heads = [_header(len(body), self._frame_bytes_max) for body in bodies]
        pairs = zip(heads, bodies, strict=True)
        if self._mac is None:
            return b"".join([part for pair in pairs for part in pair])
        mac = self._mac
        return b"".join(
            [part for head, body in pairs for part in (head, body, mac.next(head, body))]
        )


def _header(body_bytes: int, frame_bytes_max: int) -> bytes:
    if not 0 < body_bytes <= frame_bytes_max:
        raise ProtocolError(
            f"a frame of {body_bytes} bytes cannot be sent, the most is {frame_bytes_max}; "
            "raise Options.frame_bytes_max on every side if it is meant to be that large"
        )
    return body_bytes.to_bytes(HEADER_BYTES, "big")


def frame(body: bytes, frame_bytes_max: int) -> bytes:
    """A frame of the handshake; ProtocolError if the peer would refuse it."""
    return FrameEncoder(frame_bytes_max).frames(body)


class FrameDecoder:
    """Cuts received bytes into the bodies of frames, and checks their macs once they have some.

    Feed it with `receive_data`, then take frames with `next_frame` until it gives None. It never
    holds more than one frame of the largest size and the bytes of one `receive_data`. After it
    raised, every further call raises that error again.
    """

    __slots__ = ("_around", "_buffer", "_error", "_mac", "frame_bytes_max")

    def __init__(self, frame_bytes_max: int) -> None:
        self.frame_bytes_max = frame_bytes_max
        self._mac: FrameMac | None = None
        self._around = HEADER_BYTES  # bytes of a frame that are not its body
        # received bytes that are not taken yet; begins at a frame's header
        self._buffer = bytearray()
        self._error: ProtocolError | None = None

    def __repr__(self) -> str:
        return (
            f"<FrameDecoder: {len(self._buffer)} bytes held, frames of at most "
            f"{self.frame_bytes_max}>"
        )

    def authenticate(self, key: bytes) -> None:
        """The handshake is over: from now on frames must have macs under this key."""
        self._mac, self._around = FrameMac(key), HEADER_BYTES + MAC_BYTES

    def receive_data(self, data: bytes) -> None:
        """Take received bytes. Raises ProtocolError if frames pile up because `next_frame` is not
        called.
        """
        if len(self._buffer) > self._around + self.frame_bytes_max:
            self._fail(ProtocolError("more bytes than one frame are waiting to be taken"))
        self._raise_again()
        self._buffer += data

    def next_frame(self) -> bytes | None:
        """The body of the next frame, None while it is incomplete. ProtocolError if its length is
        refused, NotAuthentic.
        """
        if not self._buffer and self._error is None:
            return None
        self._raise_again()
        size = self._size()
        if size is None or len(self._buffer) < (whole := self._around + size):
            return None
        end = HEADER_BYTES + size
        with memoryview(self._buffer) as view:
            body = bytes(view[HEADER_BYTES:end])
            is_authentic = self._mac is None or hmac.compare_digest(
                self._mac.next(view[:end]), view[end:whole]
            )
        if not is_authentic:
            self._fail(NotAuthentic(_NOT_AUTHENTIC))
            self._raise_again()
        del self._buffer[:whole]
        return body

    @property
    def is_inside_frame(self) -> bool:
        """Whether bytes are held that no frame was made of."""
        return bool(self._buffer)

    @property
    def bytes_announced(self) -> int:
        """The length of the next frame's body; 0 while its header is incomplete, ProtocolError if
        it is refused.
        """
        self._raise_again()
        return self._size() or 0

    @property
    def bytes_wanted(self) -> int:
        """How many bytes to receive next without a chance of taking any that lie beyond the next
        frame.

        Raises ProtocolError if the next frame's length is refused.
        """
        self._raise_again()
        size = self._size()
        whole = HEADER_BYTES if size is None else self._around + size
        return max(0, whole - len(self._buffer))

    def receive_eof(self) -> None:
        """The stream ended: ProtocolError if it did so inside a frame."""
        self._raise_again()
        if self._buffer:
            self._fail(
                ProtocolError(
                    f"the connection ended inside a frame, after {len(self._buffer)} bytes of it"
                )
            )
            self._raise_again()

    def take_rest(self) -> bytes:
        """All bytes received that no frame was made of; the decoder is empty then."""
        rest = bytes(self._buffer)
        self._buffer.clear()
        return rest

    def _size(self) -> int | None:
        """The length of the next frame's body, None while its header is incomplete."""
        if len(self._buffer) < HEADER_BYTES:
            return None
        size = int.from_bytes(self._buffer[:HEADER_BYTES], "big")
        if not 0 < size <= self.frame_bytes_max:
            self._fail(
                ProtocolError(
                    f"a frame of {size} bytes is refused, frames here have 1 to "
                    f"{self.frame_bytes_max}"
                )
            )
            self._raise_again()
        return size

    def _fail(self, error: ProtocolError) -> None:
        self._error = error
        self._buffer.clear()

    def _raise_again(self) -> None:
        if self._error is not None:
            # its traceback holds frames that hold this object, and all that their callers have
            raise copy(self._error)
