"""Which way of recovery a message shows to have been taken: what a simulation counts."""

from __future__ import annotations

from typing import Final

from tensorhub.messages import (
    Abandon,
    AddSource,
    ChunksThere,
    CopyRefused,
    CutReader,
    DigestedAgain,
    Dismissed,
    DropCopy,
    DropSource,
    EpochChanged,
    Fill,
    FromCoordinator,
    FromWorker,
    MakeCopy,
    Outcome,
    ReadFailed,
    Refused,
    Register,
    Registered,
    Resolve,
    RetainedAck,
    Revoked,
    Rollback,
    Welcome,
)

PATHS: dict[type, str] = {
    AddSource: "another source granted",
    ChunksThere: "partial copy asked what it has",
    CutReader: "lost reader cut off",
    Dismissed: "dismissed, comes back as a new incarnation",
    DropSource: "reader moved",
    EpochChanged: "membership epoch changed",
    RetainedAck: "retention acknowledged",
    MakeCopy: "handed over",
    CopyRefused: "copy refused",
    DropCopy: "copy dropped",
    Revoked: "ordered out",
    Resolve: "outcome asked for",
    Rollback: "rolled back",
    Abandon: "operation abandoned by a rank",
}

READ_FAILURES = ("corrupt", "dropped", "lost", "refused", "stalled", "unreachable")
SOURCE_FAILURES = ("lost", "refused", "stalled", "unreachable")
# All that a long search has to take. (The kinds of errors that calls end with are counted besides.)
RECOVERY_PATHS: Final = (
    *PATHS.values(),
    "connected again",
    "completed from partial replicas",
    "copied from device memory (use)",
    "copied from host memory (prefetch)",
    "copied from host memory (retention)",
    "copied from what was staged",
    "fill goes on under a new coordinator",
    "kept chunks verified",
    "owner at fault: quarantined",
    "owner not at fault",
    "staged update done",
    "staged update given up, nothing written",
    "fill completed after a failure",
    "left in doubt",
    "left offline",
    "operation aborted",
    "re-announced",
    "re-announced in vain",
    "reader shut out",
    "resumed from verified chunks",
    "silent connection given up",
    "source lacks chunks",
    *(f"read failed: {reason}" for reason in READ_FAILURES),
    *(f"source failed: {reason}" for reason in SOURCE_FAILURES),
)


def path_of(message: FromWorker | FromCoordinator) -> str:
    """Its name, or nothing."""
    match message:
        case Register(held=held) if held is not None:
            return "re-announced"
        case Registered(keep=False):
            return "re-announced in vain"
        case ReadFailed():
            return f"read failed: {message.reason}"
        case Outcome(committed=False):
            return "operation aborted"
        case Welcome(known=True):
            return "connected again"
        case Fill(resume=resume) if resume is not None:
            return "fill goes on under a new coordinator"
        case DigestedAgain(changed=changed) if changed is not None:
            return "owner at fault: quarantined" if changed else "owner not at fault"
        case Refused():
            return f"refused: {message.error.kind}"
        case _:
            return PATHS.get(type(message), "")
