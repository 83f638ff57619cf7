"""A reader's requests to one owner, over the two workers' own connection, whichever way the bytes
then take; and the common base of transports that have such a connection.

Responsible for asking under the read right, for checking that the owner answers what it was asked,
and for naming failures. Several threads may ask at a time while one listens. Not responsible for
the connection's life (`peers`), nor for bytes, digests or books.
"""

from __future__ import annotations

import threading
from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, TypeVar

from tensorhub.errors import AuthenticationFailed, OperationTimeout, ProtocolError
from tensorhub.layouts.reading import Selection
from tensorhub.logs import Tally, get_logger
from tensorhub.messages import (
    TRANSPORT_BYTES_MAX,
    DoneReading,
    FromOwner,
    Locate,
    NotThisWay,
    Read,
    ReadRefused,
    Select,
    Selected,
    StillWaiting,
)
from tensorhub.protocol.codec import FROM_OWNER
from tensorhub.protocol.frames import NotAuthentic
from tensorhub.protocol.lost import ConnectionLost
from tensorhub.transport.base import (
    Channel,
    Cutter,
    Destination,
    Lacking,
    NotShared,
    ReadFailure,
    ReadRight,
    Transport,
    Unusable,
)
from tensorhub.transport.dialect import Dialect, Find
from tensorhub.transport.peers import KEPT_S, Kept, Peer, Peers
from tensorhub.transport.registry import Local
from tensorhub.types import Endpoint

RESTARTS_MAX = 8  # of saying one selection

R = TypeVar("R")

_meddled = Tally(get_logger("tensorhub.worker").warning, "frame_not_authentic")


class ReadClient:
    """One reader's requests to one owner, under one right. To be closed, which gives the connection
    back.
    """

    def __init__(self, peers: Peers, peer: Peer, right: ReadRight, cutter: Cutter) -> None:
        self.connection = peer.connection
        self.peer = peer
        self.right = right
        self.cutter = cutter
        self.dialect = peers.dialect
        self._peers = peers
        self._is_closed = False
        self._sending = threading.Lock()  # guards the order of requests
        self._next_request = 0
        # request -> its chunks that were not announced yet; never empty
        self._asked: dict[int, set[int]] = {}

    def failures(self) -> Failures:
        """The context within which the connection is used."""
        return Failures(self.peer)

    def close(self) -> None:
        """Give the connection back. A second call does nothing."""
        if not self._is_closed:
            self._is_closed = True
            self._say_done()
            self._peers.give_back(self.peer, self.cutter, is_answered=self.is_answered)

    def _say_done(self) -> None:
        """So that the owner knows what the read has cost it, although the connection is kept."""
        is_kept = self.is_answered and self.peer.is_sound and not self.cutter.is_cut
        if self._next_request and is_kept:
            with suppress(ReadFailure), self.failures():
                self.connection.send(DoneReading(self._next_request))

    @property
    def is_answered(self) -> bool:
        """Whether nothing is expected from the owner."""
        return not self._asked

    def read(self, chunks: Sequence[int], base: str = "") -> None:
        """Ask for these chunks to be sent; or deltas from that content, which is there in all of
        them.
        """
        self._ask(partial(Read, base=base), chunks)

    def locate(self, chunks: Sequence[int]) -> None:
        """Ask for these chunks to be served as the transport's owner side serves them."""
        self._ask(partial(Locate, transport=self.dialect.transport), chunks)

    def select(self, selection: Selection) -> None:
        """Have the owner know that selection of the right's memory, before its chunks are asked
        for. Raises as `hear`.
        """
        name, blob, right = selection.selection_id, selection.encode(), self.right
        at, restarts = 0, 0
        piece = b""
        with self.failures():
            while True:
                self.connection.send(
                    Select(0, right.registration, right.generation, name, len(blob), at, piece)
                )
                said = self.hear()
                if not isinstance(said, Selected) or said.following > len(blob):
                    raise ProtocolError(f"a Select is answered with {said}")
                if said.following == len(blob):
                    return
                if piece and said.following <= at:  # others have come first, or it lies
                    restarts += 1
                    if restarts > RESTARTS_MAX:
                        raise ReadFailure("refused", "the source does not keep what it is told")
                at = said.following
                piece = blob[at : at + TRANSPORT_BYTES_MAX]

    def ask(self, asked: object, reply: type[R]) -> R:
        """Ask something of the transport's dialect, before chunks are asked for. Raises as `hear`;
        NotShared, Unusable: the owner is not read this way.
        """
        self.say(0, asked)
        with self.failures():
            said = self.hear()
            if not isinstance(said, NotThisWay):
                message = self.dialect.message(said)
                if not isinstance(message, reply):
                    raise ProtocolError(
                        f"a {type(asked).__name__} is answered with {type(message).__name__}"
                    )
                return message
        raise (NotShared if said.is_usual else Unusable)(f"at the source: {said.reason}")

    def find(self, reply: type[R]) -> R:
        """Ask how the right's registration is read this way: see `Find`. Raises as `ask`."""
        return self.ask(Find(self.right.registration, self.right.generation), reply)

    def say(self, request: int, message: object) -> None:
        """Say something of the transport's dialect, about that request."""
        with self._sending, self.failures():
            self.connection.send(self.dialect.request(request, message))

    def _ask(self, kind: Callable[..., Read | Locate], chunks: Sequence[int]) -> None:
        right = self.right
        with self._sending, self.failures():
            request = self._next_request
            self._next_request += 1
            self._asked[request] = set(chunks)
            runs = tuple(runs_of(chunks))
            named = (right.lease, right.registration, right.generation, right.content_id)
            selection = "" if right.selection is None else right.selection.selection_id
            self.connection.send(kind(request, *named, runs, selection=selection))

    def hear(self) -> FromOwner:
        """The owner's next message; call it within `failures`. ReadFailure: "refused" by the owner,
        or "damaged" where it was to be loaded from, or "lost".
        """
        message = self.connection.receive(FROM_OWNER)
        match message:
            case ReadRefused():
                raise ReadFailure("damaged" if message.is_damaged else "refused", message.reason)
            case None:
                raise ReadFailure("lost", "the source closed the connection")
            case _:
                return message

    def announced(self, request: int, chunks: Iterable[int]) -> None:
        """An answer names these chunks. ProtocolError unless each was asked for and not named
        before.
        """
        asked, named = self._asked.get(request, set()), list(chunks)
        arrived = set(named)
        if not arrived or len(arrived) != len(named) or not arrived <= asked:
            raise ProtocolError(
                f"request {request} is answered with chunks that it does not ask for"
            )
        asked -= arrived
        if not asked:
            del self._asked[request]

    def lacking(self, message: StillWaiting) -> Lacking:
        """The request is over. The source lacks the chunks that have not come."""
        chunks, end = self._asked.pop(message.request, None), 0
        if not chunks:
            raise ProtocolError(
                f"request {message.request} is ended, and was not asked, or is over"
            )
        for first, count in message.has:
            if first < end or count < 1:
                raise ProtocolError("what a source has is told in ascending runs")
            end = first + count
        return Lacking(sorted(chunks), message.has)


def runs_of(chunks: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Ascending chunk numbers, one at least, as (first, count) runs."""
    first = previous = chunks[0]
    for chunk in chunks[1:]:
        if chunk != previous + 1:
            yield first, previous - first + 1
            first = chunk
        previous = chunk
    yield first, previous - first + 1


class Failures:
    """Turns a connection's errors into the reason that the coordinator hears, and counts the bytes
    that arrived in vain. After any failure the connection is not used again, because its next bytes
    are unknown. NotShared is none: the source has answered, and the next registration is asked
    about on the same connection.
    """

    def __init__(self, peer: Peer) -> None:
        self._peer = peer

    def __enter__(self) -> None:
        self._before = self._peer.connection.payload_bytes

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if error is not None and not isinstance(error, NotShared):
            self._peer.is_sound = False
        discarded = self._peer.connection.payload_bytes - self._before
        if isinstance(error, NotAuthentic):
            _meddled.count(
                source=self._peer.incarnation, address=self._peer.address, reason=str(error)
            )
        match error:
            case OperationTimeout():
                raise ReadFailure("stalled", str(error), bytes_discarded=discarded) from error
            case ConnectionLost() | ProtocolError() | AuthenticationFailed():
                raise ReadFailure("lost", str(error), bytes_discarded=discarded) from error


class ConnectedTransport(Transport):
    """A transport that connects to the owner, and then sets up its channel. Inherit from it. It
    keeps connections.
    """

    dialect: Dialect

    def __init__(self, local: Local) -> None:
        self.name = self.dialect.transport
        self._options = local.options
        self._peers = Peers(local, self.dialect)
        # what else it keeps; what a channel uses goes with the last one
        self._kept: Sequence[Kept[Any, Any]] = ()

    def open(
        self, endpoint: Endpoint, right: ReadRight, destination: Destination, cutter: Cutter
    ) -> Channel:
        """Connect, authenticate both sides, and set up a channel; see `Transport.open`. If that
        fails, the connection ends, unless the source has said that this registration is not read
        this way (NotShared).
        """
        if (destination.is_strided or right.selection is not None) and not self.strides:
            raise NotShared(
                "chunks of several pieces of memory are not read this way: tcp reads them"
            )
        client = ReadClient(
            self._peers, self._peers.open(endpoint.address, right, cutter), right, cutter
        )
        try:
            if right.selection is not None:
                client.select(right.selection)
            with client.failures():
                return self.channel(client, destination)
        except BaseException:
            client.close()
            raise

    @abstractmethod
    def channel(self, client: ReadClient, destination: Destination) -> Channel:
        """The channel over this connection. Errors as of `open`."""

    def sweep(self) -> None:
        """See `Transport.sweep`."""
        for each in self._kept:
            each.sweep(KEPT_S)
        self._peers.sweep()

    def close(self) -> None:
        """See `Transport.close`."""
        for each in self._kept:
            each.sweep(0.0)
        self._peers.close()
