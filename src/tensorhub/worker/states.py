"""The state machine of a handle, and the phases of the call that runs on it."""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum

from tensorhub.types import HandleState as H

# Whoever publishes, fills, withdraws or closes moves along this table; `machine.Stateful.become` is the only writer.
# What is held, or in doubt, is given up first: only memory that holds nothing is closed (or all of a fetch is in place).
HANDLE_TABLE: Mapping[H, frozenset[H]] = {
    H.EMPTY: frozenset({H.FILLING, H.READY, H.IN_DOUBT, H.CLOSED}),
    H.FILLING: frozenset({H.READY, H.TORN, H.IN_DOUBT, H.CLOSED}),
    H.READY: frozenset({H.DRAINING, H.FILLING, H.EMPTY, H.IN_DOUBT}),  # in doubt: of what was staged
    H.DRAINING: frozenset({H.EMPTY, H.READY}),
    H.TORN: frozenset({H.FILLING, H.READY, H.IN_DOUBT, H.CLOSED}),
    H.IN_DOUBT: frozenset({H.READY, H.EMPTY, H.TORN, H.FILLING}),
    H.CLOSED: frozenset(),
}


class Phase(StrEnum):
    """Where the running call is. Attempts (reads) are not phases: the pull has its own machine."""

    QUEUED = "queued"  # waits until the registration is confirmed, or a doubt resolved
    ASKED = "asked"  # Fill is said; waits to be bound
    MANIFEST = "manifest"  # waits for the manifest of the bound version
    HOOK = "hook"  # before_write runs
    HELD = "held"  # ReadyToWrite is said; waits for Write
    FENCING = "fencing"  # waits for the owner's own accesses to end
    COPYING = "copying"  # from this worker's own host copies
    PULLING = "pulling"
    VOTED = "voted"  # Publish or Prepared is said: only the coordinator ends it
    APPLYING = "applying"  # staged and committed; waits until it is in place
    ABANDONING = "abandoning"  # Abandon is said; waits for the outcome
    STOPPING = "stopping"  # the pull is being ended
    WITHDRAWING = "withdrawing"  # LeaveRequest is said
    DEREGISTERING = "deregistering"


UNVOTED = frozenset(
    {
        Phase.QUEUED,
        Phase.ASKED,
        Phase.MANIFEST,
        Phase.HOOK,
        Phase.HELD,
        Phase.FENCING,
        Phase.COPYING,
        Phase.PULLING,
    }
)
