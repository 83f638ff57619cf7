"""What always holds between two steps of a coordinator. Read it as the list of promises of `entities`' comments."""

from __future__ import annotations

from tensorhub.coordinator.entities import Cluster, Group, Holding, Model, Operation, Version
from tensorhub.coordinator.states import (
    LeaseState,
    OperationState,
    ReplicaState,
    VersionState,
    WorkerState,
)
from tensorhub.machine import InvariantBroken
from tensorhub.types import OpKind


def check(cluster: Cluster) -> None:
    """Raise InvariantBroken on the first promise that is broken."""
    _workers(cluster)
    for model in cluster.models.values():
        _versions(cluster, model)
        for group in model.groups.values():
            _group(cluster, group)
            _operation(cluster, group)
        _withdrawals(cluster, model)
    _leases(cluster)


def _demand(holds: bool, what: str, about: object) -> None:
    if not holds:
        raise InvariantBroken(f"{what}: {about!r}. Story:\n{getattr(about, 'story', '')}")


def _workers(cluster: Cluster) -> None:
    for incarnation, worker in cluster.workers.items():
        _demand(worker.incarnation == incarnation, "a worker is filed under its incarnation", worker)
        _demand(worker.state is not WorkerState.LOST, "lost workers are forgotten", worker)
        _demand(incarnation not in cluster.lost, "a lost incarnation never comes back", worker)
        _demand(("worker", incarnation) in cluster.timers, "every worker has a lease deadline", worker)
        _demand(
            worker.state is WorkerState.SUSPECT or worker.session is not None,
            "a live worker is connected",
            worker,
        )
        for registration, member in worker.members.items():
            _demand(cluster.members.get(registration) is member, "a worker's members are members", member)
    for member in cluster.members.values():
        _demand(member.worker.members.get(member.registration) is member, "a member belongs to its worker", member)
        _demand(member.group.members.get(member.rank) is member, "a member belongs to its group", member)
        _demand(
            member.group.model.groups.get(member.group.name) is member.group,
            "a member's group exists",
            member,
        )


def _versions(cluster: Cluster, model: Model) -> None:
    visible = [v.number for v in model.versions.values() if v.visible]
    _demand(not visible or (model.mark or 0) >= max(visible), "no version above the mark is visible", model.name)
    _demand(all(v.lineage <= model.lineage for v in model.versions.values()), "lineages only grow", model.name)
    contents = [v.info.content_id for v in model.versions.values()]
    _demand(len(set(contents)) == len(contents), "two publications never share a content id", model.name)
    for pin in model.pins.values():
        pinned = model.versions.get(pin.number)
        _demand(pinned is not None and pinned.info.content_id == pin.content_id, "pinned versions are known", pin)
        _demand(pin.incarnation not in cluster.lost, "a lost worker's pins end with it", pin)
    for number, version in model.versions.items():
        _demand(version.number == number, "a version is filed under its number", version)
        kept = (VersionState.STAGED, VersionState.AVAILABLE, VersionState.UNAVAILABLE)
        _demand(version.state in kept, "discarded and retired versions are forgotten", version)
        if version.state is VersionState.STAGED:
            _staged(cluster, model, version)
        else:
            available = version.state is VersionState.AVAILABLE
            _demand(available == version.has_live_source(), "available means that every shard is held", version)
        for shard, holdings in version.holdings.items():
            for holding in holdings:
                _holding(cluster, version, shard, holding)


def _staged(cluster: Cluster, model: Model, version: Version) -> None:
    open_operations = [g.operation for g in model.groups.values() if g.operation is not None]
    open_operations += [op for op in cluster.records.values() if op not in open_operations]  # of a dissolved group
    publishing = [op for op in open_operations if op.version is version]
    _demand(len(publishing) == 1, "a staged version has one undecided publish", version)
    _demand(publishing[0].kind is OpKind.PUBLISH, "only a publish stages", version)
    _demand(not any(version.holdings.values()), "a staged version has no sources (G4)", version)


def _holding(cluster: Cluster, version: Version, shard: int, holding: Holding) -> None:
    _demand(holding.version is version and holding.shard == shard, "a holding is filed under its version", holding)
    _demand(not holding.leaving, "a leaving holding is no candidate", holding)
    _demand(holding.complete or not holding.committed, "committed holdings are complete", holding)
    _demand(holding.member.holding is holding, "a holding is what its member holds", holding)
    _demand(cluster.members.get(holding.member.registration) is holding.member, "holders are members", holding)
    states = (ReplicaState.FILLING, ReplicaState.READY, ReplicaState.DRAINING)
    _demand(holding.replica.state in states, "torn and gone replicas have no candidates", holding)


def _group(cluster: Cluster, group: Group) -> None:
    for replica in group.replicas:
        _demand(replica.state is not ReplicaState.GONE, "gone replicas are forgotten", replica)
        if replica.state is ReplicaState.READY:
            for holding in replica.holdings.values():
                _demand(holding.committed, "a ready replica's holdings are committed (G4)", replica)
        for rank, holding in replica.holdings.items():
            _demand(holding.rank == rank, "a replica's holdings are filed by rank", replica)
        if replica.state is not ReplicaState.TORN:
            _demand(bool(replica.holdings), "a replica has memory", replica)
    count = sum(r.state is ReplicaState.TORN for r in group.replicas)
    _demand(count <= 1, "a group has one torn replica at most", group.name)
    for rank, member in group.members.items():
        _demand(member.rank == rank and rank < group.world_size, "ranks are in range", member)


def _operation(cluster: Cluster, group: Group) -> None:
    operation = group.operation
    if operation is None:
        return
    _demand(not operation.decided, "a decided operation is over", operation)
    _demand(operation.key not in group.decided, "no operation is decided twice", operation)
    _demand(bool(operation.parts), "somebody called", operation)
    if operation.state is OperationState.PREPARED:
        _demand(all(p.voted for p in operation.parts.values()), "prepared means that every rank voted", operation)
        recorded = operation.record is not None and cluster.records.get(operation.record) is operation
        _demand(recorded, "a prepared operation is being recorded", operation)
    else:
        _demand(
            ("operation", str(operation.key)) in cluster.timers or _all_voted(operation),
            "every wait ends",
            operation,
        )
    if operation.state is OperationState.RUNNING:
        _demand(
            operation.version is not None and operation.gathered,
            "running means bound and gathered",
            operation,
        )
    for part in operation.parts.values():
        for lease in part.leases.values():
            _demand(lease.state is LeaseState.ACTIVE and lease.part is part, "a part's leases are active", lease)
            _demand(not part.voted, "who has voted reads no more", lease)


def _all_voted(operation: Operation) -> bool:
    return all(part.voted for part in operation.parts.values())


def _withdrawals(cluster: Cluster, model: Model) -> None:
    for registration, withdrawal in model.withdrawals.items():
        _demand(not withdrawal.granted, "granted withdrawals are over", withdrawal.holding)
        _demand(("withdrawal", registration) in cluster.timers, "a withdrawal ends", withdrawal.holding)
        holding, retained = withdrawal.holding, withdrawal.holding.version.number in model.retained()
        if withdrawal.begun:
            _demand(holding.leaving and holding.active_readers() > 0, "a withdrawal waits for readers", holding)
        else:
            _demand(not holding.leaving and retained, "who waits to leave a retained version serves on (G5)", holding)


def _leases(cluster: Cluster) -> None:
    for lease in cluster.leases.values():
        _demand(lease.state in (LeaseState.ACTIVE, LeaseState.FENCING), "ended leases are forgotten", lease)
        _demand(lease.holding.readers.get(lease.id) is lease, "a source knows its leases", lease)
        if lease.state is LeaseState.ACTIVE:
            operation = lease.part.operation
            _demand(lease.part.leases.get(lease.id) is lease, "a reader knows its leases", lease)
            _demand(operation.state is OperationState.RUNNING, "only running operations read", lease)
            _demand(lease.holding.version is operation.version, "a lease is of the bound version (G4)", lease)
            _demand(not _cyclic(lease.holding), "nobody waits for itself (R9)", lease)


def _cyclic(start: Holding) -> bool:
    todo, seen = [start], {id(start)}
    while todo:
        holding = todo.pop()
        operation = holding.member.group.operation
        part = operation.parts.get(holding.rank) if operation is not None else None
        if part is None or part.holding is not holding or holding.complete:
            continue
        for lease in part.leases.values():
            if lease.dropping:
                continue
            if lease.holding is start:
                return True
            if id(lease.holding) not in seen:
                seen.add(id(lease.holding))
                todo.append(lease.holding)
    return False
