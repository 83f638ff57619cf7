"""The coordinator's logic: which worker holds which version, which reader reads from which source,
what is decided.

PURE: events in, actions out; time is an argument. Not responsible for sockets, files or a clock
(`runtime.control.server`), nor for protecting memory: its owner does that. Where to look:

    core, actions                   the step: events come in, actions go out
    cluster, entities, states       the known cluster; `invariants` says what always holds
    access                          which sessions are admitted, and what each may say
    membership, registrations       workers, ranks and groups; what may be registered, and what a worker announces
    versions, publishes             numbers, visibility, what selectors mean; publishes and rollbacks
    operations, decisions           group operations and their deadlines; how an operation ends
    fills, refusals                 fills; why a fill cannot go on
    waiting                         what a reader lacks, and what an operation waits for
    readers, source_choice          read leases; which source a reader gets; which holding is filled from which
    holdings                        what a rank's memory holds, and how a source is left
    layout_holdings                 the holders of a version in each layout; encoded manifests
    ways                            which group reads in which layout; readers of other layouts
    coverage                        whether ranks together have every byte; whether equal ranks have equal bytes
    restoring                       versions that an archive has, and this coordinator does not know
    retention, handovers            what must stay, and which worker takes it over
    testimonies                     which digests the bytes must have, and which worker is asked for them
    corruption_checks               which worker is to blame for wrong bytes
    views, overview                 what can be asked of the coordinator; what its HTTP endpoint shows
    limits                          bounds
"""  # noqa: E501 - a table

from tensorhub.coordinator.actions import (
    DOOR,
    Action,
    CloseSession,
    Connected,
    Decision,
    Described,
    Digested,
    Disconnected,
    Durable,
    Entry,
    Event,
    Forgotten,
    LookFor,
    ModelRecord,
    Outlived,
    Persist,
    Persisted,
    PersistFailed,
    Pinned,
    Publication,
    Received,
    Restoration,
    Retention,
    Rollback,
    Send,
    Silent,
    Tick,
    Unpinned,
    WorkerLost,
)
from tensorhub.coordinator.core import Coordinator

__all__ = [
    "DOOR",
    "Action",
    "CloseSession",
    "Connected",
    "Coordinator",
    "Decision",
    "Described",
    "Digested",
    "Disconnected",
    "Durable",
    "Entry",
    "Event",
    "Forgotten",
    "LookFor",
    "ModelRecord",
    "Outlived",
    "Persist",
    "PersistFailed",
    "Persisted",
    "Pinned",
    "Publication",
    "Received",
    "Restoration",
    "Retention",
    "Rollback",
    "Send",
    "Silent",
    "Tick",
    "Unpinned",
    "WorkerLost",
]
