"""The tables of a handle: the states of its memory, and the phases of the call that runs on it."""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum

from tensorhub.types import HandleState as H

# Every publish, fill, withdrawal and close moves along this table; `machine.Stateful.become` is the
# only writer. Held or doubtful content is given up first: only memory without content is closed (or
# a fetch that is complete).
HANDLE_TABLE: Mapping[H, frozenset[H]] = {
    H.EMPTY: frozenset({H.FILLING, H.READY, H.IN_DOUBT, H.CLOSED}),
    H.FILLING: frozenset({H.READY, H.TORN, H.IN_DOUBT, H.CLOSED}),
    # in doubt: of what was staged
    H.READY: frozenset({H.DRAINING, H.FILLING, H.EMPTY, H.IN_DOUBT}),
    H.DRAINING: frozenset({H.EMPTY, H.READY}),
    # empty: its caller says that all of it was written anew
    H.TORN: frozenset({H.FILLING, H.EMPTY, H.CLOSED}),
    H.IN_DOUBT: frozenset({H.READY, H.EMPTY, H.TORN, H.FILLING}),
    H.CLOSED: frozenset(),
}

HOLDING = (H.READY, H.DRAINING)
WITH_CONTENT = (*HOLDING, H.FILLING, H.IN_DOUBT)


class Phase(StrEnum):
    """Where the running call is. Attempts (reads) are not phases: the pull has its own machine."""

    QUEUED = "queued"  # waits until the registration is confirmed, or a doubt resolved
    ASKED = "asked"  # Fill is said; waits to be bound
    MANIFEST = "manifest"  # waits for the manifest of the bound version, or for the transfer plan
    HOOK = "hook"  # before_write runs
    HELD = "held"  # ReadyToWrite is said; waits for Write
    FENCING = "fencing"  # waits for the owner's own accesses to end
    ROOM = "room"  # waits for host memory, into which the update is staged
    COPYING = "copying"  # from other memory of this worker
    PULLING = "pulling"  # from other workers
    VOTED = "voted"  # Publish or Prepared is said: only the coordinator ends it
    APPLYING = "applying"  # staged and committed; waits until it is in place
    ABANDONING = "abandoning"  # Abandon is said; waits for the outcome
    STOPPING = "stopping"  # the pull is being ended
    WITHDRAWING = "withdrawing"  # LeaveRequest is said
    DEREGISTERING = "deregistering"  # Deregister is said
    OVER = "over"  # it has returned, or raised


P = Phase
OVER = P.OVER
PULLS = (P.COPYING, P.PULLING)
UNVOTED = frozenset(
    {P.QUEUED, P.ASKED, P.MANIFEST, P.HOOK, P.HELD, P.FENCING, P.ROOM, P.COPYING, P.PULLING}
)

# Each kind of call has a table of its own; `ActiveCall.enter` is the only writer.
PUBLISH_TABLE: Mapping[P, frozenset[P]] = {
    P.QUEUED: frozenset({P.VOTED, P.OVER}),
    P.VOTED: frozenset({P.ABANDONING, P.OVER}),
    P.ABANDONING: frozenset({P.OVER}),
    P.OVER: frozenset(),
}
# Until the old version is fenced a fill ends by ABANDONING, while it copies or pulls by STOPPING. A
# staged fill waits for room, copies and pulls without a fence, runs its hook behind that, and is
# fenced only while it is APPLYING. If its sources are gone, and the selector names another version,
# either goes back to ASKED.
_WRITING = frozenset({P.FENCING, P.COPYING, P.PULLING})
FILL_TABLE: Mapping[P, frozenset[P]] = {
    P.QUEUED: frozenset({P.ASKED, P.OVER}),
    P.ASKED: _WRITING | {P.ROOM, P.MANIFEST, P.HOOK, P.HELD, P.ABANDONING, P.OVER},
    P.MANIFEST: _WRITING | {P.ROOM, P.ASKED, P.HOOK, P.HELD, P.ABANDONING, P.OVER},
    P.HOOK: _WRITING | {P.ASKED, P.HELD, P.VOTED, P.ABANDONING, P.OVER},
    P.HELD: _WRITING | {P.ROOM, P.ASKED, P.ABANDONING, P.OVER},
    P.FENCING: frozenset({P.ASKED, P.COPYING, P.PULLING, P.OVER}),
    P.ROOM: frozenset({P.COPYING, P.PULLING, P.STOPPING}),
    P.COPYING: frozenset({P.COPYING, P.PULLING, P.STOPPING}),
    P.PULLING: frozenset({P.HOOK, P.VOTED, P.STOPPING}),
    P.VOTED: frozenset({P.ASKED, P.PULLING, P.APPLYING, P.OVER}),
    P.APPLYING: frozenset({P.OVER}),
    P.ABANDONING: frozenset({P.OVER}),
    P.STOPPING: frozenset({P.ASKED, P.OVER}),
    P.OVER: frozenset(),
}
LEAVE_TABLE: Mapping[P, frozenset[P]] = {
    P.QUEUED: frozenset({P.WITHDRAWING, P.DEREGISTERING, P.OVER}),
    P.WITHDRAWING: frozenset({P.FENCING, P.OVER}),
    P.FENCING: frozenset({P.DEREGISTERING, P.OVER}),
    P.DEREGISTERING: frozenset({P.OVER}),
    P.OVER: frozenset(),
}
AT_ONCE_TABLE: Mapping[P, frozenset[P]] = {P.QUEUED: frozenset({P.OVER}), P.OVER: frozenset()}
