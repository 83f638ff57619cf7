"""The heartbeats of a session on the worker's side: their content, and when a connection is given
up.

Counts beats, not seconds, so that a process that was stopped does not blame the coordinator. Not
responsible for time.
"""

from __future__ import annotations

from tensorhub.messages import FromCoordinator, Heartbeat, HeartbeatAck, Welcome

BEATS_PER_LEASE = 4


class Heartbeats:
    """The heartbeats of one worker, session after session. `lease_s`: the lease until a coordinator
    states its own.
    """

    def __init__(self, lease_s: float) -> None:
        self.lease_s = lease_s
        # when the coordinator said the newest Welcome or HeartbeatAck that came, by its own clock
        self._said_at = 0.0
        self._sequence = 0
        self._answered = 0  # the newest that was acknowledged, or that a former session has said
        self._unanswered = 0  # beats since anything was heard in this session

    def __repr__(self) -> str:
        return f"<Heartbeats every {self.every_s:g} s, {self._unanswered} unanswered>"

    @property
    def every_s(self) -> float:
        """Seconds between two heartbeats."""
        return self.lease_s / BEATS_PER_LEASE

    def connected(self) -> None:
        """A connection is up, which is to become a session."""
        self._unanswered, self._answered = 0, self._sequence

    def heard(self, message: FromCoordinator) -> None:
        """A message has come over the connection."""
        self._unanswered = 0
        if isinstance(message, Welcome):
            self.lease_s, self._said_at = message.lease_s, message.said_at
        elif isinstance(message, HeartbeatAck):
            self._said_at, self._answered = message.said_at, message.sequence

    @property
    def late_s(self) -> float:
        """At the time of the next heartbeat: how long, at least, the unacknowledged heartbeats
        wait. The coordinator is that far behind, and other messages to it wait as long.
        """
        return (self._sequence - self._answered) * self.every_s

    def is_in_vain(self) -> bool:
        """It is time for the next heartbeat. Whether the session is given up instead: the
        coordinator does not answer.
        """
        self._unanswered += 1
        return self._unanswered > BEATS_PER_LEASE

    def next(self) -> Heartbeat:
        self._sequence += 1
        return Heartbeat(self._sequence, self._said_at)
