"""The counters by which bounds are kept (`limits`) equal what there is.

This is about everything at once: it is no part of `invariants.check`, since `check_noted` must find whatever `check` finds.
"""

from __future__ import annotations

from collections import Counter
from itertools import chain

from tensorhub.coordinator.cluster import Cluster, selections_needed
from tensorhub.coordinator.states import LeaseState
from tensorhub.machine import demand
from tensorhub.messages import Rollback
from tensorhub.model.manifest import id_of


def check(cluster: Cluster) -> None:
    """Raise InvariantBroken on the first that does not."""
    kept = [
        blob
        for member in cluster.members.values()
        for blob in (member.manifest, member.begun, *member.parts, *member.arranged)
    ]
    for version in (version for model in cluster.models.values() for version in model.versions.values()):
        for layout in version.layouts:
            kept += [*layout.manifests.values(), *chain(*layout.parts.values())]
            kept += [layout.description, layout.origins]
            demand(layout.parts.keys() <= layout.manifests.keys(), "parts are of known manifests", version)
        needed = selections_needed(version)
        demand(version.selections.keys() <= needed, "only selections that somebody needs are known", version)
        named = all(
            layout.described_as == (id_of(layout.description) if layout.description else "") for layout in version.layouts
        )
        demand(named, "layouts are found by their descriptions", version)
    demand(cluster.manifests.nbytes == sum(map(len, set(kept))), "manifests are counted", cluster.manifests)
    list_bytes = sum(testimony.nbytes for testimony in cluster.testimonies)
    demand(cluster.list_bytes == list_bytes, "lists of digests are counted", cluster.list_bytes)
    versions = [version for model in cluster.models.values() for version in model.versions.values()]
    demand(cluster.selections == sum(len(v.selections) for v in versions), "selections are counted", cluster.selections)
    for worker in cluster.workers.values():
        nbytes = sum(sum(map(len, (m.manifest, m.begun, *m.parts, *m.arranged))) for m in worker.members.values())
        demand(cluster.manifest_bytes[worker.incarnation] == nbytes, "a worker's manifests are counted", worker)
    demand(cluster.manifest_bytes.keys() <= cluster.workers.keys(), "only of those who are there", cluster.manifest_bytes)
    demand(cluster.model_names == sorted(cluster.models), "models are known by name", cluster.model_names)
    operations = {operation.name: operation for operation in (*cluster.operations(), *cluster.records.values())}
    demand(cluster.undecided == operations, "operations are known by key", cluster.undecided)
    pins = Counter(pin.incarnation for model in cluster.models.values() for pin in model.pins.values())
    demand(cluster.pins == pins, "pins are counted", cluster.pins)
    waiting = [*cluster.pending_writes.values(), *(write for model in cluster.models.values() for write in model.unanswered)]
    writes = Counter(write.session for write in waiting if not isinstance(write.message, Rollback))
    for session in cluster.sessions.values():
        demand(session.pending_writes == writes[session.number], "what a session has asked for is counted", session)
        watched = {name for name, sessions in cluster.watchers.items() if session.number in sessions}
        demand(session.watched == watched, "what a session watches is known", session)
    demand(all(cluster.watchers.values()), "what nobody watches is forgotten", cluster.watchers)
    total = sum(map(len, cluster.watchers.values()))
    demand(cluster.watched == total == sum(len(s.watched) for s in cluster.sessions.values()), "watches are counted", total)
    read_only = cluster.read_only
    sessions = {session for session in cluster.sessions.values() if session.read_only}
    demand(read_only.sessions.keys() == sessions, "read-only sessions are known", read_only)
    demand(read_only.watches == sum(len(s.watched) for s in sessions), "their watches are counted", read_only)
    registrations = sum(member.worker.read_only for member in cluster.members.values())
    demand(read_only.registrations == registrations, "their registrations are counted", read_only)
    away = {worker for worker in cluster.workers.values() if worker.read_only and worker.session is None}
    demand(read_only.away.keys() == away, "read-only workers without a session are known", read_only)
    patches = Counter(
        lease.holding.peers for lease in cluster.leases.values() if lease.partial and lease.state is LeaseState.ACTIVE
    )
    for version in (version for model in cluster.models.values() for version in model.versions.values()):
        for there in (there for layout in version.layouts for there in layout.values()):
            demand(there.patches == patches[there], "partial leases are counted", version)
