"""What an undecided operation waits for: where it is found when that comes, without a look at all others.

Responsible for these questions. Not responsible for who is woken (`Cluster.wake`), nor for how long (`deadlines`).
"""

from __future__ import annotations

from tensorhub.coordinator.entities import Operation
from tensorhub.coordinator.states import OperationState
from tensorhub.coordinator.supply import is_to_move, needs_source
from tensorhub.messages import Fill
from tensorhub.types import AVAILABLE, OpKey, OpKind


def waits_in(operation: Operation) -> list[dict[OpKey, Operation]]:
    """Where it is found by what it waits for. (A rank's own words need not find it.)"""
    model, version = operation.group.model, operation.version
    if operation.decided or not operation.gathered or operation.state is OperationState.PREPARED:
        return []
    found = []
    is_open = version is None or operation.is_starving or not operation.writing
    if operation.staying or operation.grace_until is not None or operation.kind is OpKind.PUBLISH:
        found.append(model.restless)
    if is_of_available(operation) and is_open and not operation.unchanged:
        found.append(model.flexible)
    if version is None:
        found.append(model.unbound)
        if next(iter(operation.parts.values())).member.is_of_one_shard:
            found.append(model.unbound_copies)
    elif operation.is_starving:
        found.append(version.starving)
    return found


def starves(operation: Operation) -> bool:
    """Whether some rank lacks a source that stays, or agreement on its digests; not yet begun, whether all are ready."""
    # Of hundreds of ranks mostly one has said something: what was said of the others still is so.
    parts = operation.parts.values() if operation.is_starving or operation.news is None else operation.news
    fills = operation.kind is not OpKind.PUBLISH
    if fills and not operation.writing and not operation.unchanged and all(part.ready for part in operation.parts.values()):
        return True
    return any(part.claim is not None or needs_source(part) or is_to_move(part) for part in parts)


def awaits_agreement(operation: Operation) -> bool:
    """Whether some rank's vote does not count yet."""
    return any(part.claim is not None for part in operation.parts.values())


def is_of_available(operation: Operation) -> bool:
    """Whether its ranks ask for "available", which depends on who is heard of."""
    call = next(iter(operation.parts.values())).call
    return isinstance(call, Fill) and call.selector == AVAILABLE
