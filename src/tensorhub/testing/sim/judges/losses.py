"""Whether a worker that is declared LOST was really silent for a lease (R11): unread messages are
no silence.
"""

from __future__ import annotations

from tensorhub.coordinator import Disconnected, Event, Received
from tensorhub.messages import Leave
from tensorhub.testing.sim.assertion import demand
from tensorhub.testing.sim.judges.ports import JudgedWorld


class Losses:
    """Whether one coordinator loses no worker without a reason."""

    def __init__(self, world: JudgedWorld) -> None:
        self._world = world
        self._newest = ""  # who was lost last
        # when the coordinator has read the end of which connection
        self._ended: dict[int, float] = {}

    def forget(self) -> None:
        """Another coordinator begins."""
        self._newest = ""
        self._ended.clear()

    def stepped(self, event: Event) -> None:
        """The coordinator has taken this."""
        if isinstance(event, Disconnected):
            self._ended[event.session] = self._world.now
        lost = self._world.coordinator.cluster.lost
        newest = next(reversed(lost), "")
        if newest == self._newest:
            return
        for incarnation in reversed(lost):
            if incarnation == self._newest:
                break
            self._lost(incarnation, event)
        self._newest = newest

    def _lost(self, incarnation: str, event: Event) -> None:
        session = self._world.session_of(incarnation)
        if session is None or (
            isinstance(event, Received)
            and event.session == session
            and isinstance(event.message, Leave)
        ):
            return
        unread, since = self._world.unread(session), self._ended.get(session)
        demand(
            not unread,
            "lost workers: {} is lost, and what it has said lies unread: {} times",
            incarnation,
            unread,
        )
        lease_s = self._world.options.lease_s / self._world.clock_rate
        by = since + lease_s if since is not None else 0.0
        demand(
            self._world.now >= by - 1e-6,
            "lost workers: {} is lost, and had until {:.3f} to come back",
            incarnation,
            by,
        )
        comes = self._world.is_coming(incarnation) and self._world.now < by + lease_s
        demand(not comes, "lost workers: {} is lost, and waits to be let in", incarnation)
