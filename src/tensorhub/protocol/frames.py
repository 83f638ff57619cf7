"""The preface of a connection, and the frames that follow it; no I/O.

Responsible for cutting a stream of bytes into bodies, whichever way the stream arrives in pieces, and for
refusing what is not a TensorHub peer, another version, an oversized frame and a truncated one: always
`ProtocolError`, and before anything is allocated for the length that a peer claims. Not responsible for
what a body says.

    preface   "TENSRHUB"  u16 version                 once, from each side, before anything else
    frame     u32 length  body of so many bytes       numbers are big-endian
"""

from __future__ import annotations

from typing import Final

from tensorhub.errors import ProtocolError
from tensorhub.messages import PROTOCOL_VERSION

MAGIC: Final = b"TENSRHUB"
PREFACE: Final = MAGIC + PROTOCOL_VERSION.to_bytes(2, "big")
HEADER_BYTES: Final = 4
READ_BYTES_MAX: Final = 64 * 2**10  # what a driver reads at a time where it may read ahead


class WrongVersion(ProtocolError):
    """The peer is a TensorHub peer, of another version of the protocol."""


def check_preface(data: bytes) -> None:
    """Check the first bytes of a connection, as many as there are; of ten or more, the first ten are the
    preface.

    Raises ProtocolError if no TensorHub peer begins like that, WrongVersion if one of another version does.
    """
    magic, version = data[: len(MAGIC)], data[len(MAGIC) : len(PREFACE)]
    if not MAGIC.startswith(magic):
        raise ProtocolError(f"not a TensorHub peer: its first bytes are {bytes(data[:16])!r}; check the address")
    if len(version) == 2 and version != PREFACE[len(MAGIC) :]:
        theirs = int.from_bytes(version, "big")
        older = "peer" if theirs < PROTOCOL_VERSION else "TensorHub on this side"
        raise WrongVersion(
            f"the peer speaks version {theirs} of the protocol, this side version {PROTOCOL_VERSION}: "
            f"upgrade the {older}, which is the older one"
        )


def header(body_bytes: int, frame_bytes_max: int) -> bytes:
    """The header of a frame around a body of so many bytes; ProtocolError if the peer would refuse it."""
    if not 0 < body_bytes <= frame_bytes_max:
        raise ProtocolError(
            f"a frame of {body_bytes} bytes cannot be sent, the most is {frame_bytes_max}; "
            "raise Options.frame_bytes_max on every side if it is meant to be that large"
        )
    return body_bytes.to_bytes(HEADER_BYTES, "big")


def frame(body: bytes, frame_bytes_max: int) -> bytes:
    """A body with its header; ProtocolError if the peer would refuse it."""
    return header(len(body), frame_bytes_max) + body


class FrameDecoder:
    """Cuts received bytes into the bodies of frames.

    Feed it with `receive_data`, then take frames with `next_frame` until it gives None. It never holds more
    than one frame of the largest size and the bytes of one `receive_data`. After it raised, every further
    call raises the same.
    """

    __slots__ = ("_buffer", "_error", "frame_bytes_max")

    def __init__(self, frame_bytes_max: int) -> None:
        self.frame_bytes_max = frame_bytes_max
        self._buffer = bytearray()  # what was received and not taken yet; begins at a frame's header
        self._error: ProtocolError | None = None

    def __repr__(self) -> str:
        return f"<FrameDecoder: {len(self._buffer)} bytes held, frames of at most {self.frame_bytes_max}>"

    def receive_data(self, data: bytes) -> None:
        """Take what arrived. Raises ProtocolError if frames pile up that nobody takes."""
        if len(self._buffer) > HEADER_BYTES + self.frame_bytes_max:
            self._fail("more bytes than one frame are waiting to be taken")
        self._raise_again()
        self._buffer += data

    def next_frame(self) -> bytes | None:
        """The body of the next frame, None while it is incomplete; ProtocolError if its length is refused."""
        self._raise_again()
        size = self._size()
        if size is None or len(self._buffer) < HEADER_BYTES + size:
            return None
        with memoryview(self._buffer) as view:
            body = bytes(view[HEADER_BYTES : HEADER_BYTES + size])
        del self._buffer[: HEADER_BYTES + size]
        return body

    @property
    def is_inside_frame(self) -> bool:
        """Whether bytes are held that no frame was made of."""
        return bool(self._buffer)

    @property
    def bytes_wanted(self) -> int:
        """How many bytes to receive next without a chance of taking any that lie beyond the next frame.

        Raises ProtocolError if the next frame's length is refused.
        """
        self._raise_again()
        size = self._size()
        whole = HEADER_BYTES if size is None else HEADER_BYTES + size
        return max(0, whole - len(self._buffer))

    def receive_eof(self) -> None:
        """The stream ended: ProtocolError if it did so inside a frame."""
        self._raise_again()
        if self._buffer:
            self._fail(f"the connection ended inside a frame, after {len(self._buffer)} bytes of it")
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
            self._fail(f"a frame of {size} bytes is refused, frames here have 1 to {self.frame_bytes_max}")
            self._raise_again()
        return size

    def _fail(self, reason: str) -> None:
        self._error = ProtocolError(reason)
        self._buffer.clear()

    def _raise_again(self) -> None:
        if self._error is not None:
            raise self._error
