"""Readers that do not read what was published in its own layout: what they need, and from whom they have it.

Theory of operation. Such a rank either *follows* a holder of its own layout, chunk by chunk of its own grid, or it
*bridges*: it reads a selection of one shard of each class that it needs (`Need`). Who finds a holder of its own layout
within its site follows that one, also while that is filled itself. So one group of a layout bridges in a site, and the
others follow it. The ranks of a group choose each for itself.

Whoever is read across layouts is complete, or is filled from what was published. So nobody waits in a circle.

Responsible for checking what a rank says that it needs, and for that choice. Not responsible for leases (`readers`), nor for
plans, which the readers make.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from tensorhub.coordinator import limits
from tensorhub.coordinator.entities import Group, Holding, Member, RankPart, Version
from tensorhub.coordinator.layout_holdings import PARTS
from tensorhub.errors import ManifestMismatch, StateError, TensorHubError
from tensorhub.layouts.identity import ALONE
from tensorhub.messages import Need, ReadyToWrite
from tensorhub.types import READ_ONLY

Source = tuple[Need | None, Holding]  # for which need; None: for everything
OF_ITS_OWN = ("own/", "ranks/")  # how the ids of layouts begin whose ranks know which part of the model they have


def choose(part: RankPart, needs: Sequence[Need], best: Callable[[Need | None], Holding | None]) -> list[Source]:
    """From whom it has these, as far as somebody has them. `best`: the best source for a need, or of its own layout."""
    own = best(None)
    if own is not None and own.member.worker.location.site == part.member.worker.location.site:
        return [(None, own)]
    bridged = [(need, found) for need in needs if (found := best(need)) is not None]
    return [(None, own)] if own is not None and len(bridged) < len(needs) else list[Source](bridged)


def are_enough(sources: Iterable[Source], needs: Sequence[Need]) -> bool:
    """Whether these bring all that is needed."""
    found = list(sources)
    return any(need is None for need, _ in found) or len(found) == len(needs)


def misfit(group: Group, version: Version) -> ManifestMismatch | None:
    """Why that group can never read a version that has another layout, if it cannot. Whether names and shapes fit, its ranks
    find out.
    """
    info = version.info
    theirs = f"version {info.version} of {info.model!r} (layout {version.layout_id!r} over {info.world_size} rank(s))"
    mine = f"group {group.name!r} (layout {group.layout!r} over {group.world_size})"
    parts, unsaid = version.holdings.parts, "has plain tensors, and nobody has said which part of the model each rank has"
    if group.layout != ALONE and not group.layout.startswith(OF_ITS_OWN):
        text, who = f"{mine} {unsaid}; {theirs} has another layout", "that group"
    elif version.info.world_size > 1 and version.holdings.is_described and not any(parts.values()):
        text, who = f"{theirs} {unsaid}; {mine} has another layout", "the publisher"
    else:
        return None
    text += f": let {who} say so with sources= or DTensors, or take equal ranks on both sides (fetch: rank=)"
    return ManifestMismatch(text, differences=(text,))


def as_known(member: Member, version: Version, parts: tuple[bytes, ...]) -> tuple[bytes, ...] | None:
    """What this rank says of which part of the model it holds, in the layout in which that was published. None: it does not
    know that; it has read this from others, and nobody had told it.
    """
    has_own = version.layout_id if member.fits_any_layout else member.said.layout_id
    return parts if parts or not has_own.startswith(OF_ITS_OWN) else None


def check(part: RankPart, said: ReadyToWrite, selections: int) -> TensorHubError | None:
    """Why this rank cannot need that, or have it there, if it cannot. `selections`: how many there are in all."""
    needs, version = said.needs, part.operation.bound
    known = part.layout.needs.get(part.shard)
    who = f"rank {part.rank} of group {part.member.group.name!r}"
    shards = [need.shard for need in needs]
    strange = [shard for shard in shards if shard not in version.holdings.classes]
    if strange:
        return StateError(f"{who} reads shard {strange[0]} of version {version.number}: no class of shards is named so")
    if len(set(shards)) < len(shards):
        return StateError(f"{who} names a class of shards twice")
    if known is not None and known != needs:
        return StateError(f"{who} needs other chunks than others of the layout {part.layout.layout_id}, which fill it too")
    if part.member.said.serves and len(said.part_ids) != PARTS:
        return StateError(f"{who} does not say where in its memory that lies")
    new = sum((need.shard, need.selection) not in version.selections for need in needs)
    if selections + new > limits.SELECTIONS_MAX:
        return StateError(
            f"{who}: there are {selections} selections of other layouts already (SELECTIONS_MAX)", retryable=True
        )
    return None


def disagreement(part: RankPart, needs: Sequence[Need]) -> StateError | None:
    """Others have said that one of these selections is another one. Its name is a hash of what it is, so somebody is
    wrong, and no list of digests would ever do for both.
    """
    version = part.operation.bound
    for need in needs:
        known = version.selections.get((need.shard, need.selection))
        if known is None or known.need is None or known.need == need:
            continue
        theirs = [each for each in version.others.values() if any(known.need in its for its in each.needs.values())]
        are_read_only = all(each.layout_id.startswith(READ_ONLY) for each in theirs)
        if not theirs or (are_read_only and not part.member.worker.read_only):
            continue  # what a read-only worker has said gives way
        return StateError(
            f"rank {part.rank} of group {part.member.group.name!r} says that the selection {need.selection} of shard "
            f"{need.shard} of version {version.number} has {need.chunks} chunks of {need.nbytes} bytes; who reads as "
            f"{' or '.join([each.layout_id for each in theirs][:3])} says {known.need.chunks} of {known.need.nbytes}: "
            "one of them cuts it wrongly, so look whether both run the same release",
            retryable=True,
        )
    return None
