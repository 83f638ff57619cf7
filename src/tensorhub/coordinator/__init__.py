"""The coordinator's logic: which worker holds which version, which reader reads from which source, what is decided.

PURE: events in, actions out; time is an argument. Not responsible for sockets, files or a clock (`runtime.control.server`),
nor for protecting memory: its owner does that. Where to look:

    core                                    the step: `events` come in, `actions` go out
    cluster, entities, states               what is known; `invariants`, `invariant_counts` say what always holds
    sessions, access                        sessions: which ones are admitted, and what each may say
    membership, registrations               workers, ranks and groups; what may be registered
    announcements                           what a worker holds that comes back
    versions, lineage                       numbers, visibility, what selectors mean; rollbacks
    operations, decisions, deadlines        group operations; what one does is its handler's: `publishes` or `fills`
    waiting, supply                         what an operation waits for; what a reader lacks
    readers, source_choice, feeding         read leases; which source a reader gets; which holding is filled from which
    holdings, holders, withdrawals          what a rank's memory holds; the holders of a shard; how a source is left
    layout_holdings, bridges                the holders of a version in each layout; readers of other layouts
    ways                                    what is read in which layout
    replicas                                ranks that have published the same: which may be read, whether they are equal
    retention, handovers                    what must stay, and which worker takes it over
    testimonies, digest_lists               which digests the bytes must have, and which worker is asked for them
    corruption_checks, refusals             which worker is to blame for other bytes; why a fill cannot go on
    answers, views, summaries               what can be asked of the coordinator
    manifests, manifest_questions, limits   encoded manifests; bounds
"""

from tensorhub.coordinator.actions import (
    DOOR,
    Action,
    CloseSession,
    Decision,
    Digested,
    Durable,
    Entry,
    Forgotten,
    LookFor,
    ModelRecord,
    Persist,
    Pinned,
    Publication,
    Retention,
    Rollback,
    Send,
    Unpinned,
    WorkerLost,
)
from tensorhub.coordinator.core import Coordinator
from tensorhub.coordinator.events import (
    Connected,
    Disconnected,
    Event,
    Persisted,
    PersistFailed,
    Received,
    Silent,
    Tick,
)

__all__ = [
    "DOOR",
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
    "LookFor",
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
    "Silent",
    "Tick",
    "Unpinned",
    "WorkerLost",
]
