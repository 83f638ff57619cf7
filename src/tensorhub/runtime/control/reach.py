"""Which workers advertise an address that readers on other machines cannot reach: one of the loopback network.

A worker listens for readers on the address by which it has reached its coordinator. On the coordinator's own machine, or
behind a tunnel, that is 127.0.0.1. While all workers are on one host, nothing is wrong with it, and nothing is said.
"""

from __future__ import annotations

from tensorhub.errors import StateError
from tensorhub.logs import get_logger
from tensorhub.messages import Join
from tensorhub.protocol.secret import is_loopback
from tensorhub.types import parse_address

ADVICE = "set Options.advertise or Options.listen_host there, or have it connect by an address that is not loopback"

log = get_logger("tensorhub.coordinator")


def loopback_address(join: Join) -> str:
    """The loopback address that a worker advertises for readers on any host; "": it advertises another one, or none."""
    for endpoint in join.endpoints:
        try:
            if endpoint.transport == "tcp" and is_loopback(parse_address(endpoint.address)[0]):
                return endpoint.address
        except StateError:  # whatever a worker says there, it is not this module's to refuse
            continue
    return ""


class Reach:
    """Warns if workers of one coordinator are on several hosts, and one worker registers memory at
    an address that only its own host reaches.
    """

    def __init__(self) -> None:
        self._host: str | None = None  # of the first worker
        self._has_several = False  # hosts, from some time on
        self._unreachable: Join | None = None  # one that has registered while there was one host

    def joined(self, join: Join) -> None:
        """A worker of that host is here."""
        if self._host is None:
            self._host = join.location.host
        if join.location.host != self._host and not self._has_several:
            self._has_several = True
            if self._unreachable is not None:
                self._warn(self._unreachable)

    def registered(self, join: Join) -> None:
        """Note that a worker has registered memory, which other workers may read."""
        if not loopback_address(join):
            return
        if self._has_several:
            self._warn(join)
        else:
            self._unreachable = join

    def _warn(self, join: Join) -> None:
        reason = f"it advertises {loopback_address(join)}, and there are workers on other hosts than {join.location.host!r}"
        log.warning("worker_out_of_reach", source=join.name, reason=reason, advice=ADVICE)
