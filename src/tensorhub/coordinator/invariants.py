"""What always holds between two steps of a coordinator: the promises that the comments in
`entities` make.

`check` looks at everything. `check_noted` looks at the entities that the last step has noted as
changed (`Cluster.noted`) and at their neighbours, so that it costs as much as the step. Each
promise is checked for one entity, by looking at that entity and at the entities that it names. A
reference in both directions is checked from both sides, so that it does not matter which of the two
entities was noted.

`check_counts` compares the counters by which bounds are kept (`limits`) with a count of everything.
It is no part of `check`, since `check_noted` must find whatever `check` finds.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Container, Iterable
from itertools import chain
from typing import assert_never

from tensorhub.coordinator.cluster import Cluster, layouts_used, selections_needed
from tensorhub.coordinator.coverage import must_cover
from tensorhub.coordinator.entities import (
    Group,
    Holding,
    Member,
    Model,
    Noted,
    Operation,
    ReadLease,
    Replica,
    Version,
    Withdrawal,
    Worker,
)
from tensorhub.coordinator.layout_holdings import Holders, LayoutHoldings
from tensorhub.coordinator.states import (
    LeaseState,
    OperationState,
    ReplicaState,
    VersionState,
    WorkerState,
)
from tensorhub.coordinator.waiting import is_filled_by, lasts, waits_in, yields
from tensorhub.machine import demand
from tensorhub.messages import Restore, Rollback
from tensorhub.model.manifest import id_of
from tensorhub.types import OpKind, Purpose

LIVING = (ReplicaState.FILLING, ReplicaState.READY, ReplicaState.DRAINING)
KEPT = (VersionState.STAGED, VersionState.AVAILABLE, VersionState.UNAVAILABLE)


def check(cluster: Cluster) -> None:
    """Raise InvariantBroken on the first promise that is broken."""
    versions = {
        version: None for model in cluster.models.values() for version in model.versions.values()
    }
    for worker in cluster.workers.values():
        _worker(cluster, worker, versions)
    for member in cluster.members.values():
        _member(cluster, member, versions)
    for model in cluster.models.values():
        _model(cluster, model)
        for version in model.versions.values():
            _version(cluster, version)
        for group in model.groups.values():
            _group(cluster, group, versions)
    for operation in cluster.records.values():
        _operation(cluster, operation, versions)
    for lease in cluster.leases.values():
        _lease(cluster, lease)


def check_noted(cluster: Cluster) -> None:
    """`check` for the entities that the last step has noted. An entity that is forgotten by now
    must be forgotten everywhere.
    """
    found = with_neighbours(cluster.noted)
    for about in found:
        match about:
            case Worker():
                _worker(cluster, about, found)
            case Member():
                _member(cluster, about, found)
            case Group():
                _group(cluster, about, found)
            case Operation():
                if about.group.operation is not about:  # else its group is there, too
                    _operation(cluster, about, found)
            case Version():
                _version(cluster, about)
            case ReadLease():
                _lease(cluster, about)
            case Model():
                _model(cluster, about)
            case Replica():
                pass  # its group and its version are there
            case _:
                assert_never(about)


def with_neighbours(noted: Iterable[Noted]) -> dict[Noted, None]:
    """The noted entities, and the entities that have promises about them."""
    found: dict[Noted, None] = dict.fromkeys(noted)
    for about in list(found):
        match about:
            case Member():
                found[about.worker] = found[about.group] = None
            case Replica():
                found[about.group] = found[about.version] = None
            case Operation():
                found[about.group] = None
                for part in about.parts.values():
                    # what it fills, and lacks, decides whether that is fed
                    if part.member.holding is not None:
                        found[part.member] = None
            case _:
                pass
    return found


# `found` has all that is checked in this turn. The check of a version covers its holdings, so the
# checks below leave the holdings of a version in `found` to it.


def _worker(cluster: Cluster, worker: Worker, found: Container[object]) -> None:
    incarnation = worker.incarnation
    if cluster.workers.get(incarnation) is not worker:
        demand(
            worker.state is WorkerState.LOST and not worker.members,
            "only lost workers are forgotten",
            worker,
        )
        return
    demand(worker.state is not WorkerState.LOST, "lost workers are forgotten", worker)
    demand(incarnation not in cluster.lost, "a lost incarnation never comes back", worker)
    demand(("worker", incarnation) in cluster.timers, "every worker has a lease deadline", worker)
    if worker.session is None:
        demand(worker.state is WorkerState.SUSPECT, "a live worker is connected", worker)
    else:
        session = cluster.sessions.get(worker.session)
        demand(
            session is not None and session.worker is worker,
            "a worker's session is its own",
            worker,
        )
    demand(
        not (worker.read_only and worker.host_bytes), "a read-only worker lends no memory", worker
    )
    for registration, member in worker.members.items():
        demand(
            not (worker.read_only and member.said.serves),
            "a read-only worker serves no reader",
            member,
        )
        demand(
            cluster.members.get(registration) is member, "a worker's members are members", member
        )
        demand(member.worker is worker, "a worker is that of its members", member)
        if member.holding is not None and member.holding.version not in found:
            _ordered(member.holding)
        for lease in member.reads.values():
            _yields(lease)


def _yields(lease: ReadLease) -> None:
    is_known = lease.yields == yields(lease.part, lease.holding)
    demand(
        is_known or lease.state is not LeaseState.ACTIVE, "a reader that yields is known to", lease
    )


def _member(cluster: Cluster, member: Member, found: Container[object]) -> None:
    group, registration = member.group, member.registration
    if cluster.members.get(registration) is not member:
        elsewhere = (
            member.worker.members.get(registration) is member
            or group.members.get(member.rank) is member
        )
        demand(
            not elsewhere and member.holding is None,
            "who is no member any more is forgotten everywhere",
            member,
        )
        return
    demand(
        member.worker.members.get(registration) is member, "a member belongs to its worker", member
    )
    demand(group.members.get(member.rank) is member, "a member belongs to its group", member)
    demand(group.model.groups.get(group.name) is group, "a member's group exists", member)
    if member.holding is not None:
        version = member.holding.version
        known = any(member.holding.layout is layout for layout in version.layouts)
        demand(
            known and member.holding in member.holding.peers, "what is held is a candidate", member
        )
        if version not in found:
            _candidate(cluster, version, member.holding.layout, member.shard, member.holding)
        _held(member, member.holding)
    for holding in member.leaving:
        demand(holding.leaving, "what is withdrawn takes no readers", holding)
        demand(holding not in holding.peers, "what is withdrawn is no candidate", holding)
        _held(member, holding)
    for ident, lease in member.reads.items():
        demand(cluster.leases.get(ident) is lease, "a reader's leases are leases", lease)
    is_copy = group.model.copies.get(registration) is member
    demand(
        is_copy == (member.said.purpose is Purpose.RETENTION),
        "copies that retain a version are known",
        member,
    )
    withdrawal = group.model.withdrawals.get(registration)
    if withdrawal is not None:
        _withdrawal(cluster, group.model, withdrawal)


def _is_fed(holding: Holding) -> bool:
    """Whether the holding is complete, or its chain of sources ends at a complete holding."""
    if holding.verified:
        return True
    todo, seen = [holding], {holding: None}
    while todo:
        further = [
            lease.holding
            for lease in todo.pop().fillers
            if not lease.dropping and lease.holding not in seen
        ]
        seen.update(dict.fromkeys(further))
        todo.extend(further)
    fed = {each for each in seen if each.verified}
    while more := [
        each for each in seen if each not in fed and is_filled_by(each, fed.__contains__)
    ]:
        fed.update(more)
    return holding in fed


def _held(member: Member, holding: Holding) -> None:
    demand(
        holding.version.info.model == member.group.model.name,
        "a model's versions are its own",
        holding,
    )
    demand(holding.verified or not holding.complete, "what is complete is verified", holding)
    demand(holding.is_fed == _is_fed(holding), "what is filled is known to be", holding)
    demand(holding.member is member, "a holding is one member's", holding)
    readers = [lease for lease in holding.readers.values() if lease.state is LeaseState.ACTIVE]
    demand(
        holding.traffic.active_readers == len(readers), "a source's readers are counted", holding
    )
    yielding = sum([lease.yields for lease in readers])
    demand(
        holding.traffic.yielding == yielding, "a source's readers that yield are counted", holding
    )
    for ident, lease in holding.readers.items():
        demand(
            lease.id == ident and lease.holding is holding, "a source's leases are on itself", lease
        )
        demand(
            lease.state in (LeaseState.ACTIVE, LeaseState.FENCING),
            "a holding's leases have not ended",
            lease,
        )


def _model(cluster: Cluster, model: Model) -> None:
    visible = [v.number for v in model.versions.values() if v.visible]
    demand(
        not visible or (model.mark or 0) >= max(visible),
        "no version above the mark is visible",
        model.name,
    )
    demand(
        all(v.lineage <= model.history.lineage for v in model.versions.values()),
        "lineages only grow",
        model.name,
    )
    contents = [v.info.content_id for v in model.versions.values()]
    demand(
        len(set(contents)) == len(contents), "two publications never share a content id", model.name
    )
    retained = model.retained()
    for number, version in model.versions.items():
        demand(version.number == number, "a version is filed under its number", version)
        _retained(version, retained)
    for registration, member in model.notices.unaware.items():
        is_told = member.holding is not None and member.holding.told
        waited_for = is_told and member.registration == registration
        demand(waited_for, "only who has to acknowledge is waited for", member)
    for registration, copy in model.copies.items():
        demand(copy.registration == registration, "copies are filed by registration", copy)
        _copy(cluster, model, copy)
    for ident, handover in model.handovers.items():
        demand(handover.copy == ident, "handovers are filed by their copy", model.name)
        demand(("handover", ident) in cluster.timers, "a handover ends", model.name)
    for pin in model.pins.values():
        pinned = model.versions.get(pin.number)
        demand(
            pinned is not None and pinned.info.content_id == pin.content_id,
            "pinned versions are known",
            pin,
        )
        demand(pin.incarnation not in cluster.lost, "a lost worker's pins end with it", pin)
    for registration, withdrawal in model.withdrawals.items():
        demand(
            withdrawal.holding.member.registration == registration,
            "withdrawals are filed by registration",
            withdrawal,
        )
        _withdrawal(cluster, model, withdrawal)


def _version(cluster: Cluster, version: Version) -> None:
    model = cluster.models.get(version.info.model)
    if model is None or model.versions.get(version.number) is not version:
        gone = version.state not in KEPT and not any(
            layout.has_holders for layout in version.layouts
        )
        demand(gone, "only discarded and retired versions are forgotten", version)
        # R2
        demand(not version.bound, "a forgotten version has no operations", version)
        return
    demand(version.state in KEPT, "discarded and retired versions are forgotten", version)
    # before a question counts it
    demand(
        not any(layout.uncounted or layout.has_grown for layout in version.layouts),
        "what has changed is counted, and has woken who waits",
        version,
    )
    for operation in version.bound.values():
        demand(
            operation.version is version and not operation.decided,
            "what is bound to it is undecided",
            operation,
        )
    demand(
        not version.visible or version.number <= (model.mark or 0),
        "a version above the mark is invisible",
        version,
    )
    demand(version.lineage <= model.history.lineage, "no version is of a later lineage", version)
    if version.state is VersionState.STAGED:
        _staged(cluster, model, version)
    else:
        _available(version)
    shards = [*range(version.info.world_size)]
    staged = version.state is VersionState.STAGED and not version.holdings
    demand(
        staged or [*version.holdings] == shards,
        "a version has each of its shards, once all ranks published",
        version,
    )
    _retained(version, model.retained())
    demand(not (staged and version.others), "no other layout holds what is not published", version)
    for layout in version.layouts:
        for shard, there in layout.items():
            for holding in there:
                _candidate(cluster, version, layout, shard, holding)
            _counted(version, there)
        broken = sum(not any(h.complete for h in there) for there in layout.values())
        demand(layout.broken == broken, "shards without a complete holder are counted", version)
        sourceless = sum(not any(h.is_source for h in there) for there in layout.values())
        demand(layout.sourceless == sourceless, "shards without a source are counted", version)
    for shard, manifest in version.manifests.items():
        recorded = version.recorded(shard)
        is_its = recorded is None or recorded[0] == cluster.manifests.name(manifest)
        demand(is_its, "what describes a shard is what was published with it", version)
    used = layouts_used(version)
    for key, layout in version.others.items():
        demand(layout.layout_id == key, "layouts are filed by their ids", layout)
        demand(
            id(layout) in used,
            "a layout without a holder or a fill is forgotten",
            layout,
        )
        demand(layout.manifests.keys() <= layout.keys(), "manifests are of shards", layout)
        lie = (layout.parts.get(shard) for shard in layout if layout[shard])
        demand(
            all(lie),
            "where a shard lies is known of who holds it in another layout",
            layout,
        )


def _staged(cluster: Cluster, model: Model, version: Version) -> None:
    group = model.groups.get(version.publisher.group)
    known = [group.operation] if group is not None and group.operation is not None else []
    known += [op for op in cluster.records.values() if op not in known]  # of a dissolved group
    publishing = [op for op in known if op.version is version]
    demand(len(publishing) == 1, "a staged version has one undecided publish", version)
    demand(publishing[0].kind is OpKind.PUBLISH, "only a publish stages", version)
    demand(not any(version.holdings.values()), "a staged version has no sources", version)  # G4


def _available(version: Version) -> None:
    available = version.state is VersionState.AVAILABLE
    demand(available == version.is_held, "available means that every shard is held", version)
    left = any(layout.abandoned and layout.have_sources() for layout in version.layouts)
    demand(not left, "a layout with sources is not abandoned", version)  # R12


def _candidate(
    cluster: Cluster,
    version: Version,
    layout: LayoutHoldings[Holding],
    shard: int,
    holding: Holding,
) -> None:
    filed = holding.version is version and holding.layout is layout and holding.shard == shard
    demand(filed, "a holding is filed under its version and layout", holding)
    demand(not holding.leaving, "a leaving holding is no candidate", holding)
    demand(holding.complete or not holding.committed, "committed holdings are complete", holding)
    demand(holding.member.holding is holding, "a holding is what its member holds", holding)
    demand(
        cluster.members.get(holding.member.registration) is holding.member,
        "holders are members",
        holding,
    )
    demand(holding.replica.state in LIVING, "torn and gone replicas have no candidates", holding)
    _ordered(holding)
    _told(holding)


def _counted(version: Version, there: Holders[Holding]) -> None:
    """The counts of a shard equal a count of all its holdings. (`_ordered` has compared what each
    holding is counted as with what it is.)
    """
    kept = (there.complete, there.sources, there.live_sources)
    each = [there.counted(holding)[0] for holding in there]
    counts = tuple(map(sum, zip(*each, strict=True))) or (0, 0, 0)
    demand(kept == counts, "a shard's holdings are counted", version)
    demand(
        all(holding in there for holding in there.steady),
        "only those who are there are known",
        version,
    )


def _ordered(holding: Holding) -> None:
    now = holding.counted
    of_fed, of_stranded = (None, now.standing) if now.is_stranded else (now.standing, None)
    there = holding.peers
    kept = there.counted(holding)
    demand(kept == (now.counts, of_fed, of_stranded), "sources are kept in order", holding)
    # R4
    demand(
        (holding in there.steady) == now.is_steady,
        "sources that are not spot are known",
        holding,
    )


def _retained(version: Version, retained: Collection[int]) -> None:
    holds = version.retained == (version.number in retained) or not any(
        there for layout in version.layouts for there in layout.values()
    )
    demand(holds, "holders are told what is retained", version)  # R4


def _told(holding: Holding) -> None:
    keep = holding.committed and holding.version.retained and not holding.member.group.spot
    keep = keep and not holding.bridges
    # R4
    demand(
        holding.told == keep or holding in holding.member.group.model.notices.queue,
        "who must not leave at will was told so",
        holding,
    )


def _copy(cluster: Cluster, model: Model, member: Member) -> None:
    registered = cluster.members.get(member.registration) is member and member.group.model is model
    demand(
        registered and member.said.purpose is Purpose.RETENTION,
        "copies are members that retain a version",
        member,
    )


def _group(cluster: Cluster, group: Group, found: Container[object]) -> None:
    if group.model.groups.get(group.name) is not group:
        demand(not group.members, "a group with members exists", group.name)
        demand(
            group.model.serving.get(group.name) is not group,
            "a group that is gone serves no reader",
            group.name,
        )
    steady = not group.spot and group.model.serving.get(group.name) is group
    demand(
        (group.model.steady.get(group.name) is group) == steady,
        "groups that are not spot are known",
        group.name,
    )
    demand(
        group.spot == any(member.said.spot for member in group.members.values()),
        "a group with a spot rank is spot",
        group.name,
    )
    for rank, member in group.members.items():
        serving = not member.said.serves or group.model.serving.get(group.name) is group
        demand(serving, "groups whose memory serves others are known", member)
        demand(member.rank == rank and rank < group.world_size, "ranks are in range", member)
        demand(member.group is group, "a group is that of its members", member)
        demand(
            cluster.members.get(member.registration) is member,
            "a group's members are members",
            member,
        )
        if member.holding is not None and member.holding.version not in found:
            _told(member.holding)
    demand(group not in cluster.renumbered, "ranks are told their epoch", group.name)
    torn = [replica for replica in group.replicas if replica.state is ReplicaState.TORN]
    demand(len(torn) <= 1, "a group has one torn replica at most", group.name)
    for replica in group.replicas:
        _replica(replica, group, found)
    if group.operation is not None:
        _operation(cluster, group.operation, found)


def _replica(replica: Replica, group: Group, found: Container[object]) -> None:
    version = replica.version
    demand(replica.group is group, "a replica is its group's", replica)
    demand(replica.state is not ReplicaState.GONE, "gone replicas are forgotten", replica)
    demand(
        bool(replica.holdings) or replica.state is ReplicaState.TORN,
        "a replica has memory",
        replica,
    )
    drains = replica.state is ReplicaState.DRAINING
    # G7
    demand(not (drains and replica.is_whole), "a replica that no rank leaves serves again", replica)
    if version.visible and version not in found:
        _available(version)
    for rank, holding in replica.holdings.items():
        demand(holding.rank == rank, "a replica's holdings are filed by rank", replica)
        demand(holding.replica is replica, "a holding is one replica's", holding)
        demand(
            holding.complete or not holding.committed,
            "a replica's committed holdings are complete",
            holding,
        )
        if replica.state is ReplicaState.READY:
            demand(holding.committed, "a ready replica's holdings are committed", replica)  # G4
        # R8
        demand(
            holding.leaving or not holding.trust.quarantined,
            "what is quarantined is no source",
            holding,
        )
        if not holding.leaving:
            demand(replica.state in LIVING, "torn and gone replicas hold nothing", holding)
            demand(
                holding.member.holding is holding,
                "a replica's holding is what its member holds",
                holding,
            )


def _operation(cluster: Cluster, operation: Operation, found: Container[object]) -> None:
    group, parts = operation.group, operation.parts.values()
    recorded = operation.record is not None and cluster.records.get(operation.record) is operation
    if operation.decided:
        demand(
            group.operation is not operation and not recorded,
            "a decided operation is over",
            operation,
        )
        demand(
            not any(part.leases for part in parts),
            "no rank reads for a decided operation",
            operation,
        )
        return
    demand(group.operation is operation, "an undecided operation is its group's", operation)
    demand(operation.key not in group.decided, "no operation is decided twice", operation)
    demand(bool(operation.parts), "some rank has called", operation)
    all_voted = all(part.voted for part in parts)
    version = operation.version
    known = version is None or group.model.versions.get(version.number) is version
    demand(known, "no operation is bound to a version that is no more", operation)  # R2
    bound = version is None or version.bound.get(operation.key) is operation
    demand(bound, "a version knows the operations that are bound to it", operation)
    if operation.state is OperationState.PREPARED:
        demand(all_voted, "prepared means that every rank voted", operation)
        demand(
            recorded and version is not None,
            "a prepared operation is bound, and being recorded",
            operation,
        )
    else:
        timed = ("operation", operation.name) in cluster.timers
        demand(timed or all_voted, "every wait ends", operation)
    running = operation.state is OperationState.RUNNING
    if running:
        demand(
            operation.version is not None and operation.gathered,
            "running means bound and gathered",
            operation,
        )
    demand(
        not operation.writing or operation.covers or not must_cover(operation),
        "who writes reads everything",
        operation,
    )
    staged = operation.version is not None and operation.version.state is VersionState.STAGED
    demand(
        staged == (operation.kind is OpKind.PUBLISH),
        "a publish stages a version, others take a visible one",
        operation,
    )
    if not cluster.is_woken(operation):  # it will be looked at
        filed = [id(each) for each in operation.filed_in]
        demand(
            filed == [id(each) for each in waits_in(operation)], "what waits is filed", operation
        )  # G7
        # G7
        demand(
            all(each.get(operation.key) is operation for each in operation.filed_in),
            "who waits is found by what it waits for",
            operation,
        )
    for rank, part in operation.parts.items():
        demand(
            part.operation is operation and part.rank == rank,
            "a part is its operation's, filed by rank",
            operation,
        )
        held = part.member.holding
        if held is not None and held.version not in found:
            _ordered(held)
        for lease in part.leases.values():
            demand(
                lease.state is LeaseState.ACTIVE and lease.part is part,
                "a part's leases are active",
                lease,
            )
            _yields(lease)
            demand(part.reads, "who has voted reads no more", lease)
            demand(running, "only running operations read", lease)
            # G4
            demand(
                lease.holding.version is operation.version, "a lease is of the bound version", lease
            )
        is_one = part.bridges or sum(map(lasts, part.leases.values())) < 2
        demand(is_one, "a reader has one source that brings everything", operation)


def _withdrawal(cluster: Cluster, model: Model, withdrawal: Withdrawal) -> None:
    holding = withdrawal.holding
    demand(
        ("withdrawal", holding.member.registration) in cluster.timers, "a withdrawal ends", holding
    )
    if withdrawal.begun:
        demand(
            holding.leaving and holding.traffic.active_readers > 0,
            "a withdrawal waits for readers",
            holding,
        )
    else:
        pressing = model.pressing.get(holding.member.registration) is withdrawal
        demand(pressing, "who waits for another holder is looked at", holding)  # G7
        retained = holding.version.number in model.retained()
        # a closing handle may wait for the copies of its worker
        waits = retained or withdrawal.closes
        # G5
        demand(
            not holding.leaving and waits,
            "who waits to leave a retained version serves on",
            holding,
        )


def _lease(cluster: Cluster, lease: ReadLease) -> None:
    holding, part = lease.holding, lease.part
    model, withdrawal = holding.member.group.model, holding.withdrawal
    if withdrawal is not None:
        _withdrawal(cluster, model, withdrawal)
    if cluster.leases.get(lease.id) is not lease:
        demand(
            lease.state in (LeaseState.FENCED, LeaseState.RELEASED),
            "only ended leases are forgotten",
            lease,
        )
        indexes = (
            holding.readers,
            holding.member.group.model.leases,
            part.leases,
            part.member.reads,
        )
        demand(
            not any(lease.id in each for each in indexes),
            "a forgotten lease is known nowhere",
            lease,
        )
        return
    demand(
        lease.state in (LeaseState.ACTIVE, LeaseState.FENCING),
        "a lease that is known has not ended",
        lease,
    )
    demand(holding.readers.get(lease.id) is lease, "a source knows its leases", lease)
    demand(
        holding.member.group.model.leases.get(lease.id) is lease, "a model knows its leases", lease
    )
    if lease.state is LeaseState.ACTIVE:
        operation = part.operation
        known = part.leases.get(lease.id) is lease and part.member.reads.get(lease.id) is lease
        demand(known, "a reader knows its leases", lease)
        _yields(lease)
        demand(
            operation.state is OperationState.RUNNING,
            "an active lease is of a running operation",
            lease,
        )
        demand(
            holding.version is operation.version, "an active lease is of the bound version", lease
        )  # G4
        demand(not _cyclic(holding), "no holding is filled from itself", lease)  # R9
    else:
        demand(lease.id not in part.leases, "a part has no lease that is being fenced", lease)


def _cyclic(start: Holding) -> bool:
    """Whether the holding is filled from itself. By partial copies it may be: an owner that lacks a
    chunk says so, and delays no reader that could have the chunk elsewhere, so that no chunk waits
    for itself. Through every other lease a reader must get everything.
    """
    todo, seen = [start], {id(start)}
    while todo:
        holding = todo.pop()
        part = holding.member.part
        if part is None or part.holding is not holding or holding.complete:
            continue
        for lease in part.leases.values():
            if lease.dropping or lease.partial:
                continue
            if lease.holding is start:
                return True
            if id(lease.holding) not in seen:
                seen.add(id(lease.holding))
                todo.append(lease.holding)
    return False


def check_counts(cluster: Cluster) -> None:
    """Raise InvariantBroken on the first that does not."""
    kept = [
        blob
        for member in cluster.members.values()
        for blob in (member.said.manifest, member.begun, *member.said.parts, *member.arranged)
    ]
    for version in (
        version for model in cluster.models.values() for version in model.versions.values()
    ):
        for layout in version.layouts:
            kept += [*layout.manifests.values(), *chain(*layout.parts.values())]
            kept += [layout.description]
            is_of_known = layout.stored or layout.parts.keys() <= layout.manifests.keys()
            demand(is_of_known, "parts are of known manifests, or durable", version)
        needed = selections_needed(version)
        demand(
            version.selections.keys() <= needed,
            "only selections that a reader needs are known",
            version,
        )
        named = all(
            layout.described_as == (id_of(layout.description) if layout.description else "")
            for layout in version.layouts
        )
        demand(named, "layouts are found by their descriptions", version)
    demand(
        cluster.manifests.nbytes == sum(map(len, set(kept))),
        "manifests are counted",
        cluster.manifests,
    )
    # with those whose group has ended before the record of their decision was durable
    undecided = {operation.key for operation in cluster.undecided.values()}
    demand(
        cluster.observations.running <= undecided,
        "no update is observed that is over",
        cluster.observations,
    )
    list_bytes = sum(testimony.nbytes for testimony in cluster.testimonies)
    demand(cluster.list_bytes == list_bytes, "lists of digests are counted", cluster.list_bytes)
    versions = [version for model in cluster.models.values() for version in model.versions.values()]
    demand(
        cluster.selections == sum(len(v.selections) for v in versions),
        "selections are counted",
        cluster.selections,
    )
    for worker in cluster.workers.values():
        nbytes = sum(
            sum(map(len, (m.said.manifest, m.begun, *m.said.parts, *m.arranged)))
            for m in worker.members.values()
        )
        demand(
            cluster.manifest_bytes[worker.incarnation] == nbytes,
            "a worker's manifests are counted",
            worker,
        )
    demand(
        cluster.manifest_bytes.keys() <= cluster.workers.keys(),
        "only of those who are there",
        cluster.manifest_bytes,
    )
    demand(
        cluster.model_names == sorted(cluster.models),
        "models are known by name",
        cluster.model_names,
    )
    operations = {
        operation.name: operation
        for operation in (*cluster.operations(), *cluster.records.values())
    }
    demand(cluster.undecided == operations, "operations are known by key", cluster.undecided)
    pins = Counter(
        pin.incarnation for model in cluster.models.values() for pin in model.pins.values()
    )
    demand(cluster.pins == pins, "pins are counted", cluster.pins)
    waiting = [
        *cluster.pending_writes.values(),
        *(write for model in cluster.models.values() for write in model.notices.unanswered),
    ]
    writes = Counter(
        write.session for write in waiting if not isinstance(write.message, Rollback | Restore)
    )
    for session in cluster.sessions.values():
        demand(
            session.pending_writes == writes[session.number],
            "what a session has asked for is counted",
            session,
        )
        watched = {
            name for name, sessions in cluster.watchers.items() if session.number in sessions
        }
        demand(session.watched == watched, "what a session watches is known", session)
    demand(
        all(cluster.watchers.values()), "a name without a watcher is forgotten", cluster.watchers
    )
    total = sum(map(len, cluster.watchers.values()))
    demand(
        cluster.watched == total == sum(len(s.watched) for s in cluster.sessions.values()),
        "watches are counted",
        total,
    )
    read_only = cluster.read_only
    sessions = {session for session in cluster.sessions.values() if session.read_only}
    demand(read_only.sessions.keys() == sessions, "read-only sessions are known", read_only)
    demand(
        read_only.watches == sum(len(s.watched) for s in sessions),
        "their watches are counted",
        read_only,
    )
    registrations = sum(member.worker.read_only for member in cluster.members.values())
    demand(read_only.registrations == registrations, "their registrations are counted", read_only)
    away = {
        worker for worker in cluster.workers.values() if worker.read_only and worker.session is None
    }
    demand(
        read_only.away.keys() == away, "read-only workers without a session are known", read_only
    )
    patches = Counter(
        lease.holding.peers
        for lease in cluster.leases.values()
        if lease.partial and lease.state is LeaseState.ACTIVE
    )
    for version in (
        version for model in cluster.models.values() for version in model.versions.values()
    ):
        for there in (there for layout in version.layouts for there in layout.values()):
            demand(there.patches == patches[there], "partial leases are counted", version)
