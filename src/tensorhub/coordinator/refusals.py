"""Why a fill cannot go on, or never could, and what its ranks are told then; which versions are
held, for any error.

Responsible for finding that, and for the texts. Not responsible for what becomes of the operation
(`fills`, `decisions`).
"""

from __future__ import annotations

from dataclasses import dataclass

from tensorhub.coordinator import ways
from tensorhub.coordinator.entities import Model, Operation, RankPart, Version
from tensorhub.coordinator.states import WorkerState
from tensorhub.errors import (
    CoordinatorUnavailable,
    GroupAborted,
    IntegrityError,
    ManifestMismatch,
    TensorHubError,
    VersionUnavailable,
    some,
)

HELD_TOLD_MAX = 3  # versions that an error names
NO_AVAILABLE = "and 'available' waits for no worker"
BEGUN = "this call was begun under a former coordinator"
UNCHANGED = "they have digested it again: their bytes are unchanged"
LEFT = "its last holder has left on purpose"


@dataclass(frozen=True, slots=True)
class Blame:
    """Why an operation is aborted. `rank` None: no single rank is to blame, and all get `error`
    itself.
    """

    error: TensorHubError
    rank: int | None = None
    others: tuple[int, ...] = ()  # ranks that are as much to blame
    again: bool = False  # its ranks make the same call again by themselves


def misfit(operation: Operation, version: Version) -> Blame | None:
    """Why this group's ranks cannot take that version's shards, if they cannot."""
    if not ways.as_published(version, operation):
        error = ways.misfit(operation.group, version)
        return Blame(error) if error is not None else None
    info = version.info
    one = ways.first_member(operation).shard  # several ranks have their ranks' shards
    if one < info.world_size:
        return None
    text = (
        f"version {info.version} of {info.model!r} has no rank {one}: its world_size is "
        f"{info.world_size}, "
        f"so fetch one of the ranks 0 to {info.world_size - 1}"
    )
    return Blame(ManifestMismatch(text, differences=(text,)))


def unnamed(operation: Operation, version: Version) -> Blame | None:
    """The blame if a rank goes on with a shard, and the coordinator had no room to keep the shard's
    manifest.
    """
    for part in operation.parts.values():
        if not part.has_written or not part.member.said.serves:
            continue
        published = ways.as_published(version, operation)
        if published and not version.manifests.get(part.shard) and not named(part):
            text = (
                f"{BEGUN}, which has no room for its manifest (MANIFEST_BYTES_MAX); close "
                f"handles and call again"
            )
            return Blame(CoordinatorUnavailable(text), part.rank)
    return None


def misnamed(operation: Operation, version: Version) -> Blame | None:
    """The blame if a rank goes on with other tensors, or other chunks, than were published."""
    for part in operation.parts.values():
        # a rank of another layout names its own manifest
        is_its = named(part) and ways.as_published(version, operation)
        recorded = version.recorded(part.shard) if is_its else None
        if recorded is not None and recorded[0] != part.member.begun_id:
            text = (
                f"{BEGUN} on rank {part.rank}, with another manifest than version "
                f"{version.number} was published with"
            )
            return Blame(ManifestMismatch(text, differences=(text,)), part.rank)
    return None


def abandoned(operation: Operation) -> Blame:
    model, version = operation.group.model, operation.bound
    text = (
        f"version {version.number} of {model.name!r}: {LEFT}; "
        f"ask again for a newer version, or retain versions that late readers need; "
        f"{held_text(model, operation)}"
    )
    return Blame(VersionUnavailable(text))


def selects_another(operation: Operation, version: Version) -> Blame:
    """The ranks call again by themselves. (A rank shows this error only if its caller has given up
    meanwhile.)
    """
    text = (
        f"version {version.number} of {operation.group.model.name!r}: what this call has read "
        f"is gone; call again"
    )
    return Blame(GroupAborted(text), again=True)


def gone(operation: Operation, error: VersionUnavailable) -> Blame:
    """The version of a call is no more. The ranks of a call by selector call again by themselves
    (R12).
    """
    return Blame(error) if operation.calls_number else Blame(GroupAborted(str(error)), again=True)


def outlived(operation: Operation) -> Blame | None:
    """Whether only this read-only call still keeps its version, and neither reads (as from a lost
    worker) nor has voted.
    """
    model, version = operation.group.model, operation.version
    assert version is not None
    if (
        not version.seen.outlived
        or operation.all_voted
        or any(part.leases for part in operation.parts.values())
    ):
        return None
    text = (
        f"version {version.number} of {model.name!r}: no worker holds it any more, and newer ones "
        f"were published; ask again"
    )
    return gone(operation, VersionUnavailable(f"{text}; {held_text(model, operation)}"))


def drifted(part: RankPart) -> tuple[int, int, str] | None:
    """Two shards that are to be equal, are not, and one of them is what this rank reads."""
    known, needs = part.operation.bound.drifted, (part.needs or ()) if part.bridges else ()
    found = (known[need.shard] for need in needs if need.shard in known)
    return part.proof.drifted or next(found, None)


def not_equal(operation: Operation, one: int, other: int, where: str) -> IntegrityError:
    version = operation.bound
    return IntegrityError(
        f"{operation.kind} of {operation.group.model.name!r}: version {version.number}: ranks "
        f"{one} and {other} of group "
        f"{version.publisher.group!r} have published the same part of "
        "the model, and their bytes differ"
        f"{where and f' ({where})'}: they are no replicas of each other any more. Look at what has "
        f"drifted there, make them "
        "equal, and publish again"
    )


def condemned(operation: Operation, part: RankPart) -> IntegrityError:
    return IntegrityError(
        f"{operation.kind} of {operation.group.model.name!r}: worker {part.member.worker.name!r} "
        f"has served chunks with "
        "other digests than were published, and does not say where they came from"
    )


def damaged(operation: Operation, part: RankPart) -> IntegrityError:
    """What several sources have sent this rank arrived with other bytes than the sources have."""
    sources, reader = ", ".join(map(repr, sorted(part.proof.exonerated))), part.member.worker.name
    return IntegrityError(
        f"{operation.kind} of {operation.group.model.name!r}: version {operation.bound.number}: "
        f"what rank {part.rank} got "
        f"from {sources} does not have its digest, and {UNCHANGED}. The machine "
        f"of worker {reader!r}, or the way to it, damages bytes: look at its memory and network, "
        f"or use another one"
    )


def unreadable(operation: Operation, part: RankPart) -> IntegrityError:
    """What is left of the version is damaged where it is kept."""
    there = "; ".join(dict.fromkeys(part.attempts.damaged.values()))
    return IntegrityError(
        f"{operation.kind} of {operation.group.model.name!r}: version {operation.bound.number} "
        f"cannot be read by rank {part.rank}, and no other worker has it: {there}. Restore that "
        f"object, or ask for another version",
        retryable=False,
    )


def named(part: RankPart) -> bytes:
    """The manifest that this rank's `resume` names, if the rank has sent it; else empty."""
    is_named = part.begun is not None and part.begun.manifest_id == part.member.begun_id
    return part.member.begun if is_named else b""


def nothing_available(operation: Operation, least: int, held: int | None) -> VersionUnavailable:
    """No version from `least` on has a complete copy. `held`: the newest version that a rank of the
    group holds.
    """
    model = operation.group.model
    what = (
        f"version {least} of {model.name!r} or a newer one"
        if least
        else f"a version of {model.name!r}"
    )
    text = f"no complete copy of {what} is held, {NO_AVAILABLE}"
    if held is None or held < least:
        return VersionUnavailable(f"{text}; {held_text(model, operation)}")
    mine = (
        f"a rank of this group holds version {held}, which 'available' never replaces by an "
        f"older one"
    )
    mine += ": call unpublish() on it first, or give the number of that version"
    return VersionUnavailable(f"{text}; {_told(model, operation)}; {mine}")


def held_text(model: Model, operation: Operation | None = None) -> str:
    """For an error: which versions of a model are held, by how many replicas, and which version the
    selector "available" gets.

    The ranks of `operation` are not told to fetch the version that they hold. Without it, the
    caller is taken to read any layout.
    """
    told, held = _told(model, operation), _readable(model)
    gets = next((v for v in held if _can_read(v, operation)), None)
    if gets is None or _is_own(gets, operation):
        return told
    return f"{told}; the selector 'available' gets {gets.number}"


def _told(model: Model, operation: Operation | None) -> str:
    held = _readable(model)
    if not held:
        if any(v.visible and v.is_held for v in model.versions.values()):
            return "workers that are not heard of now hold a version of it"
        return f"held now: no complete copy{_lacking(model)}"
    told = ", ".join(
        f"version {v.number} by {_replicas(v, operation)}" for v in held[:HELD_TOLD_MAX]
    )
    more = f" and {len(held) - HELD_TOLD_MAX} older" if len(held) > HELD_TOLD_MAX else ""
    return f"held now: {told}{more}"


def _lacking(model: Model) -> str:
    """The missing shards of the newest version of which some shards of a layout are held."""
    for version in _not_retired(model):
        for layout in version.layouts:
            missing = [str(shard) for shard in layout if not layout.of(shard).live_sources]
            if len(missing) < len(layout):
                whose = (
                    "the published layout"
                    if layout is version.holdings
                    else "another layout than the published one"
                )
                return (
                    f" (of version {version.number}, in {whose}, no worker has all of the shards "
                    f"of ranks {some(missing)})"
                )
    return ""


def _readable(model: Model) -> list[Version]:
    """Those that can be read now, the newest first."""
    return [v for v in _not_retired(model) if v.copies]


def _not_retired(model: Model) -> list[Version]:
    """The newest first, without those that a rollback is about to retire."""
    mark = -1 if model.mark is None else model.mark
    return [v for v in model.visible if v.number <= mark]


def _can_read(version: Version, operation: Operation | None) -> bool:
    return operation is None or ways.of(version, operation).can_be_read


def _is_own(version: Version, operation: Operation | None) -> bool:
    """Whether the ranks of the group that calls have a whole copy of it themselves."""
    held = (
        [member.holding for member in operation.group.members.values()]
        if operation is not None
        else []
    )
    mine = [
        h
        for h in held
        if h is not None
        and h.version is version
        and h.is_source
        and h.member.worker.state is WorkerState.LIVE
    ]
    return bool(mine) and {h.shard for h in mine} == set(mine[0].layout)


def _replicas(version: Version, operation: Operation | None) -> str:
    own = _is_own(version, operation)
    count = version.copies - own
    if own and not count:
        return "this group itself"
    told = (
        "this group and " if own else ""
    ) + f"{count} {'other ' if own else ''}replica{'' if count == 1 else 's'}"
    if version.can_be_read():
        return told
    told = f"{told} of other layouts than the published one"
    return told if _can_read(version, operation) else f"{told}, which this call cannot read"


def only_elsewhere(operation: Operation, version: Version) -> str:
    """Which layouts hold a version, if neither the published layout nor that of the call is among
    them; else empty.
    """
    way, found = ways.of(version, operation), list[str]()
    if not way.is_known and way.layout is not None and way.layout.have_sources():
        return (
            f"version {version.number} of {operation.group.model.name!r} is held in the layout of "
            f"this call only, and no "
            "worker that is back since the coordinator's restart has said which rank had published "
            "what: publish it again. "
            "A worker that runs `tensorhub seed` keeps the published layout"
        )
    if way.has_holders:
        return ""
    for layout in version.others.values():
        groups = sorted(
            {
                holding.member.group.name
                for there in layout.values()
                for holding in there
                if holding.is_source
            }
        )
        if layout.have_sources():
            found.append(f"{layout.layout_id} of {some([f'group {name!r}' for name in groups])}")
    if not found:
        return ""
    reads = "the published layout" if way.published is None else "the published layout or its own"
    return (
        f"version {version.number} of {operation.group.model.name!r} is held in other layouts only "
        f"({some(found)}), and "
        f"this call reads {reads}: publish it again. A worker that runs `tensorhub seed`, or an "
        f"archive, keeps the "
        "published layout, which readers of every layout can read"
    )
