"""A reader's channels: each to a granted source, over the best transport that the two workers have
in common.

The best transport is the first, in the order of preference, by which the source can be read: both
workers have it, it reaches from one to the other, and no read has shown otherwise. A transport that
cannot be used between the two workers says so when it opens (`Unusable`), and is avoided for a
while: a port that was down may be up again. A transport that opens but fails several times in a row
is avoided, too: the fetch goes on by the next transport. Avoided transports come last, so they are
still tried if there is no better transport.

Responsible for which transports this worker has, as each of its incarnations. Not responsible for
reading (`lanes`).
"""

from __future__ import annotations

import errno
import threading
import time
from collections.abc import Mapping, Sequence
from functools import partial
from itertools import takewhile
from math import inf
from typing import Any, NamedTuple, TypeVar

import anyio
import anyio.to_thread

from tensorhub import deltas
from tensorhub.errors import StateError, TransportUnavailable, shortage
from tensorhub.layouts.reading import Part
from tensorhub.logs import get_logger
from tensorhub.memory.base import Base
from tensorhub.messages import Grant
from tensorhub.protocol.certificates import Certificates
from tensorhub.protocol.secret import is_loopback
from tensorhub.runtime.data.lanes import HELP_BYTES, ChannelOpener
from tensorhub.runtime.data.source_lane import Opened
from tensorhub.scheduler.requests import patience_s
from tensorhub.transport import built_in
from tensorhub.transport.base import (
    Channel,
    Cutter,
    Destination,
    NotShared,
    ReadFailure,
    ReadRight,
    Transport,
    Unusable,
    can_fill,
)
from tensorhub.transport.owner import OwnerSide
from tensorhub.transport.parallel import ParallelChannel
from tensorhub.transport.peers import KEPT_S
from tensorhub.transport.registry import Local, MeantTransportUnavailable
from tensorhub.types import (
    ContentId,
    DeltaUse,
    Endpoint,
    Incarnation,
    LeaseId,
    Location,
    Options,
    Purpose,
    RegistrationId,
    parse_address,
)

PEERS_MAX = 4096  # that are remembered, of each kind of thing that is remembered of them
# of a transport with one source, one after the other; then the next transport is taken
FAILURES_MAX = 3
# for so long a transport is avoided, and twice as long each next time: the obstacle may be gone
LEFT_S = 300.0
LEFT_S_MAX = 86_400.0
_LOOPBACK = (
    "only the source's own host reaches that address, and this is another one: set "
    "Options.advertise or Options.listen_host "
    "at the source, or have it connect to the coordinator by an address that is not loopback"
)
# left to read for each further connection: the last chunks come by the slowest one
CONNECTION_CHUNKS = 32

K = TypeVar("K")
V = TypeVar("V")

log = get_logger("tensorhub.worker")


class _Left(NamedTuple):
    """Why a transport is not used with a source for so long, and until when."""

    until: float
    for_s: float
    why: str


class Channels:
    """Those of one worker. `wanted`: names of transports, best first; None: all that work here."""

    def __init__(
        self,
        secrets: Sequence[bytes],
        options: Options,
        location: Location,
        wanted: Sequence[str] | None,
        certificates: Certificates | None = None,
    ) -> None:
        self._secrets = secrets
        self._certificates = certificates
        self._options = options
        self._location = location
        self._wanted = wanted
        self._transports: tuple[Transport, ...] = ()
        self._kept: dict[str, Any] = {}  # see `Local.kept`
        self._lock = threading.Lock()  # guards the attributes below
        # why, by (transport, incarnation, registration)
        self._not_shared: dict[tuple[str, str, str], str] = {}
        # by (transport, incarnation): since a read ended well
        self._failures: dict[tuple[str, str], int] = {}
        self._left: dict[tuple[str, str], _Left] = {}  # by (transport, incarnation)
        # the transport of each source that was logged last, by incarnation
        self._chosen: dict[str, str] = {}

    def __repr__(self) -> str:
        return f"<Channels over {self._names()}>"

    @property
    def patience_s(self) -> float:
        """See `scheduler.requests`."""
        return patience_s(self._options.stall_timeout_s)

    @property
    def site(self) -> str:
        """Where this worker is."""
        return self._location.site

    @property
    def strided(self) -> frozenset[str]:
        """Those of its transports that read across layouts."""
        return frozenset([transport.name for transport in self._transports if transport.strides])

    def _names(self) -> str:
        return ", ".join(transport.name for transport in self._transports)

    def become(self, incarnation: Incarnation) -> None:
        """Read as that incarnation from now on. Raises TransportUnavailable for a transport that
        cannot be had.
        """
        self._let_go()
        self._transports = built_in.TRANSPORTS.make(
            Local(
                incarnation,
                self._secrets,
                self._options,
                kept=self._kept,
                certificates=self._certificates,
            ),
            self._wanted,
            self._note_missing,
        )
        if self._certificates is not None:
            for transport in self._transports:
                if not transport.private:
                    log.warning(
                        "transport_not_encrypted",
                        transport=transport.name,
                        advice="TLS does not cover its bytes: for weights that must not travel so, "
                        "leave it out of `transports`",
                    )

    @staticmethod
    def _note_missing(name: str, reason: TransportUnavailable) -> None:
        """Log that a transport cannot be had on this machine: a warning, if it was set up on
        purpose.
        """
        say = log.warning if isinstance(reason, MeantTransportUnavailable) else log.info
        say("transport_unavailable", transport=name, reason=str(reason))

    def sides(self) -> tuple[OwnerSide, ...]:
        """New owners' sides of the transports that there are, in their order."""
        found = [transport.serve() for transport in self._transports]
        return tuple([side for side in found if side is not None])

    async def keep_swept(self) -> None:
        """Free, again and again, memory that transports keep for reads that do not come."""
        while True:
            await anyio.sleep(KEPT_S)
            for transport in self._transports:
                # a GPU's memory may wait for the GPU
                await anyio.to_thread.run_sync(transport.sweep)

    def close(self) -> None:
        """Give back all that was kept for reads. No lane runs any more."""
        self._let_go()
        for each in self._kept.values():
            each.close()

    def _let_go(self) -> None:
        """Drop the current transports, by which no read begins any more; what they keep ends with
        their last channel.
        """
        transports, self._transports = self._transports, ()
        for transport in transports:
            transport.close()

    def opener(
        self,
        content_id: ContentId,
        selections: Mapping[str, Part] | None = None,
        base: Base | None = None,
    ) -> ChannelOpener:
        """What opens the best transport to a granted source; for one content. `selections`: by
        name, those that grants name. `base`: what the memory has of an older content.
        """

        def open_one(grant: Grant, destination: Destination, cutter: Cutter, left: int) -> Opened:
            part = (selections or {}).get(grant.selection)
            if grant.selection and part is None:
                raise ReadFailure(
                    "refused", "it is granted for a selection that this rank does not read"
                )
            use = self._may_use_deltas(grant.location, base, is_across=part is not None)
            right = ReadRight(
                LeaseId(grant.lease),
                Incarnation(grant.incarnation),
                RegistrationId(grant.registration),
                grant.generation,
                content_id,
                None if part is None else part.selection,
                base if use is DeltaUse.UNDECIDED else None,
                0.0 if grant.location.site != self._location.site else inf,
            )
            is_far = grant.location.site != self._location.site
            worth = (
                1 + left // max(1, CONNECTION_CHUNKS * max(destination.sizes, default=0))
                if is_far
                else 1
            )
            for transport, endpoint in self._common(grant, destination):
                connections = min(transport.connections, worth)
                try:
                    if connections > 1:
                        opens = partial(transport.open, endpoint, right, destination)
                        channel: Channel = ParallelChannel(
                            opens, connections, destination.sizes, cutter
                        )
                    else:
                        channel = transport.open(endpoint, right, destination, cutter)
                except Unusable as error:
                    if isinstance(lack := error.__cause__, OSError) and lack.errno in (
                        errno.EMFILE,
                        errno.ENFILE,
                    ):
                        # of this process: the source is not to blame
                        raise shortage(lack) or error from error
                    if cutter.is_cut:  # which looks like this, too
                        raise ReadFailure("lost", "the read was given up") from error
                    self._note_unusable(transport.name, grant, error)
                except ReadFailure as failure:
                    if not cutter.is_cut:
                        self._ended(transport.name, grant, destination, failure)
                    if failure.reason == "unreachable" and self._is_of_another_loopback(
                        endpoint, grant
                    ):
                        raise ReadFailure(
                            "unreachable", f"{failure.detail}; {_LOOPBACK}"
                        ) from failure
                    raise
                else:
                    self._note_chosen(transport.name, grant, destination)
                    ended = partial(self._ended, transport.name, grant, destination)
                    waits = connections > 1 or transport.waits
                    useful = min(transport.lanes, 1 + left // HELP_BYTES)
                    lanes = connections if connections > 1 else useful
                    return Opened(
                        transport.name,
                        channel,
                        lanes,
                        transport.batch_bytes,
                        ended,
                        waits,
                        use
                        if transport.deltas or use is not DeltaUse.UNDECIDED
                        else DeltaUse.TRANSPORT,
                    )
            offered = ", ".join(endpoint.transport for endpoint in grant.endpoints) or "none"
            reasons = self._in_the_way(grant)
            what = "none of the transports can be used" if reasons else "no transport in common"
            text = f"{what}: {grant.source} offers {offered}, here are {self._names()}"
            if destination.is_strided:
                able = [
                    transport.name
                    for transport in self._transports
                    if transport.name in self.strided
                ]
                text = (
                    f"{text}; of these, {', '.join(able) or 'none'} can read across layouts "
                    f"(tcp can)"
                )
            raise ReadFailure("unreachable", "; ".join([text, *reasons]))

        return open_one

    def _may_use_deltas(self, there: Location, base: Base | None, *, is_across: bool) -> DeltaUse:
        """Why no delta is asked for there. UNDECIDED: the channel decides for each request."""
        here = self._location
        if is_across:
            return DeltaUse.OTHER_LAYOUT
        if (there.site, there.host) == (here.site, here.host):
            return DeltaUse.SAME_HOST
        if base is None and self._options.deltas != "off":
            return DeltaUse.NO_BASE
        return own_deltas(self._options)

    def _common(self, grant: Grant, destination: Destination) -> list[tuple[Transport, Endpoint]]:
        """The transports by which this source may be read, best first, each with its endpoint;
        those last that were left.
        """
        now, peer = time.monotonic(), grant.incarnation
        found = [
            (transport, endpoint)
            for transport in self._transports
            for endpoint in grant.endpoints
            if endpoint.transport == _offered_as(transport)
            and _is_for(transport, grant)
            and transport.reaches(self._location, grant.location)
            and can_fill(transport, destination)
        ]
        with self._lock:
            found = [
                each
                for each in found
                if (each[0].name, peer, grant.registration) not in self._not_shared
            ]
            found.sort(
                key=lambda each: (
                    (left := self._left.get((each[0].name, peer))) is not None and left.until > now
                )
            )
        return found

    def _is_of_another_loopback(self, endpoint: Endpoint, grant: Grant) -> bool:
        """Whether the address is a loopback address of the source's host, which is not this
        host.
        """
        if grant.location.host == self._location.host or not endpoint.address.startswith("tcp://"):
            return False
        try:
            return is_loopback(parse_address(endpoint.address)[0])
        except StateError:  # whatever a source says there, it costs the reader that source only
            return False

    def _in_the_way(self, grant: Grant) -> list[str]:
        """Why transports are not used with this source, of those that could have been."""
        with self._lock:
            found = [
                why for (_, peer, _), why in self._not_shared.items() if peer == grant.incarnation
            ]
            return found + [
                left.why for (_, peer), left in self._left.items() if peer == grant.incarnation
            ]

    def _note_chosen(self, name: str, grant: Grant, destination: Destination) -> None:
        """Say once by which transport a source is read, and why by no better one."""
        with self._lock:
            if self._chosen.get(grant.incarnation) == name:
                return
            _remember(self._chosen, grant.incarnation, name)
        offered = {endpoint.transport for endpoint in grant.endpoints}
        better = {
            transport.name: _offered_as(transport)
            for transport in takewhile(lambda each: each.name != name, self._transports)
            if can_fill(transport, destination) and _is_for(transport, grant)
        }
        known = dict(why.split(": ", 1) for why in self._in_the_way(grant))
        reasons = [
            f"{each}: {known.get(each, 'does not reach it')}"
            if as_ in offered
            else f"{each}: the source does not offer it"
            for each, as_ in better.items()
        ]
        log.info(
            "transport_chosen",
            source=grant.source,
            transport=name,
            why="; ".join(reasons) or "the best one here",
        )

    def _ended(
        self, name: str, grant: Grant, destination: Destination, failure: ReadFailure | None
    ) -> None:
        """A read ended by itself, well or not: a transport that fails again and again with a source
        is left for the next.
        """
        # the source's own word
        if failure is not None and failure.reason in ("refused", "starved", "damaged"):
            return
        key = name, grant.incarnation
        with self._lock:
            failures = self._failures.pop(key, 0) + 1
            if failure is None:
                self._left.pop(key, None)
                return
            if failures < FAILURES_MAX:
                _remember(self._failures, key, failures)
                return
        reason = f"{FAILURES_MAX} reads failed, the last one as {failure}"
        for_s, _ = self._leave(key, f"{name}: {reason}")
        if any(transport.name != name for transport, _ in self._common(grant, destination)):
            log.warning(
                "transport_left", transport=name, source=grant.source, for_s=for_s, reason=reason
            )

    def _leave(self, key: tuple[str, str], why: str) -> tuple[float, bool]:
        """Leave that transport with that source for a while: for how long, and whether the reason
        is a new one.
        """
        with self._lock:
            last = self._left.get(key)
            for_s = LEFT_S if last is None else min(2 * last.for_s, LEFT_S_MAX)
            _remember(self._left, key, _Left(time.monotonic() + for_s, for_s, why))
        return for_s, last is None or last.why != why

    def _note_unusable(self, name: str, grant: Grant, reason: Unusable) -> None:
        """Avoid a transport for a while. If the reason is about one registration, avoid the
        transport for that registration for good, without a warning.
        """
        text = f"{name}: {reason}"
        if isinstance(reason, NotShared):
            with self._lock:
                _remember(self._not_shared, (name, grant.incarnation, grant.registration), text)
            is_news = False
        else:
            _, is_news = self._leave((name, grant.incarnation), text)
        say = log.warning if is_news else log.debug
        say("transport_unusable", transport=name, source=grant.source, reason=str(reason))


def _offered_as(transport: Transport) -> str:
    """By which transport's endpoints it connects."""
    return transport.via or transport.name


def _is_for(transport: Transport, grant: Grant) -> bool:
    """Whether it reads such memory."""
    return grant.purpose is Purpose.ARCHIVE or not transport.of_archives


def own_deltas(options: Options) -> DeltaUse:
    """Why a worker with these options asks for no deltas at all; UNDECIDED: it may. The codec is
    imported.
    """
    if options.deltas == "off":
        return DeltaUse.OFF
    return DeltaUse.UNDECIDED if deltas.fault_here() is None else DeltaUse.NO_EXTRA


def _remember(what: dict[K, V], key: K, value: V) -> None:
    """Keep the newest PEERS_MAX."""
    what.pop(key, None)
    while len(what) >= PEERS_MAX:
        del what[next(iter(what))]
    what[key] = value
