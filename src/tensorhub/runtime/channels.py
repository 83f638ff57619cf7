"""A reader's channels: each to a granted source, over the best transport that the two workers have in common.

The best one is the first, in the order of preference, by which the source can be read: both have it, it reaches from one to
the other, and nothing has shown otherwise. One that cannot be used between the two says so when it opens (`Unusable`). One
that opens, and then fails again and again, is left as well, for a while: the fetch goes on by the next one.

Responsible for which transports this worker has, as each of its incarnations. Not responsible for what is read (`lanes`).
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from functools import partial
from typing import Any, TypeVar

import anyio
import anyio.to_thread

from tensorhub.messages import Grant
from tensorhub.runtime.cma_channel import CmaTransport
from tensorhub.runtime.cuda_ipc_channel import CudaIpcTransport
from tensorhub.runtime.lanes import BATCH_BYTES, ChannelOpener, Opened
from tensorhub.runtime.logs import get_logger
from tensorhub.runtime.nixl_channel import NixlTransport
from tensorhub.runtime.peers import KEPT_S
from tensorhub.runtime.rdma_channel import RdmaTransport
from tensorhub.runtime.shm_channel import ShmTransport
from tensorhub.runtime.tcp_channel import TcpTransport
from tensorhub.transport import cma
from tensorhub.transport.base import (
    Cutter,
    Destination,
    Keeping,
    NotShared,
    ReadFailure,
    ReadRight,
    Transport,
    Unusable,
    can_fill,
)
from tensorhub.transport.cma import Words
from tensorhub.transport.nixl import Exposures
from tensorhub.transport.registry import Local, Registry
from tensorhub.transport.shm import Segment
from tensorhub.transport.verbs import Fabric
from tensorhub.types import ContentId, Endpoint, Incarnation, LeaseId, Location, Options, RegistrationId

TRANSPORTS = Registry()
TRANSPORTS.add("cuda_ipc", CudaIpcTransport, place=5)
TRANSPORTS.add("shm", ShmTransport, place=10)
TRANSPORTS.add("cma", CmaTransport, place=20)
TRANSPORTS.add("rdma", RdmaTransport, place=40)
# UCX lets whoever reaches its ports write memory, so nobody has it without having asked for it.
TRANSPORTS.add("nixl", NixlTransport, place=50, only_by_name=True)
TRANSPORTS.add("tcp", TcpTransport, place=90)
PEERS_MAX = 4096  # that are remembered, of each kind of thing that is remembered of them
FAILURES_MAX = 3  # of a transport with one source, one after the other; then the next one is taken
LEFT_S = 300.0  # for so long: what was in the way may be over

K = TypeVar("K")
V = TypeVar("V")

log = get_logger("tensorhub.worker")


class Channels:
    """Those of one worker. `wanted`: names of transports, best first; None: all that work here."""

    def __init__(self, secrets: Sequence[bytes], options: Options, location: Location, wanted: Sequence[str] | None) -> None:
        self._secrets = secrets
        self._options = options
        self._location = location
        self._wanted = wanted
        self._transports: tuple[Transport, ...] = ()
        self._kept: dict[str, Any] = {}  # see `Local.kept`
        self._unusable: dict[tuple[str, str, str], str] = {}  # (transport, incarnation, registration or "")
        self._lock = threading.Lock()  # guards what is below
        self._failures: dict[tuple[str, str], int] = {}  # by (transport, incarnation): since a read ended well
        self._left: dict[tuple[str, str], tuple[float, str]] = {}  # of those that failed too often: until when, and why
        self._chosen: dict[str, str] = {}  # the transport of each source that was logged last, by incarnation

    def __repr__(self) -> str:
        return f"<Channels over {self._names()}>"

    def _names(self) -> str:
        return ", ".join(transport.name for transport in self._transports)

    def become(self, incarnation: Incarnation) -> None:
        """Read as that one from now on. Raises TransportUnavailable for a transport that cannot be had."""
        self._let_go()
        self._transports = TRANSPORTS.make(
            Local(incarnation, self._secrets, self._options, self._kept),
            self._wanted,
            lambda name, reason: log.info("transport_unavailable", transport=name, reason=reason),
        )
        if "cma" in (self._wanted or ()):
            cma.let_others_read()

    def words(self) -> Words | None:
        """Where those look who read this worker's memory without its help; None: nobody does."""
        if self.shares:
            return Words(lambda nbytes: Segment(nbytes).bytes_at(0, nbytes))
        return Words() if any(self._has(name) for name in ("cma", "rdma", "nixl")) else None

    @property
    def fabric(self) -> Fabric | None:
        """By which RDMA ports others may read this worker's memory; None: by none."""
        return self._kept.get("rdma")

    def exposures(self) -> Exposures | None:
        """What NIXL reads of this worker's memory; None: nothing."""
        return Exposures() if self._has("nixl") else None

    @property
    def shares(self) -> bool:
        """Whether others may map this worker's shared memory: its tensors', or that of its generation words."""
        return self._has("shm") or self._has("cuda_ipc")

    def _has(self, name: str) -> bool:
        return any(transport.name == name for transport in self._transports)

    def offers(self, address: str, unix_address: str | None) -> tuple[Endpoint, ...]:
        """How others may read from this worker, whose listeners they reach at these addresses; best first."""
        addresses = dict.fromkeys(("cma", "rdma", "nixl", "tcp"), address) | dict.fromkeys(("cuda_ipc", "shm"), unix_address)
        offered = [(each.name, addresses.get(each.name)) for each in self._transports]
        return tuple([Endpoint(name, there) for name, there in offered if there is not None])

    async def keep_swept(self) -> None:
        """Let go, again and again, of what is kept for reads that do not come."""
        while True:
            await anyio.sleep(KEPT_S)
            for transport in self._transports:
                if isinstance(transport, Keeping):
                    await anyio.to_thread.run_sync(transport.sweep)  # a GPU's memory may wait for the GPU

    def close(self) -> None:
        """Give back all that was kept for reads. No lane runs any more."""
        self._let_go()
        for each in self._kept.values():
            each.close()

    def _let_go(self) -> None:
        """Nobody reads any more by the transports that there are; what they keep ends with their last channel."""
        transports, self._transports = self._transports, ()
        for transport in transports:
            if isinstance(transport, Keeping):
                transport.close()

    def opener(self, content_id: ContentId) -> ChannelOpener:
        """What opens the best transport to a granted source; for one content."""

        def open_one(grant: Grant, destination: Destination, cutter: Cutter) -> Opened:
            right = ReadRight(
                LeaseId(grant.lease),
                Incarnation(grant.incarnation),
                RegistrationId(grant.registration),
                grant.generation,
                content_id,
            )
            for transport, endpoint in self._common(grant, destination):
                try:
                    channel = transport.open(endpoint, right, destination, cutter)
                except Unusable as error:
                    self._note_unusable(transport.name, grant, error)
                except ReadFailure as failure:
                    if not cutter.is_cut:
                        self._ended(transport.name, grant, destination, failure)
                    raise
                else:
                    self._note_chosen(transport.name, grant, destination)
                    batch_bytes = getattr(transport, "batch_bytes", BATCH_BYTES)
                    ended = partial(self._ended, transport.name, grant, destination)
                    return Opened(transport.name, channel, transport.lanes, batch_bytes, ended)
            offered = ", ".join(endpoint.transport for endpoint in grant.endpoints) or "none"
            text = f"no transport in common: {grant.source} offers {offered}, here are {self._names()}"
            raise ReadFailure("unreachable", "; ".join([text, *self._in_the_way(grant)]))

        return open_one

    def _common(self, grant: Grant, destination: Destination) -> list[tuple[Transport, Endpoint]]:
        """The transports by which this source may be read, best first, each with its endpoint; those last that were left."""
        found = [
            (transport, endpoint)
            for transport in self._transports
            for endpoint in grant.endpoints
            if endpoint.transport == transport.name
            and not self._unusable.keys() & _keys(transport.name, grant)
            and transport.reaches(self._location, grant.location)
            and can_fill(transport, destination)
        ]
        with self._lock:
            found.sort(key=lambda each: self._left.get((each[0].name, grant.incarnation), (0.0, ""))[0] > time.monotonic())
        return found

    def _in_the_way(self, grant: Grant) -> list[str]:
        """Why transports are not used with this source, of those that could have been."""
        found = [why for key, why in list(self._unusable.items()) if key[1] == grant.incarnation]
        with self._lock:
            return found + [why for (_, peer), (_, why) in self._left.items() if peer == grant.incarnation]

    def _note_chosen(self, name: str, grant: Grant, destination: Destination) -> None:
        """Say once by which transport a source is read, and why by no better one."""
        with self._lock:
            if self._chosen.get(grant.incarnation) == name:
                return
            _remember(self._chosen, grant.incarnation, name)
        offered = {endpoint.transport for endpoint in grant.endpoints}
        better = [transport.name for transport in self._transports if can_fill(transport, destination)]
        better = better[: better.index(name)]
        known = dict(why.split(": ", 1) for why in self._in_the_way(grant))
        reasons = [
            f"{each}: {known.get(each, 'does not reach it') if each in offered else 'the source does not offer it'}"
            for each in better
        ]
        log.info("transport_chosen", source=grant.source, transport=name, why="; ".join(reasons) or "the best one here")

    def _ended(self, name: str, grant: Grant, destination: Destination, failure: ReadFailure | None) -> None:
        """A read ended by itself, well or not: a transport that fails again and again with a source is left for the next."""
        if failure is not None and failure.reason == "refused":  # the source's own word
            return
        key = name, grant.incarnation
        with self._lock:
            failures = 0 if failure is None else self._failures.pop(key, 0) + 1
            if failure is None or failures >= FAILURES_MAX:
                self._failures.pop(key, None)
            else:
                _remember(self._failures, key, failures)
        if failure is None or failures < FAILURES_MAX:
            return
        reason = f"{FAILURES_MAX} reads failed, the last one as {failure}"
        with self._lock:
            _remember(self._left, key, (time.monotonic() + LEFT_S, f"{name}: {reason}"))
        if any(transport.name != name for transport, _ in self._common(grant, destination)):
            log.warning("transport_left", transport=name, source=grant.source, for_s=LEFT_S, reason=reason)

    def _note_unusable(self, name: str, grant: Grant, reason: Unusable) -> None:
        """Once for each peer, or registration: it is not tried again there."""
        of_peer, of_registration = _keys(name, grant)
        is_usual = isinstance(reason, NotShared)
        say = log.debug if is_usual else log.warning
        say("transport_unusable", transport=name, source=grant.source, reason=str(reason))
        with self._lock:
            _remember(self._unusable, of_registration if is_usual else of_peer, f"{name}: {reason}")


def _remember(what: dict[K, V], key: K, value: V) -> None:
    """Keep the newest PEERS_MAX."""
    what.pop(key, None)
    while len(what) >= PEERS_MAX:
        del what[next(iter(what))]
    what[key] = value


def _keys(name: str, grant: Grant) -> tuple[tuple[str, str, str], tuple[str, str, str]]:
    return (name, grant.incarnation, ""), (name, grant.incarnation, grant.registration)
