"""Connections whose peers have not proved who they are: how many there may be, whose turn it is, and who makes room.

A connection that has said nothing yet costs a descriptor, and waits. One that has spoken is *met*: it gets a task or a
thread, and its handshake goes on. Origins take turns, and quotas count only while others wait. If places are short, the
origin that has most of them gives one up at once to an origin that has fewer. Within one origin the oldest connection gives
its place up only after a while, in which an honest peer proves itself. There is no such patience with a flood: very many
wait, and of those that were met last not one has proved itself. If there are too many connections in all, the oldest one of
the origin that has most is closed, one that is not met if there is one. So a flood throws itself out, others stay, and
thousands of honest peers of one address are all met.

Pure: no sockets, clock or threads.
"""

from __future__ import annotations

import ipaddress
import resource
import sys
from collections import Counter
from collections.abc import Hashable
from functools import lru_cache
from typing import Generic, TypeVar

STRANGERS_MAX = 4096  # at a coordinator
MET_MAX = 256  # of them at a time
READING_STRANGERS_MAX = 1024  # at each listener of an owner
READERS_MET_MAX = 32  # of them at a time: each takes a thread
PATIENCE_S = 2.0  # for a handshake, while others of its own origin wait; enough for a peer whose machine is busy
QUEUE_PER_PLACE = 4  # that wait, for each that is met; if more wait, and nobody proves himself, there is no patience
RESERVED_DESCRIPTORS = 128  # for whatever else the process has open
IPV6_NETWORK_BITS = 64  # what one peer has for itself, so what counts as one address

S = TypeVar("S", bound=Hashable)


class PendingHandshakes(Generic[S]):
    """Those of one listener. Times are seconds of any one clock."""

    def __init__(self, most: int, met_max: int, wait_s: float) -> None:
        """`wait_s`: after which one that was not met is given up."""
        self.most = most
        self.met_max = met_max
        self._wait_s = wait_s
        self._by_origin: dict[str, dict[S, None]] = {}  # all of them, oldest first, but who is met goes back; none is empty
        self._origins: dict[S, str] = {}  # where each of them comes from
        self._came: dict[S, float] = {}  # those that are not met, oldest first
        self._spoken: dict[str, dict[S, None]] = {}  # those of them that have spoken; whose turn is next is first
        self._met: dict[str, dict[S, float]] = {}  # since when, oldest first
        self._counts: Counter[str] = Counter()  # of all that have spoken, and of all that are met
        self._in_vain = 0  # how many were met and had to go since one of those that were met proved itself

    def __repr__(self) -> str:
        return f"<PendingHandshakes: {len(self)} of at most {self.most}, from {len(self._by_origin)} origins>"

    def __len__(self) -> int:
        return len(self._origins)

    def came(self, stranger: S, origin: str, now: float) -> S | None:
        """Count a new one. Returns the one that must go if that is too many (perhaps the new one); it is not counted."""
        self._origins[stranger] = origin
        self._by_origin.setdefault(origin, {})[stranger] = None
        self._came[stranger] = now
        return self.oldest_of_most() if len(self) > self.most else None

    def spoke(self, stranger: S) -> None:
        """It has said something, and waits for its turn."""
        spoken = self._spoken.setdefault(self._origins[stranger], {}) if stranger in self._came else None
        if spoken is not None and stranger not in spoken:
            spoken[stranger] = None
            self._counts["spoken"] += 1

    def meet(self, now: float) -> tuple[S, S | None] | None:
        """Whose turn it is now, and which one that is met must make room for it (it is not counted); None: nobody's."""
        if not self._spoken:
            return None
        gone: S | None = None
        if self._counts["met"] < self.met_max:
            origin = next(iter(self._spoken))
        else:
            crowd = self._crowd()
            origin = min(self._spoken, key=self._met_from)
            gone = next(iter(self._met[crowd]))
            if self._met_from(origin) + 1 >= self._met_from(crowd) and now < self._patient_until(crowd):
                return None
            self.dismiss(gone)
            self._in_vain += 1
        waiting = self._spoken.pop(origin)  # its next turn is after the others'
        stranger = next(iter(waiting))
        del waiting[stranger]
        if waiting:
            self._spoken[origin] = waiting
        self._counts["spoken"] -= 1
        del self._came[stranger]
        ages = self._by_origin[origin]
        del ages[stranger]
        ages[stranger] = None
        self._met.setdefault(origin, {})[stranger] = now
        self._counts["met"] += 1
        return stranger, gone

    def _met_from(self, origin: str) -> int:
        return len(self._met.get(origin, ()))

    def _crowd(self) -> str:
        return max(self._met, key=self._met_from)

    def _patient_until(self, crowd: str) -> float:
        """Until when the oldest of this origin, of which most are met, need not give way to those that wait."""
        if self._counts["spoken"] > QUEUE_PER_PLACE * self.met_max and self._in_vain >= self.met_max:
            return 0.0
        return next(iter(self._met[crowd].values())) + PATIENCE_S

    def expired(self, now: float) -> list[S]:
        """Take out those that nobody has met, for too long."""
        gone = list[S]()
        for stranger, since in self._came.items():
            if now < since + self._wait_s:
                break
            gone.append(stranger)
        for stranger in gone:
            self.dismiss(stranger)
        return gone

    def next_deadline(self, *, may_meet: bool) -> float | None:
        """When `expired`, or `meet` if it is called, may find more than now, if nothing else happens before."""
        deadlines = [next(iter(self._came.values())) + self._wait_s] if self._came else []
        if may_meet and self._spoken and self._counts["met"] >= self.met_max:
            deadlines.append(self._patient_until(self._crowd()))
        return min(deadlines, default=None)

    def oldest_of_most(self) -> S | None:
        """Take out the oldest one of the origin that has the most, who is met as late as may be; None if there is nobody. Of
        equals, who came first.
        """
        if not self._by_origin:
            return None
        crowd = max(self._by_origin.values(), key=len)
        gone = next(iter(crowd))
        self.dismiss(gone)
        return gone

    def proved(self, stranger: S) -> None:
        """It has proved itself."""
        self._in_vain = 0
        self.dismiss(stranger)

    def dismiss(self, stranger: S) -> None:
        """It is gone; one that is not counted is fine."""
        origin = self._origins.pop(stranger, None)
        if origin is None:
            return
        _take_out(self._by_origin, origin, stranger)
        self._came.pop(stranger, None)
        self._counts["spoken"] -= _take_out(self._spoken, origin, stranger)
        self._counts["met"] -= _take_out(self._met, origin, stranger)


def _take_out(groups: dict[str, dict[S, None]] | dict[str, dict[S, float]], origin: str, stranger: S) -> bool:
    """Whether it was there. No group stays empty."""
    group = groups.get(origin)
    if group is None or stranger not in group:
        return False
    del group[stranger]
    if not group:
        del groups[origin]
    return True


@lru_cache(1024)
def origin_of(host: object) -> str:
    """What counts as one origin: an IPv4 address, the network of an IPv6 one, "" for what is neither."""
    try:
        address = ipaddress.ip_address(str(host).partition("%")[0])
    except ValueError:
        return ""
    if isinstance(address, ipaddress.IPv4Address):
        return str(address)
    if address.ipv4_mapped is not None:
        return str(address.ipv4_mapped)
    return str(ipaddress.ip_network((int(address), IPV6_NETWORK_BITS), strict=False))


def shares(sessions_max: int, descriptors: int | None = None) -> tuple[int, int]:
    """How many strangers and how many sessions fit so many descriptors: (strangers, sessions), at most `sessions_max`.

    None: this process' limit, `ulimit -n`. Each connection is one descriptor.
    """
    soft = _descriptors() if descriptors is None else descriptors
    strangers = max(1, min(STRANGERS_MAX, soft // 4))
    return strangers, max(1, min(sessions_max, soft - strangers - min(RESERVED_DESCRIPTORS, soft // 4)))


def descriptors_for(sessions: int) -> int:
    """The least `ulimit -n` at which so many sessions fit."""
    kept = sessions + RESERVED_DESCRIPTORS
    return min(kept + STRANGERS_MAX, 4 * (kept - 1) // 3 + 1)


def readers_share() -> int:
    """How many strangers each listener of an owner may have: less of its process' descriptors, which are its user's."""
    return max(1, min(READING_STRANGERS_MAX, _descriptors() // 8))


def _descriptors() -> int:
    soft = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return sys.maxsize if soft == resource.RLIM_INFINITY else soft
