"""The state machines of the coordinator, as tables; `machine.Stateful.become` is the only writer of
a state.

Theory of operation. Facts arrive as events; each entity below moves along its own table and nothing
else. Attempts (a read, a withdrawal, a retry) are entities of their own, never extra states of
another entity. The diagrams in docs/ are generated from these tables, and a test walks every
(state, event) pair of each.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum


class VersionState(StrEnum):
    """Whether one version of a model can be fetched."""

    STAGED = "staged"  # some ranks of its group have published it; no other worker can see it
    AVAILABLE = "available"  # visible, and every shard has a live source
    UNAVAILABLE = "unavailable"  # visible, but at least one shard has no live source
    DISCARDED = "discarded"  # its publish was aborted; its number was not used
    RETIRED = "retired"  # it was rolled back; or it is old, not retained, and no worker holds it


class ReplicaState(StrEnum):
    """What one group holds of one version, as the coordinator knows it."""

    FILLING = "filling"  # its ranks read; each serves the chunks that it has verified
    READY = "ready"  # complete: it is a source, and it counts for availability
    DRAINING = "draining"  # takes no new readers; the running ones are moved or have their grace
    TORN = "torn"  # its fill was broken off: the memory holds parts of several versions
    GONE = "gone"  # no rank holds it any more


class LeaseState(StrEnum):
    """One reader's right to read one holding, for the coordinator's schedule. It protects
    nothing.
    """

    ACTIVE = "active"  # the reader may read
    # it must not count any more; the owner has not said yet that its fence stands
    FENCING = "fencing"
    FENCED = "fenced"  # the owner's fence stands
    RELEASED = "released"  # the reader reads no more


class WorkerState(StrEnum):
    """Whether the coordinator counts on a worker."""

    LIVE = "live"  # its lease is valid, and it is heard
    SUSPECT = "suspect"  # silent or disconnected, but its lease still runs: not heard
    # silent for a lease, with nothing of it unread: it counts no more, and comes back as another
    # incarnation
    LOST = "lost"


class OperationState(StrEnum):
    """One publish or fill of all ranks of a group."""

    GATHERING = "gathering"  # not every rank has called, or no version is bound yet
    RUNNING = "running"  # all ranks act on one version; not all have voted
    PREPARED = "prepared"  # every rank has voted; the decision is being recorded
    COMMITTED = "committed"  # decided: it holds for every rank
    ABORTED = "aborted"  # decided: it holds for no rank


class PartState(StrEnum):
    """How far one rank is in the operation of its group."""

    CALLED = "called"  # it has called; it is not ready to write yet
    READY = "ready"  # its ReadyToWrite has come, or is not waited for
    READING = "reading"  # it was told to write, and lacks chunks
    # it has every chunk, and has named the roots of its digests: they are not agreed yet
    CLAIMING = "claiming"
    VOTED = "voted"  # its digests are agreed; or it publishes; or it held the bound content before


class CoordinatorState(StrEnum):
    """How far a coordinator knows its cluster."""

    # a lease after a restart: workers say what they hold; a worker that comes back gets one more
    RECOVERING = "recovering"
    SERVING = "serving"  # recovery is over: a version that no worker has announced is lost


V, R, L, W, P, K, C = (
    VersionState,
    ReplicaState,
    LeaseState,
    WorkerState,
    OperationState,
    PartState,
    CoordinatorState,
)

VERSION_TABLE: Mapping[VersionState, frozenset[VersionState]] = {
    V.STAGED: frozenset({V.AVAILABLE, V.DISCARDED}),
    V.AVAILABLE: frozenset({V.UNAVAILABLE, V.RETIRED}),
    V.UNAVAILABLE: frozenset({V.AVAILABLE, V.RETIRED}),
    V.DISCARDED: frozenset(),
    V.RETIRED: frozenset(),
}
REPLICA_TABLE: Mapping[ReplicaState, frozenset[ReplicaState]] = {
    R.FILLING: frozenset({R.READY, R.TORN, R.GONE}),
    R.READY: frozenset({R.DRAINING, R.GONE}),
    R.DRAINING: frozenset({R.GONE, R.READY}),
    R.TORN: frozenset({R.FILLING, R.READY, R.GONE}),
    R.GONE: frozenset(),
}
LEASE_TABLE: Mapping[LeaseState, frozenset[LeaseState]] = {
    L.ACTIVE: frozenset({L.RELEASED, L.FENCING}),
    L.FENCING: frozenset({L.FENCED, L.RELEASED}),
    L.FENCED: frozenset(),
    L.RELEASED: frozenset(),
}
WORKER_TABLE: Mapping[WorkerState, frozenset[WorkerState]] = {
    W.LIVE: frozenset({W.SUSPECT}),
    W.SUSPECT: frozenset({W.LIVE, W.LOST}),
    W.LOST: frozenset(),
}
OPERATION_TABLE: Mapping[OperationState, frozenset[OperationState]] = {
    P.GATHERING: frozenset({P.RUNNING, P.ABORTED}),
    P.RUNNING: frozenset({P.PREPARED, P.ABORTED}),
    P.PREPARED: frozenset({P.COMMITTED, P.ABORTED}),
    P.COMMITTED: frozenset(),
    P.ABORTED: frozenset(),
}
PART_TABLE: Mapping[PartState, frozenset[PartState]] = {
    K.CALLED: frozenset({K.READY, K.READING, K.VOTED}),
    K.READY: frozenset({K.READING}),
    K.READING: frozenset({K.CLAIMING}),
    K.CLAIMING: frozenset({K.READING, K.VOTED}),
    K.VOTED: frozenset(),
}
COORDINATOR_TABLE: Mapping[CoordinatorState, frozenset[CoordinatorState]] = {
    C.RECOVERING: frozenset({C.SERVING}),
    C.SERVING: frozenset(),
}
