"""Why a fill cannot go on, or never could, and what its ranks are told then.

Responsible for finding that, and for the texts. Not responsible for what becomes of the operation (`fills`, `decisions`).
"""

from __future__ import annotations

from tensorhub.coordinator import bridges, replicas, ways
from tensorhub.coordinator.availability import held_text
from tensorhub.coordinator.entities import Operation, RankPart, Version
from tensorhub.coordinator.operation_handlers import Blame
from tensorhub.errors import CoordinatorUnavailable, GroupAborted, IntegrityError, ManifestMismatch, VersionUnavailable

BEGUN = "this call was begun under a former coordinator"
UNCHANGED = "they have digested it again: their bytes are unchanged"
LEFT = "its last holder has left on purpose"


def misfit(operation: Operation, version: Version) -> Blame | None:
    """Why this group's ranks cannot take that version's shards, if they cannot."""
    if not ways.as_published(version, operation):
        error = bridges.misfit(operation.group, version)
        return Blame(error) if error is not None else None
    info = version.info
    one = max(part.shard for part in operation.parts.values())
    if one < info.world_size:
        return None
    text = (
        f"version {info.version} of {info.model!r} has no rank {one}: its world_size is {info.world_size}, "
        f"so fetch one of the ranks 0 to {info.world_size - 1}"
    )
    return Blame(ManifestMismatch(text, differences=(text,)))


def unnamed(operation: Operation, version: Version) -> Blame | None:
    """Which rank goes on with a shard whose manifest is not known, since there was no room to keep it."""
    for part in operation.parts.values():
        published = ways.as_published(version, operation)
        known = not published or version.manifests.get(part.shard) or named(part)
        if part.has_written and part.member.serves and not known:
            text = f"{BEGUN}, which has no room for its manifest (MANIFEST_BYTES_MAX); close handles and call again"
            return Blame(CoordinatorUnavailable(text), part.rank)
    return None


def misnamed(operation: Operation, version: Version) -> Blame | None:
    """Which rank goes on with other tensors, or other chunks, than were published, if one does."""
    for part in operation.parts.values():
        # Who reads of another layout names a manifest of his own.
        is_its = named(part) and ways.as_published(version, operation) and not (part.begun and part.begun.publication)
        recorded = version.recorded(part.shard) if is_its else None
        if recorded is not None and recorded[0] != part.member.begun_id:
            text = f"{BEGUN} on rank {part.rank}, with another manifest than version {version.number} was published with"
            return Blame(ManifestMismatch(text, differences=(text,)), part.rank)
    return None


def abandoned(operation: Operation) -> Blame:
    model, version = operation.group.model, operation.bound
    text = (
        f"version {version.number} of {model.name!r}: {LEFT}; "
        f"ask again for a newer version, or retain versions that late readers need; {held_text(model, operation)}"
    )
    return Blame(VersionUnavailable(text))


def must_go_over(operation: Operation, version: Version) -> Blame:
    """Its ranks call again by themselves. (Only a rank whose caller has given up meanwhile shows this error.)"""
    text = f"version {version.number} of {operation.group.model.name!r}: what this call has read is gone; call again"
    return Blame(GroupAborted(text), again=True)


def gone(operation: Operation, error: VersionUnavailable) -> Blame:
    """The version of a call is no more. The ranks of a call by selector call again by themselves (R12)."""
    return Blame(error) if operation.calls_number else Blame(GroupAborted(str(error)), again=True)


def outlived(operation: Operation) -> Blame | None:
    """Whether only this guest still keeps its version, and neither reads (as from a worker that is lost) nor has voted."""
    model, version = operation.group.model, operation.version
    assert version is not None
    if not version.outlived or operation.all_voted or any(part.leases for part in operation.parts.values()):
        return None
    text = f"version {version.number} of {model.name!r}: nobody holds it any more, and newer ones were published; ask again"
    return gone(operation, VersionUnavailable(f"{text}; {held_text(model, operation)}"))


def drifted(part: RankPart) -> tuple[int, int, str] | None:
    """Two shards that are to be equal, are not, and one of them is what this rank reads."""
    known = part.operation.bound.drifted
    found = (known[first] for first in replicas.needed(part) if first in known) if known else iter(())
    return part.drifted or next(found, None)


def not_equal(operation: Operation, one: int, other: int, where: str) -> IntegrityError:
    version = operation.bound
    return IntegrityError(
        f"{operation.kind} of {operation.group.model.name!r}: version {version.number}: ranks {one} and {other} of group "
        f"{version.publisher.group!r} have published the same part of the model, and their bytes differ"
        f"{where and f' ({where})'}: they are no replicas of each other any more. Look at what has drifted there, make them "
        "equal, and publish again"
    )


def condemned(operation: Operation, part: RankPart) -> IntegrityError:
    return IntegrityError(
        f"{operation.kind} of {operation.group.model.name!r}: worker {part.member.worker.name!r} has served chunks with "
        "other digests than were published, and does not say where they came from"
    )


def damaged(operation: Operation, part: RankPart) -> IntegrityError:
    """What several sources have sent this rank arrived with other bytes than the sources have."""
    sources, reader = ", ".join(map(repr, sorted(part.exonerated))), part.member.worker.name
    return IntegrityError(
        f"{operation.kind} of {operation.group.model.name!r}: version {operation.bound.number}: what rank {part.rank} got "
        f"from {sources} does not have its digest, and {UNCHANGED}. The machine "
        f"of worker {reader!r}, or the way to it, damages bytes: look at its memory and network, or use another one"
    )


def named(part: RankPart) -> bytes:
    """The manifest that this rank's `resume` names, if the rank has sent it; else empty."""
    is_named = part.begun is not None and part.begun.manifest_id == part.member.begun_id
    return part.member.begun if is_named else b""
