"""When an operation's ranks give up, and the error that says what they have waited for in vain.

Not responsible for ending the operation: `operations` asks what is to blame, and `decisions` aborts.
"""

from __future__ import annotations

from dataclasses import dataclass

from tensorhub.coordinator import ways
from tensorhub.coordinator.cluster import Cluster
from tensorhub.coordinator.entities import Operation, RankPart, Version
from tensorhub.coordinator.fills import Fills
from tensorhub.coordinator.operation_handlers import Blame
from tensorhub.coordinator.refusals import damaged, held_text
from tensorhub.coordinator.retention import Retentions
from tensorhub.coordinator.states import OperationState
from tensorhub.coordinator.supply import needs_source
from tensorhub.coordinator.versions import Versions
from tensorhub.errors import IntegrityError, OperationTimeout, VersionUnavailable, some
from tensorhub.messages import Fill
from tensorhub.types import OpKind

FAULTS_TOLD_MAX = 3  # in an error
RANKS_TOLD_MAX = 16


@dataclass(eq=False, repr=False)
class Deadlines:
    """Sets operations' deadlines and explains them; changes nothing else."""

    _cluster: Cluster
    _versions: Versions
    _retentions: Retentions
    _fills: Fills

    def set(self, operation: Operation) -> None:
        """The earliest deadline of the ranks that may still give up."""
        deadlines = [part.deadline for part in _impatient(operation)]
        if deadlines:
            self._cluster.timers.set("operation", operation.name, min(deadlines))
        else:
            self._cluster.timers.cancel("operation", operation.name)

    def passed(self, operation: Operation) -> Blame:
        """What was waited for in vain."""
        late = min(_impatient(operation), key=lambda part: part.deadline)
        what = f"{operation.kind} of {operation.group.model.name!r}"
        if not operation.gathered:
            return self._not_called(operation, late, what)
        if isinstance(late.call, Fill) and (not operation.writing or operation.all_voted):
            blame = self._not_begun(operation, late.call, what)
            if blame is not None:
                return blame
        return self._not_verified(operation, late, f"{what}: version {operation.bound.number}")

    @staticmethod
    def _not_called(operation: Operation, late: RankPart, what: str) -> Blame:
        group = operation.group
        missing = sorted(set(range(group.world_size)) - set(operation.parts))
        named = missing[:RANKS_TOLD_MAX]
        ranks = ", ".join(f"{rank}{'' if rank in group.members else ' (not registered)'}" for rank in named)
        ranks += f" and {len(missing) - len(named)} more" if len(missing) > len(named) else ""
        text = (
            f"{what}: waited {_rounded(late.call.timeout_s)} s for group {group.name!r}; these ranks did not call: {ranks}"
        )
        return Blame(OperationTimeout(text))

    def _not_begun(self, operation: Operation, call: Fill, what: str) -> Blame | None:
        """Nothing was overwritten: because what the ranks hold had to stay, or there was no source to begin with."""
        bound = operation.version
        try:
            target = bound or self._fills.target(operation)
        except VersionUnavailable as unavailable:
            return Blame(unavailable)
        if target is not None and ways.find(self._cluster, target, operation) is not None:
            staying = self._fills.staying(operation, target)
            if staying:
                error = self._retentions.refusal(staying[0], f"{what} to version {target.number}: nothing was written: ")
                return Blame(error, staying[0].rank, tuple(h.rank for h in staying[1:]))
        if bound is None:
            why = self._versions.waiting_text(operation.group.model, call.selector, call.at_least, operation)
            if operation.resumes is not None and target is not None:
                why = f"version {target.number} has lost its last source, none came back in time"
                why += f"; {held_text(operation.group.model, operation)}"
            return Blame(VersionUnavailable(f"{what}: {why}; waited {_rounded(call.timeout_s)} s"))
        return self._sourceless(operation, bound, what)

    def _sourceless(self, operation: Operation, version: Version, what: str) -> Blame | None:
        if not ways.serve(operation):
            text = f"{what}: version {version.number} has lost its last source; none came back in time"
        elif self._fills.first_sources(operation) is None:
            text = f"{what}: no holder of version {version.number} can be reached now (silent, full, or it has just failed)"
        else:
            return None  # a rank's hook takes its time
        return Blame(VersionUnavailable(f"{text}; {held_text(operation.group.model, operation)}"))

    @staticmethod
    def _not_verified(operation: Operation, late: RankPart, what: str) -> Blame:
        """Some rank has not read all of it: by bad bytes, without a source, or too slowly."""
        parts = operation.parts.values()
        for part in parts:
            if not part.voted and part.faults and all(reason == "corrupt" for reason, _ in part.faults.values()):
                return Blame(damaged(operation, part) if part.exonerated else _corrupt(what, part), part.rank)
        unsure = sorted(part.rank for part in parts if part.claim is not None)
        if unsure:
            text = f"{what} is in place on rank(s) {unsure}, but nobody said in time which digests its publisher has made"
            return Blame(OperationTimeout(text))
        asked = (
            sorted(part.rank for part in parts if part.checks and part.rank not in operation.agree)
            if operation.kind is OpKind.PUBLISH
            else []
        )
        if asked:
            text = f"{what}: rank(s) {asked} did not check in time whether the ranks publish one whole version"
            return Blame(OperationTimeout(text))
        starving = [part for part in parts if needs_source(part)]
        if starving:
            text = f"{what} has lost its last source{_gone(starving)}, none came back in time"
            return Blame(VersionUnavailable(f"{text}{_faults(starving)}; {held_text(operation.group.model, operation)}"))
        slow = sorted((part for part in parts if not part.voted), key=lambda part: part.rank)
        text = f"{what} was not complete after {_rounded(late.call.timeout_s)} s on rank(s) {[part.rank for part in slow]}"
        return Blame(OperationTimeout(text + _faults(slow)))


def _rounded(seconds: float) -> str:
    """What was left of a call's time when its rank asked, for people."""
    return f"{round(seconds, 1 if seconds > 1 else 3):g}"


def _impatient(operation: Operation) -> list[RankPart]:
    """The ranks that may still give up: none once the operation is prepared, and in a fill none that has voted (R6). But all
    of them may, if a staged update waits until its ranks may give up what they hold.
    """
    if operation.state is OperationState.PREPARED:
        return []
    waits = operation.all_voted and operation.kind is not OpKind.PUBLISH and operation.is_staged
    voted_too = waits or operation.kind is OpKind.PUBLISH
    return [part for part in operation.parts.values() if voted_too or not part.voted]


def _corrupt(what: str, part: RankPart) -> IntegrityError:
    return IntegrityError(
        f"{what}: every source that rank {part.rank} tried sent bytes that do not have their digest{_faults([part])}. "
        "Either the source's memory was written after it was published (by a way that torch does not count), or a "
        "machine or the way damages bytes: have it published anew, then call again"
    )


def _gone(starving: list[RankPart]) -> str:
    """Which shards nobody has all of, of those that these ranks read: for an error."""
    shards = set[int]()
    for part in starving:
        if part.origin is not None and part.needs is not None:
            shards.update([need.shard for need in part.needs if not part.origin.is_class_whole(need.shard)])
        elif not part.layout.is_whole(part.shard):
            shards.add(part.shard)
    ranks = sorted([part.rank for part in starving])[:RANKS_TOLD_MAX]
    if not shards:
        return f" (rank(s) {ranks})"
    return f" of shard {some(list(map(str, sorted(shards))))}, which rank(s) {ranks} read"


def _faults(parts: list[RankPart]) -> str:
    """How these ranks' sources failed last, for an error."""
    told = list(dict.fromkeys([text for part in parts for _, text in part.faults.values()]))[:FAULTS_TOLD_MAX]
    return f"; reads that failed: {'; '.join(told)}" if told else ""
