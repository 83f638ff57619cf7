"""Connections whose peers have not proved who they are: how many there may be, and which one makes room for the next.

An honest peer proves itself within milliseconds, so whoever floods is who has the most connections waiting: the oldest one
of that address goes. So a flood throws itself out, and who comes from elsewhere stays. Pure: no sockets, clock or threads.
Not responsible for how long one may take (the handshake's own deadline), nor for ending the one that goes.
"""

from __future__ import annotations

import ipaddress
import resource
from collections.abc import Hashable
from typing import Generic, TypeVar

STRANGERS_MAX = 256  # at a coordinator
READING_STRANGERS_MAX = 32  # at an owner, where each takes a thread
RESERVED_DESCRIPTORS = 128  # for whatever else the process has open
IPV6_NETWORK_BITS = 64  # what one peer has for itself, so what counts as one address

S = TypeVar("S", bound=Hashable)


class Strangers(Generic[S]):
    """Those of one listener."""

    def __init__(self, most: int) -> None:
        self.most = most
        self._by_origin: dict[str, dict[S, None]] = {}  # oldest first; never empty
        self._origins: dict[S, str] = {}  # where each of them comes from

    def __repr__(self) -> str:
        return f"<Strangers: {len(self)} of at most {self.most}, from {len(self._by_origin)} origins>"

    def __len__(self) -> int:
        return len(self._origins)

    def admit(self, stranger: S, origin: str) -> S | None:
        """Count a new one. If that is one too many: the one that must go (perhaps the new one), which is counted no more."""
        self._origins[stranger] = origin
        self._by_origin.setdefault(origin, {})[stranger] = None
        return self.oldest_of_most() if len(self) > self.most else None

    def oldest_of_most(self) -> S | None:
        """Take out the oldest one of the origin that has the most; None if there is nobody. Of equals, who came first."""
        if not self._by_origin:
            return None
        crowd = max(self._by_origin.values(), key=len)
        gone = next(iter(crowd))
        self.dismiss(gone)
        return gone

    def dismiss(self, stranger: S) -> None:
        """It has proved itself, or is gone; one that is not counted is fine."""
        origin = self._origins.pop(stranger, None)
        if origin is not None:
            crowd = self._by_origin[origin]
            del crowd[stranger]
            if not crowd:
                del self._by_origin[origin]


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


def shares(sessions_max: int) -> tuple[int, int]:
    """How many strangers and how many sessions fit this process' descriptors: (strangers, sessions), at most `sessions_max`.

    The limit is `ulimit -n`; each connection is one descriptor.
    """
    soft = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    if soft == resource.RLIM_INFINITY:
        return STRANGERS_MAX, sessions_max
    strangers = max(1, min(STRANGERS_MAX, soft // 4))
    return strangers, max(1, min(sessions_max, soft - strangers - min(RESERVED_DESCRIPTORS, soft // 4)))
