"""The state machines of the coordinator, as tables; `machine.Stateful.become` is the only writer of a state.

Theory of operation. Facts arrive as events; each entity below moves along its own table and nothing else. Attempts (a
read, a withdrawal, a retry) are entities of their own, never extra states of another entity. The diagrams in docs/ are
generated from these tables, and a test walks every (state, event) pair of each.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum


class VersionState(StrEnum):
    STAGED = "staged"  # some shards are promised; invisible
    AVAILABLE = "available"  # visible, and every shard has a live holder
    UNAVAILABLE = "unavailable"  # visible, but some shard has no live holder
    DISCARDED = "discarded"  # its publication was aborted; its number was not used
    RETIRED = "retired"  # rolled back, or old, unretained and held by nobody


class ReplicaState(StrEnum):
    FILLING = "filling"
    READY = "ready"
    DRAINING = "draining"  # takes no new readers
    TORN = "torn"  # memory of mixed content
    GONE = "gone"


class LeaseState(StrEnum):
    ACTIVE = "active"
    FENCING = "fencing"  # must not count any more; the owner has not confirmed yet
    FENCED = "fenced"
    RELEASED = "released"  # the reader said that it reads no more


class WorkerState(StrEnum):
    LIVE = "live"
    SUSPECT = "suspect"  # silent or disconnected, but its lease still runs
    LOST = "lost"


class OperationState(StrEnum):
    GATHERING = "gathering"  # not every rank has called, or no version is bound yet
    RUNNING = "running"
    PREPARED = "prepared"  # every rank has voted; the decision is being recorded
    COMMITTED = "committed"
    ABORTED = "aborted"


class CoordinatorState(StrEnum):
    RECOVERING = "recovering"
    SERVING = "serving"
    DEPOSED = "deposed"


V, R, L, W, P, C = VersionState, ReplicaState, LeaseState, WorkerState, OperationState, CoordinatorState

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
COORDINATOR_TABLE: Mapping[CoordinatorState, frozenset[CoordinatorState]] = {
    C.RECOVERING: frozenset({C.SERVING, C.DEPOSED}),
    C.SERVING: frozenset({C.DEPOSED}),
    C.DEPOSED: frozenset(),
}
