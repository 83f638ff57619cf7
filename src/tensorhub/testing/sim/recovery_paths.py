"""Which way of recovery a message shows to have been taken: what a simulation counts."""

from __future__ import annotations

from typing import Final

from tensorhub import messages

PATHS: dict[type, str] = {
    messages.AddSource: "another source granted",
    messages.CutReader: "lost reader cut off",
    messages.Dismissed: "dismissed, comes back as a new incarnation",
    messages.DropSource: "reader moved",
    messages.EpochChanged: "membership epoch changed",
    messages.RetainedAck: "retention acknowledged",
    messages.MakeCopy: "handed over",
    messages.CopyRefused: "copy refused",
    messages.DropCopy: "copy dropped",
    messages.Revoked: "ordered out",
    messages.Resolve: "outcome asked for",
    messages.Rollback: "rolled back",
    messages.Abandon: "operation abandoned by a rank",
}

READ_FAILURES = ("corrupt", "dropped", "lost", "refused", "stalled", "starved", "unreachable")
SOURCE_FAILURES = ("lost", "refused", "stalled", "unreachable")
# All that a long search has to take. (The kinds of errors that calls end with are counted besides.)
RECOVERY_PATHS: Final = (
    *PATHS.values(),
    "a read-only session made room",
    "archive announced",
    "archived",
    "archived copy unloaded",
    "began anew on an older state",
    "bridge lost a source",
    "bridged",
    "bucket not read",
    "connected again",
    "followed",
    "copy evicted",
    "deposed: a write was refused",
    "stepped down in time",
    "stepped down late",
    "deposed: a worker knew its successor",
    "completed from partial replicas",
    "copied from device memory (use)",
    "copied from host memory (prefetch)",
    "copied from host memory (retention)",
    "copied from what was staged",
    "fill bound again",
    "fill goes on under a new coordinator",
    "kept chunks verified",
    "owner at fault: quarantined",
    "owner not at fault",
    "verified by its sources",
    "staged update done",
    "staged update given up, nothing written",
    "fill completed after a failure",
    "left in doubt",
    "loaded from the bucket",
    "left offline",
    "not as published",
    "operation aborted",
    "re-announced",
    "re-announced in vain",
    "read as deltas",
    "reader shut out",
    "removed from the bucket",
    "restored",
    "resumed from verified chunks",
    "silent connection given up",
    "source given up that lacks the rest",
    "source lacks chunks",
    "wrong delta",
    *(f"read failed: {reason}" for reason in READ_FAILURES),
    *(f"source failed: {reason}" for reason in SOURCE_FAILURES),
)


def path_of(message: messages.FromWorker | messages.FromCoordinator) -> str:
    """Its name, or nothing."""
    match message:
        case messages.Register(held=held) if held is not None:
            return "re-announced"
        case messages.Registered(keep=False):
            return "re-announced in vain"
        case messages.ReadFailed():
            return f"read failed: {message.reason}"
        case messages.Outcome(again=True):
            return "fill bound again"
        case messages.Outcome(committed=True, by_source=True):
            return "verified by its sources"
        case messages.Outcome(committed=False):
            return "operation aborted"
        case messages.Welcome(known=True):
            return "connected again"
        case messages.Fill(resume=resume) if resume is not None:
            return "fill goes on under a new coordinator"
        case messages.DigestedAgain(changed=changed) if changed is not None:
            return "owner at fault: quarantined" if changed else "owner not at fault"
        case messages.Refused():
            return f"refused: {message.error.kind}"
        case _:
            return PATHS.get(type(message), "")
