"""What `describe` counts of a model. Changes nothing.

The counts are made when somebody asks, in one pass over the model's groups. So they cost nothing while nobody asks, and
cannot be wrong.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from heapq import nlargest, nsmallest

from tensorhub.coordinator import limits
from tensorhub.coordinator.entities import Model, Operation, RankPart, Replica, Version
from tensorhub.coordinator.states import OperationState, ReplicaState, WorkerState
from tensorhub.coordinator.supply import reads_across
from tensorhub.types import CallsSummary, LayoutSummary, ModelSummary, OpKind, SilentWorker, VersionSummary

Waiting = tuple[str, str, float, str]  # a call, what it waits for, since when, whose call it is


def summarize(model: Model, now: float) -> tuple[ModelSummary, dict[int, VersionSummary]]:
    """Its workers, the calls that are under way, and the replicas of its newest versions, by number."""
    workers = {m.worker.incarnation: m.worker for g in model.groups.values() for m in g.members.values()}
    suspects = [worker for worker in workers.values() if worker.state is not WorkerState.LIVE]
    replicas: dict[Version, _Replicas] = {version: _Replicas() for version in model.versions.values()}
    for group in model.serving.values():
        for replica in group.replicas:
            if replica.version not in replicas:
                replicas[replica.version] = _Replicas()
            replicas[replica.version].add(replica)
    summary = ModelSummary(
        workers=len(workers),
        suspect=len(suspects),
        groups=len(model.groups),
        shards=sum(each.shards for each in replicas.values()),
        reads=len(model.leases),
        versions_known=len(model.versions),
        calls=_calls(_waiting(model), now),
        silent=tuple(
            SilentWorker(worker.name, worker.incarnation, max(0.0, now - worker.heard_at))
            for worker in nsmallest(limits.SUMMARIZED_SILENT_MAX, suspects, key=lambda worker: worker.heard_at)
        ),
    )
    newest = nlargest(limits.SUMMARIZED_VERSIONS_MAX, model.versions.values(), key=lambda version: version.number)
    return summary, {version.number: replicas[version].summary(version) for version in newest}


@dataclass(slots=True)
class _Replicas:
    """The replicas of one version, counted."""

    states: list[ReplicaState] = field(default_factory=list)  # of each
    by_layout: dict[str, list[Replica]] = field(default_factory=dict)  # those of which memory is left
    shards: int = 0
    doubtful: int = 0
    quarantined: int = 0
    readers: int = 0

    def add(self, replica: Replica) -> None:
        self.states.append(replica.state)
        for layout_id in {holding.layout.layout_id for holding in replica.holdings.values()}:
            self.by_layout.setdefault(layout_id, []).append(replica)
        for holding in replica.holdings.values():
            self.shards += 1
            self.readers += holding.active_readers
            if holding.quarantined:
                self.quarantined += 1
            elif holding.member.worker.state is not WorkerState.LIVE:
                self.doubtful += 1

    def summary(self, version: Version) -> VersionSummary:
        return VersionSummary(
            copies=version.copies,
            ready=self.states.count(ReplicaState.READY),
            filling=self.states.count(ReplicaState.FILLING),
            draining=self.states.count(ReplicaState.DRAINING),
            torn=self.states.count(ReplicaState.TORN),
            doubtful=self.doubtful,
            quarantined=self.quarantined,
            readers=self.readers,
            layouts_known=len(self.by_layout),
            layouts=tuple(self._layouts(version)),
            missing=len(version.holdings.missing()),
        )

    def _layouts(self, version: Version) -> Iterator[LayoutSummary]:
        """Nothing, where there is only the published one."""
        if self.by_layout.keys() <= {version.layout_id}:
            return
        in_order = sorted(self.by_layout.items(), key=lambda item: (item[0] != version.layout_id, -len(item[1]), item[0]))
        for layout_id, replicas in in_order[: limits.SUMMARIZED_LAYOUTS_MAX]:
            held = [holding for replica in replicas for holding in replica.holdings.values()]
            yield LayoutSummary(
                layout_id,
                layout_id == version.layout_id,
                replicas=len(replicas),
                ready=sum(replica.state is ReplicaState.READY for replica in replicas),
                bridging=len({id(holding.member.group) for holding in held if reads_across(holding)}),
                shards=len(held),
                chunks=sum(holding.chunks for holding in held),
                chunks_verified=sum(holding.chunks_verified for holding in held),
            )


def _calls(waiting: Iterable[Waiting], now: float) -> tuple[CallsSummary, ...]:
    """As many rows as there are kinds of calls and things to wait for."""
    rows: dict[tuple[str, str], tuple[int, float, str]] = {}
    for call, waits_for, since, who in waiting:
        count, longest_since, longest_who = rows.get((call, waits_for), (0, math.inf, ""))
        longest = (since, who) if since < longest_since else (longest_since, longest_who)
        rows[call, waits_for] = count + 1, *longest
    in_order = sorted(rows.items(), key=lambda item: (item[1][1], item[0]))
    return tuple(
        CallsSummary(call, waits_for, count, max(0.0, now - since), who)
        for (call, waits_for), (count, since, who) in in_order
    )


def _waiting(model: Model) -> Iterator[Waiting]:
    """The model's calls that are under way."""
    for group in model.groups.values():
        if group.operation is not None:
            waits_for, parts = _waits_for(group.operation)
            since = min((part.moved_at for part in parts), default=0.0)
            yield group.operation.kind.value, waits_for, since, group.name
    for withdrawal in model.withdrawals.values():
        waits_for = "readers" if withdrawal.begun else "successor"
        yield "leave", waits_for, withdrawal.asked_at, withdrawal.holding.member.worker.name
    for waits_for, writes in (("store", model.rollbacks), ("holders", model.unanswered)):
        for write in writes:
            yield type(write.message).__name__.lower(), waits_for, write.asked_at, ""


def _waits_for(operation: Operation) -> tuple[str, list[RankPart]]:
    """What an undecided operation waits for, and the parts of it that do; see `CallsSummary`."""
    parts = list(operation.parts.values())
    if not operation.gathered:
        return "ranks", parts
    if operation.staying:
        return "successor", parts
    if operation.version is None:
        return "version", parts
    if operation.state is OperationState.PREPARED or operation.kind is OpKind.PUBLISH:
        return "store", parts
    if not operation.writing:
        unready = [part for part in parts if not part.ready]
        if unready:
            return "before_write", unready
        return "store" if operation.all_voted else "source", parts
    reading = [part for part in parts if part.reads]
    starving = [part for part in reading if not part.leases]
    if reading:
        return ("source", starving) if starving else ("chunks", reading)
    claiming = [part for part in parts if part.claim is not None]
    return ("digests", claiming) if claiming else ("store", parts)
