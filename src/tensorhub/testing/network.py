"""Connections between workers and the coordinator: in order on each, in any order across them.

Responsible for what is on its way. Not responsible for when it arrives: who drives the cluster decides that.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from tensorhub.messages import FromCoordinator, FromWorker


@dataclass(eq=False)
class Link:
    """One connection between a worker and the coordinator."""

    session: int
    up: deque[FromWorker] = field(default_factory=deque)
    down: deque[FromCoordinator | None] = field(default_factory=deque)  # None: closed by the coordinator
    welcomed: bool = False
