"""What a reader lacks, and what an undecided operation waits for: questions about entities, which
change nothing.

An operation is found by what it waits for, without a look at all operations. Not responsible for
waking operations (`Cluster.wake`), for deadlines (`operations`), nor for which source is best
(`source_choice`).
"""

from __future__ import annotations

from collections.abc import Callable

from tensorhub.coordinator.entities import Holding, Operation, RankPart, ReadLease
from tensorhub.coordinator.states import OperationState, PartState
from tensorhub.messages import Fill, Need
from tensorhub.types import AVAILABLE, OpKey, OpKind

# Names of their own, since Python 3.11 takes long to look up a member of an enum.
_PREPARED, _CLAIMING, _PUBLISH = OperationState.PREPARED, PartState.CLAIMING, OpKind.PUBLISH


def yields(part: RankPart, holding: Holding) -> bool:
    """Whether the reader does not count as one that shares the source's uplink. A slow reader takes
    little of the uplink. A seed or a prefetch in another site stalls no worker, and leaves the
    source to the readers of the source's site.
    """
    reader, source = part.member.worker, holding.member.worker
    is_far = reader.location.site != source.location.site
    return reader.slowness > 0 or (is_far and part.operation.kind is OpKind.PREFETCH)


def lasts(lease: ReadLease) -> bool:
    """Whether everything that the lease is for comes through it."""
    return lease.holding.is_fed and not (lease.dropping or lease.partial)


def is_spare(lease: ReadLease) -> bool:
    """Whether its reader does without it: its other lasting leases bring everything."""
    part = lease.part
    if part.bridges:
        return not lacking(part, without=lease)
    return any(lasts(each) for each in part.leases.values() if each is not lease)


def lacking(part: RankPart, without: ReadLease | None = None) -> list[Need]:
    """The part's needs without a source in the published layout. A source of its own layout covers
    all needs.
    """
    lasting = [lease for lease in part.leases.values() if lasts(lease) and lease is not without]
    if any(lease.need is None for lease in lasting):
        return []
    covered = {lease.need.shard for lease in lasting if lease.need is not None}
    return [need for need in _reads_now(part) if need.shard not in covered]


def _reads_now(part: RankPart) -> tuple[Need, ...]:
    """All that it needs of other layouts; or what it reads again, since the rest is there."""
    return (part.needs or ()) if part.proof.rereads is None else (part.proof.rereads,)


def wants_source(part: RankPart) -> bool:
    """Whether it needs a source that is filled from a complete copy, or is one."""
    return part.reads and _lacks_source(part)


def _lacks_source(part: RankPart) -> bool:
    return bool(lacking(part)) if part.bridges else not any(map(lasts, part.leases.values()))


def needs_source(part: RankPart) -> bool:
    """Whether the reader has no such source, or no rank holds all of the shard."""
    return part.reads and (_lacks_source(part) or not can_be_whole(part))


def can_be_whole(part: RankPart) -> bool:
    """Whether all that the part reads is held as a whole, committed or not."""
    if part.layout.is_whole(part.shard):
        return True
    if not part.bridges or part.needs is None:
        return False
    published = part.operation.bound.holdings
    return published.are_whole() or all(published.is_class_whole(need.shard) for need in part.needs)


def is_to_move(part: RankPart) -> bool:
    """Whether a read-only worker reads there from a source that leaves. It gets another source when
    there is one.
    """
    if not part.member.worker.read_only:
        return False
    return any(lease.holding.leaving and not lease.dropping for lease in part.leases.values())


def is_filled_by(holding: Holding, trusted: Callable[[Holding], bool]) -> bool:
    """Whether all that it lacks comes from holdings of which that is so."""
    lasting = [lease for lease in holding.fillers if not lease.dropping]
    if any(lease.need is None and trusted(lease.holding) for lease in lasting):
        return True
    part = holding.member.part
    if (
        not holding.bridges
        or part is None
        or part.holding is not holding
        or part.needs is None
        or not part.reads
    ):
        return False
    fed = {
        lease.need.shard for lease in lasting if lease.need is not None and trusted(lease.holding)
    }
    is_idle = holding.leaving and not part.needs  # a part without needs has no lease
    return not is_idle and all(need.shard in fed for need in _reads_now(part))


def reads_across(holding: Holding) -> bool:
    """Whether it is being filled from holders of another layout."""
    return any(lease.need is not None for lease in holding.fillers)


def waits_in(operation: Operation) -> list[dict[OpKey, Operation]]:
    """Where it is found by what it waits for. (A rank's own words need not find it.)"""
    model, version = operation.group.model, operation.version
    if operation.decided or not operation.gathered or operation.state is _PREPARED:
        return []
    found = []
    is_open = version is None or operation.is_starving or not operation.writing
    if operation.staying or operation.grace_until is not None or operation.kind is _PUBLISH:
        found.append(model.waiting.restless)
    if is_of_available(operation) and is_open and not operation.unchanged:
        found.append(model.waiting.flexible)
    if version is None:
        found.append(model.waiting.unbound)
        if next(iter(operation.parts.values())).member.is_of_one_shard:
            found.append(model.waiting.unbound_copies)
    elif operation.is_starving:
        found.append(version.starving)
        if any(part.attempts.damaged for part in operation.parts.values()):
            found.append(model.waiting.forlorn)
    return found


def starves(operation: Operation) -> bool:
    """Whether some rank lacks a source that stays, or agreement on its digests; not yet begun,
    whether all are ready.
    """
    # Of hundreds of ranks mostly one has said something: the results for all other ranks still
    # hold.
    parts = (
        operation.parts.values()
        if operation.is_starving or operation.news is None
        else operation.news
    )
    fills = operation.kind is not _PUBLISH
    if (
        fills
        and not operation.writing
        and not operation.unchanged
        and all(part.ready for part in operation.parts.values())
    ):
        return True
    return any(part.state is _CLAIMING or needs_source(part) or is_to_move(part) for part in parts)


def awaits_hook(part: RankPart) -> bool:
    """Whether nothing was overwritten so far, because its before_write has not returned."""
    return isinstance(part.call, Fill) and part.call.hold and not part.ready


def awaits_agreement(operation: Operation) -> bool:
    """Whether some rank's vote does not count yet."""
    return any(part.state is _CLAIMING for part in operation.parts.values())


def is_of_available(operation: Operation) -> bool:
    """Whether its ranks ask for "available", which depends on the workers that are heard."""
    call = next(iter(operation.parts.values())).call
    return isinstance(call, Fill) and call.selector == AVAILABLE
