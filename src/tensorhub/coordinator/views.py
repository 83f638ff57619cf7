"""What `describe` shows: the coordinator's knowledge of a model as plain values. Changes nothing."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Iterator
from heapq import nsmallest
from typing import TypeVar

from tensorhub.coordinator import limits
from tensorhub.coordinator.cluster import Cluster
from tensorhub.coordinator.entities import Holding, Model, ReadLease, Replica, Worker
from tensorhub.coordinator.states import WorkerState
from tensorhub.types import LeaseView, ModelInfo, ReplicaView, ShardView, VersionView, WorkerView

T = TypeVar("T")


def page(cluster: Cluster, after: str | None) -> tuple[tuple[ModelInfo, ...], bool]:
    """The models after that name, as many as one answer has room for but one at least; and whether there are more."""
    models, entries = list[ModelInfo](), 0
    for model in cluster.models_after(after):
        if entries >= limits.DESCRIBED_MAX:
            return tuple(models), True
        models.append(describe(model))
        entries += _entries(models[-1])
    return tuple(models), False


def _entries(model: ModelInfo) -> int:
    """What describing it has cost."""
    shards = sum(len(replica.shards) for replica in model.replicas)
    return 1 + len(model.versions) + len(model.replicas) + shards + len(model.leases) + len(model.workers)


def describe(model: Model, version: int | None = None, after: str | None = None, workers_max: int = 0) -> ModelInfo:
    """Versions, replicas, leases and workers of one model, each in a stable order.

    With `version`, only what concerns it. With `after` and `workers_max` (0: all), of the workers after that name only the
    next so many, with what they hold and read. Workers of one name come together.
    """
    retained = model.retained()
    held = [replica for group in sorted(model.serving.values(), key=lambda g: g.name) for replica in group.replicas]
    read: Iterable[ReadLease] = model.leases.values()
    mine = {m.worker.incarnation: m.worker for g in model.groups.values() for m in g.members.values()}
    if version is not None:
        held = [replica for replica in held if replica.version.number == version]
        read = [lease for lease in read if lease.holding.version.number == version]
        concerned = {h.member.worker.incarnation for replica in held for h in replica.holdings.values()}
        concerned.update(lease.part.member.worker.incarnation for lease in read)
        mine = {incarnation: worker for incarnation, worker in mine.items() if incarnation in concerned}
    only: Container[str] | None = None
    if after is not None or workers_max:
        only = mine = _next(mine, after or "", workers_max)
        held = [replica for replica in held if any(m.worker.incarnation in mine for m in replica.group.members.values())]
        read = [lease for lease in read if lease.part.member.worker.incarnation in mine]
    versions = tuple(
        VersionView(
            version=v.number,
            content_id=v.info.content_id,
            state=v.state.value,
            nbytes=v.info.nbytes,
            world_size=v.info.world_size,
            lineage=v.lineage,
            retained=v.number in retained,
        )
        for v in sorted(model.versions.values(), key=lambda v: v.number)
        if version is None or v.number == version
    )
    replicas = tuple(_replica(replica, only) for replica in held)
    leases = tuple(
        LeaseView(
            lease=lease.id,
            reader=lease.part.member.worker.name,
            source=lease.holding.member.worker.name,
            version=lease.holding.version.number,
            rank=lease.part.shard,
            state=lease.state.value,
        )
        for lease in _shown(read, lambda lease: lease.part.member.worker.read_only)
    )
    workers = tuple(
        WorkerView(w.name, w.incarnation, w.state.value, w.location, w.endpoints)
        for w in sorted(_shown(mine.values(), lambda w: w.read_only), key=lambda w: (w.name, w.incarnation))
    )
    return ModelInfo(model.name, model.lineage, model.mark, model.retain, versions, replicas, leases, workers)


def _next(workers: dict[str, Worker], after: str, most: int) -> dict[str, Worker]:
    """The workers whose names come after that one: `most` (0: all), and those that are called as the last of them."""
    names = [worker.name for worker in workers.values() if worker.name > after]
    last = max(nsmallest(most, names), default="") if most else max(names, default="")
    return {incarnation: worker for incarnation, worker in workers.items() if after < worker.name <= last}


def _shown(all_: Iterable[T], is_guests: Callable[[T], bool]) -> Iterator[T]:
    """Those of workers, and as many of guests as one answer has room for: there may be very many."""
    room = limits.DESCRIBED_MAX
    for each in all_:
        if is_guests(each):
            room -= 1
            if room < 0:
                continue
        yield each


def _replica(replica: Replica, only: Container[str] | None) -> ReplicaView:
    """With the shards of these workers, or (None) of all."""
    group = replica.group
    shards = tuple(
        ShardView(
            rank=holding.shard,
            worker=holding.member.worker.name,
            state=_shard_state(holding),
            chunks_verified=holding.chunks_verified,
            chunks=holding.member.chunks,
            readers=holding.active_readers,
        )
        for _, holding in sorted(replica.holdings.items())
        if only is None or holding.member.worker.incarnation in only
    )
    return ReplicaView(
        group=group.name,
        version=replica.version.number,
        state=replica.state.value,
        medium=replica.medium.value,
        purpose=replica.purpose.value,
        layout_id=group.layout_id,
        spot=group.spot,
        shards=shards,
    )


def _shard_state(holding: Holding) -> str:
    if holding.quarantined:
        return "quarantined"
    if holding.member.worker.state is not WorkerState.LIVE:
        return "doubtful"
    return "complete" if holding.complete else "filling"
