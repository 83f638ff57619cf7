"""What `describe` shows: the coordinator's knowledge of a model as plain values. Changes nothing.

A large model is told in parts, by its workers' names: each part has so many rows, and costs as much, however large the model
is. (Only to find the next workers, each part looks at all of the model's registrations.)
"""

from __future__ import annotations

from dataclasses import dataclass, field
from heapq import heapify, heappop

from tensorhub.coordinator import limits
from tensorhub.coordinator.cluster import Cluster
from tensorhub.coordinator.entities import Holding, Member, Model, ReadLease, Replica, Worker
from tensorhub.coordinator.states import WorkerState
from tensorhub.coordinator.summaries import summarize
from tensorhub.coordinator.supply import reads_across
from tensorhub.types import (
    MISSING_TOLD_MAX,
    LeaseView,
    ModelInfo,
    ModelSummary,
    ReplicaView,
    ShardView,
    VersionSummary,
    VersionView,
    WorkerView,
)

Place = tuple[str, str | None]  # among workers: a name and an incarnation; None: after all of that name
Found = tuple[ModelInfo, bool]  # a part of a model, and whether the rest is still to be told


def page(cluster: Cluster, after: str | None, workers_max: int | None = None) -> tuple[tuple[ModelInfo, ...], bool, bool]:
    """The models after that name, as many as one answer has room for but one at least; whether there are more; and whether
    the last of them is told in part.
    """
    models, entries, counted = list[ModelInfo](), 0, 0
    for model in cluster.models_after(after):
        if entries >= limits.DESCRIBED_MAX or counted >= limits.SUMMARIZED_MAX:
            return tuple(models), True, False
        info, is_cut = describe(model, cluster.now, workers_max=workers_max)
        models.append(info)
        if is_cut:
            return tuple(models), True, True
        shards = sum(len(replica.shards) for replica in info.replicas)
        entries += 1 + len(info.versions) + len(info.replicas) + shards + len(info.leases) + len(info.workers)
        counted += 0 if info.summary is None else info.summary.groups + info.summary.shards
    return tuple(models), False, False


def describe(
    model: Model, now: float, version: int | None = None, after: Place | None = None, workers_max: int | None = None
) -> Found:
    """Versions, replicas, leases and workers of one model, each in a stable order. The first part has the counts, too,
    unless it is a page of so many workers.

    With `version`, only what concerns it. Of the workers after a place, the next `workers_max` (None: all; 0: counts only),
    with what they hold and read; fewer, if there are too many rows. With the last worker come torn replicas of which no
    memory is left, and leases of lost readers.
    """
    rows = _Rows(model, version)
    is_cut = workers_max != 0 and rows.add(after, workers_max)
    counts = None if after is not None or workers_max else summarize(model, now)
    return _info(rows, counts, counts_only=workers_max == 0), is_cut


@dataclass(slots=True)
class _Rows:
    """What is told of workers."""

    model: Model
    version: int | None
    shards: dict[Replica, list[Holding]] = field(default_factory=dict)
    leases: list[ReadLease] = field(default_factory=list)
    workers: list[Worker] = field(default_factory=list)

    def add(self, after: Place | None, workers_max: int | None) -> bool:
        """The rows of the next workers; whether there are further ones."""
        model, version = self.model, self.version
        known = _members(model)
        ahead = [(members[0].worker.name, incarnation) for incarnation, members in known.items()]
        if after is not None:
            ahead = [place for place in ahead if (place > after if after[1] is not None else place[0] > after[0])]
        heapify(ahead)
        rows = 0
        while ahead and rows < limits.DESCRIBED_ROWS_MAX and (workers_max is None or len(self.workers) < workers_max):
            members = known[heappop(ahead)[1]]
            replicas = ((replica, member.rank) for member in members for replica in member.group.replicas)
            held = [
                holding for replica, rank in replicas if (holding := replica.holdings.get(rank)) and _is_of(holding, version)
            ]
            read = [lease for m in members for lease in m.reads.values() if _is_of(lease.holding, version)]
            if version is None or held or read:
                self.workers.append(members[0].worker)
                self.leases += read
                for holding in held:
                    self.shards.setdefault(holding.replica, []).append(holding)
                rows += 1 + len(held) + len(read)
        if not ahead:
            for replica in (replica for group in model.serving.values() for replica in group.replicas):
                if not replica.holdings and version in (None, replica.version.number):
                    self.shards[replica] = []
            for lease in model.leases.values():
                reader = lease.part.member
                if reader.group.members.get(reader.rank) is not reader and _is_of(lease.holding, version):
                    self.leases.append(lease)
        return bool(ahead)


def _members(model: Model) -> dict[str, list[Member]]:
    """Its registrations by their workers' incarnations."""
    found: dict[str, list[Member]] = {}
    for group in model.groups.values():
        for member in group.members.values():
            found.setdefault(member.worker.incarnation, []).append(member)
    return found


def _is_of(holding: Holding, version: int | None) -> bool:
    return version is None or holding.version.number == version


def _info(rows: _Rows, counts: tuple[ModelSummary, dict[int, VersionSummary]] | None, *, counts_only: bool) -> ModelInfo:
    model, retained = rows.model, rows.model.retained()
    summary, by_version = counts or (None, {})
    told = [number for number in (by_version if counts_only else model.versions) if rows.version in (None, number)]
    versions = tuple(
        VersionView(
            version=v.number,
            content_id=v.info.content_id,
            state=v.state.value,
            nbytes=v.info.nbytes,
            world_size=v.info.world_size,
            lineage=v.lineage,
            retained=v.number in retained,
            layout_id=v.layout_id,
            missing=tuple(v.holdings.missing()[:MISSING_TOLD_MAX]),
            summary=by_version.get(v.number),
        )
        for v in (model.versions[number] for number in sorted(told))
    )
    in_order = sorted(rows.shards, key=lambda replica: (replica.group.name, replica.version.number, replica.id))
    return ModelInfo(
        model.name,
        model.lineage,
        model.mark,
        model.retain,
        versions,
        tuple(_replica(replica, rows.shards[replica]) for replica in in_order),
        tuple(_lease(lease) for lease in rows.leases),
        tuple(WorkerView(w.name, w.incarnation, w.state.value, w.location, w.endpoints) for w in rows.workers),
        summary,
    )


def _lease(lease: ReadLease) -> LeaseView:
    return LeaseView(
        lease=lease.id,
        reader=lease.part.member.worker.name,
        source=lease.holding.member.worker.name,
        version=lease.holding.version.number,
        rank=lease.holding.shard,
        state=lease.state.value,
        across=lease.need is not None,
    )


def _replica(replica: Replica, holdings: list[Holding]) -> ReplicaView:
    group = replica.group
    shards = tuple(
        ShardView(
            rank=holding.shard,
            worker=holding.member.worker.name,
            state=_shard_state(holding),
            chunks_verified=holding.chunks_verified,
            chunks=holding.chunks,
            readers=holding.active_readers,
        )
        for holding in sorted(holdings, key=lambda holding: holding.rank)
    )
    return ReplicaView(
        group=group.name,
        version=replica.version.number,
        state=replica.state.value,
        medium=replica.medium.value,
        purpose=replica.purpose.value,
        layout_id=next((h.layout.layout_id for h in replica.holdings.values()), group.layout_id or ""),
        spot=group.spot,
        shards=shards,
        replica=replica.id,
        bridging=sum(reads_across(holding) for holding in holdings),
    )


def _shard_state(holding: Holding) -> str:
    if holding.quarantined:
        return "quarantined"
    if holding.member.worker.state is not WorkerState.LIVE:
        return "doubtful"
    return "complete" if holding.complete else "filling"
