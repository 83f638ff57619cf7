"""What a transport keeps for its next reads: connections to owners, each proved once, and other
things.

Responsible for connecting and for the handshake, for which connection may be used again, and for
how many are kept and for how long. Not responsible for their messages (`connected`).
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

from tensorhub.errors import TensorHubError
from tensorhub.messages import PROTOCOL_VERSION
from tensorhub.protocol.blocking import BlockingConnection
from tensorhub.protocol.frames import WrongVersion
from tensorhub.protocol.handshake import NONCE_BYTES, ClientHandshake
from tensorhub.protocol.lost import ConnectionLost
from tensorhub.protocol.tls import Tls
from tensorhub.transport import sockets, unix
from tensorhub.transport.base import Cutter, ReadFailure, ReadRight
from tensorhub.transport.dialect import Dialect
from tensorhub.transport.generation_words import Header
from tensorhub.transport.registry import Local
from tensorhub.types import Incarnation, RegistrationId

K = TypeVar("K")
V = TypeVar("V")

KEPT_S = 60.0  # without use


class Kept(Generic[K, V]):
    """Values by key, each with when it was used last. For all threads."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._kept: dict[K, tuple[float, V]] = {}

    def __len__(self) -> int:
        return len(self._kept)

    def find(self, key: K, is_good: Callable[[V], bool]) -> V | None:
        """The value there, if it is good; else it goes."""
        with self._lock:
            _, value = self._kept.pop(key, (0.0, None))
            if value is None or not is_good(value):
                return None
            self.put(key, value)
        return value

    def put(self, key: K, value: V) -> None:
        with self._lock:
            self._kept[key] = time.monotonic(), value

    def find_or_make(self, key: K, is_good: Callable[[V], bool], make: Callable[[], V]) -> V:
        """The kept value, or a new one. One thread at a time makes one."""
        with self._lock:
            value = self.find(key, is_good)
            if value is None:
                value = make()
                self.put(key, value)
        return value

    def sweep(self, kept_s: float) -> None:
        """Drop values that were not used for so long."""
        before = time.monotonic() - kept_s
        with self._lock:
            self._kept = {key: each for key, each in self._kept.items() if each[0] > before}


KEPT_MAX = 32  # of each transport; beyond it, the connection that was used longest ago is closed


class Closable(Protocol):
    """What a transport has set up over a connection, and what must go before it."""

    def close(self) -> None: ...


@dataclass(slots=True, eq=False, repr=False)
class Peer:
    """One connection to an owner, both proved. Belongs to one channel at a time."""

    connection: BlockingConnection
    address: str
    incarnation: Incarnation  # the owner's
    secret: bytes  # under which it was proved
    is_local: bool  # the owner is on this host
    is_sound: bool = True  # no call on it has failed
    used: float = 0.0  # when it was given back
    header: Header | None = None  # of the owner's process, once it was found (cma)
    # for which it was found: another one may be on a GPU
    registration: RegistrationId | None = None
    link: Closable | None = None  # the queue pair that was made over the connection (rdma)

    def close(self) -> None:
        """End it, with all that was set up over it."""
        if self.link is not None:
            self.link.close()
        self.connection.close()


class Peers:
    """The connections of one transport of one incarnation. For any thread."""

    def __init__(self, local: Local, dialect: Dialect) -> None:
        self.dialect = dialect  # what is said on them
        self._local = local
        self._lock = threading.Lock()  # guards both
        self._kept: list[Peer] = []  # the most recently used one at the end
        self._is_closed = False

    def __repr__(self) -> str:
        return f"<Peers, {len(self._kept)} kept>"

    def open(self, address: str, right: ReadRight, cutter: Cutter) -> Peer:
        """A connection to the right's owner, kept or new. The cutter ends it. Give it back
        afterwards.

        Raises ReadFailure("unreachable"), Unusable.
        """
        while (peer := self._take(address, right.incarnation)) is not None:
            if peer.secret == self._local.secret and peer.connection.is_quiet:
                cutter.attach(peer.connection.shutdown)
                return peer
            peer.close()
        return self._connect(address, right, cutter)

    def give_back(self, peer: Peer, cutter: Cutter, *, is_answered: bool) -> None:
        """Keep the connection if nothing has failed on it and no answer is outstanding. Else close
        it.
        """
        cutter.detach()
        gone = [peer]
        if peer.is_sound and is_answered and not cutter.is_cut:
            with self._lock:
                if not self._is_closed:
                    peer.used = time.monotonic()
                    self._kept.append(peer)
                    gone = [self._kept.pop(0)] if len(self._kept) > KEPT_MAX else []
        _close(gone)

    def sweep(self) -> None:
        """Close connections that were not used for a while. (An owner that needs a place takes it
        earlier.)
        """
        before = time.monotonic() - KEPT_S
        with self._lock:
            gone = [peer for peer in self._kept if peer.used < before]
            del self._kept[: len(gone)]
        _close(gone)

    def close(self) -> None:
        """Keep nothing any more."""
        with self._lock:
            self._is_closed = True
            gone, self._kept = self._kept, []
        _close(gone)

    def _take(self, address: str, incarnation: Incarnation) -> Peer | None:
        with self._lock:
            for at in reversed(range(len(self._kept))):
                if (self._kept[at].address, self._kept[at].incarnation) == (address, incarnation):
                    return self._kept.pop(at)
        return None

    def _connect(
        self, address: str, right: ReadRight, cutter: Cutter, version: int = PROTOCOL_VERSION
    ) -> Peer:
        options, secret = self._local.options, self._local.secret
        kind, tls = unix if address.startswith(unix.PREFIX) else sockets, None
        if kind is sockets and self._local.certificates is not None:
            tls = Tls(self._local.certificates, "reader", peer="owner")
        sock = kind.connect(address, options.connect_timeout_s, cutter)
        is_local = sockets.is_local(sock)
        connection = BlockingConnection(sock, stall_timeout_s=options.stall_timeout_s, tls=tls)
        handshake = ClientHandshake(
            "reader",
            self._local.incarnation,
            secret,
            os.urandom(NONCE_BYTES),
            expected_incarnation=right.incarnation,
            version=version,
        )
        try:
            cutter.attach(connection.shutdown)
            handshake.binding = connection.open_tls(options.connect_timeout_s)
            connection.handshake(handshake, options.connect_timeout_s)
        except BaseException as error:
            cutter.detach()
            connection.close()
            if isinstance(error, WrongVersion) and handshake.older is not None:
                return self._connect(address, right, cutter, handshake.older)
            if isinstance(error, TensorHubError | ConnectionLost):
                raise ReadFailure("unreachable", f"{address}: {error}") from error
            raise
        return Peer(connection, address, right.incarnation, secret, is_local)


def _close(peers: list[Peer]) -> None:
    for peer in peers:
        peer.close()
