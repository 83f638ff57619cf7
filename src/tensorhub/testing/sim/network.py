"""Connections between workers and the coordinator: in order on each, in any order across them.

Responsible for messages on their way. Not responsible for when they arrive: the cluster's driver
decides that.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from tensorhub.messages import FromCoordinator, FromWorker

COORDINATOR, STANDBY = "coordinator", "standby"  # the machines on which a coordinator may lead


class Process:
    """A party that is nothing else."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.alive = True
        self.stopped_until = 0.0


@dataclass(eq=False)
class Link:
    """One connection between a worker and a coordinator."""

    session: int
    party: Process  # the coordinator's
    up: deque[FromWorker] = field(default_factory=deque)
    # None: closed by the coordinator
    down: deque[FromCoordinator | None] = field(default_factory=deque)
    welcomed: bool = False
    # what has come to the coordinator's machine, and lies unread there: its begin, messages, its
    # end
    unread: int = 0
    # Of a driver with a clock, for which nothing arrives before what was sent earlier:
    up_due: float = 0.0  # when the newest of `up` arrives
    down_due: float = 0.0
    held_until: float = 0.0  # nothing arrives before
    loses_up: bool = False  # whatever is sent is lost, and nobody is told
    loses_down: bool = False
    read_due: float = 0.0  # when the coordinator comes to the last of what lies unread there

    @property
    def is_lossy(self) -> bool:
        return self.loses_up or self.loses_down


class Partitions:
    """Which parties are cut off from which, or slow, and until when."""

    def __init__(self) -> None:
        self._blocked: dict[tuple[str, str], float] = {}
        self._slow: dict[tuple[str, str], float] = {}

    @staticmethod
    def _pair(a: str, b: str) -> tuple[str, str]:
        return (a, b) if a < b else (b, a)

    def block(self, a: str, b: str, until: float) -> None:
        """Nothing passes between them."""
        self.block_one_way(a, b, until)
        self.block_one_way(b, a, until)

    def block_one_way(self, sender: str, receiver: str, until: float) -> None:
        """Nothing passes from the one to the other."""
        self._blocked[sender, receiver] = until

    def slow(self, a: str, b: str, until: float) -> None:
        """What passes between them takes long."""
        self._slow[self._pair(a, b)] = until

    def blocked_until(self, sender: str, receiver: str) -> float:
        """When something passes again from the one to the other; 0: it does now."""
        return self._blocked.get((sender, receiver), 0.0) if self._blocked else 0.0

    def apart_until(self, a: str, b: str) -> float:
        """When both hear each other again."""
        return max(self.blocked_until(a, b), self.blocked_until(b, a)) if self._blocked else 0.0

    def slow_until(self, a: str, b: str) -> float:
        """Until when it takes long."""
        return self._slow.get((a, b) if a < b else (b, a), 0.0) if self._slow else 0.0

    def heal(self) -> None:
        """Everything passes again."""
        self._blocked.clear()
        self._slow.clear()
