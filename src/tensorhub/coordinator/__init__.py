"""The coordinator's mind: which worker holds which version, who may read from whom, what is decided.

PURE: events in, actions out; time is an argument. Responsible for versions, leases, replicas, groups and retention. Not
responsible for sockets, files or a clock (`runtime.control.server`), nor for protecting memory: its owner does that.
"""

from tensorhub.coordinator.actions import (
    Action,
    CloseSession,
    Decision,
    Digested,
    Durable,
    Entry,
    Forgotten,
    ModelRecord,
    Persist,
    Pinned,
    Publication,
    Retention,
    Rollback,
    Send,
    Unpinned,
)
from tensorhub.coordinator.core import Coordinator
from tensorhub.coordinator.events import (
    Connected,
    Disconnected,
    Event,
    Persisted,
    PersistFailed,
    Received,
    Tick,
)

__all__ = [
    "Action",
    "CloseSession",
    "Connected",
    "Coordinator",
    "Decision",
    "Digested",
    "Disconnected",
    "Durable",
    "Entry",
    "Event",
    "Forgotten",
    "ModelRecord",
    "Persist",
    "PersistFailed",
    "Persisted",
    "Pinned",
    "Publication",
    "Received",
    "Retention",
    "Rollback",
    "Send",
    "Tick",
    "Unpinned",
]
