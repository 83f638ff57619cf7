"""The counters by which bounds are kept (`limits`) equal what there is.

This is about everything at once: it is no part of `invariants.check`, since `check_noted` must find whatever `check` finds.
"""

from __future__ import annotations

from collections import Counter
from itertools import chain

from tensorhub.coordinator.cluster import Cluster, selections_needed
from tensorhub.coordinator.states import LeaseState
from tensorhub.machine import demand
from tensorhub.manifest import id_of
from tensorhub.messages import Rollback


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
    guests = cluster.guests
    for session in cluster.sessions.values():
        demand(session.pending_writes == writes[session.number], "what a session has asked for is counted", session)
        watched = {name for name, sessions in cluster.watchers.items() if session.number in sessions}
        demand(session.watched == watched, "what a session watches is known", session)
        mine = len(session.watched) if session.is_guest else 0
        demand(guests.watches.of(session.origin, session) == mine, "what a guest watches is counted", session)
    demand(all(cluster.watchers.values()), "what nobody watches is forgotten", cluster.watchers)
    total = sum(map(len, cluster.watchers.values()))
    demand(cluster.watched == total == sum(len(s.watched) for s in cluster.sessions.values()), "watches are counted", total)
    readers = [member.worker for member in cluster.members.values() if member.worker.read_only]
    for worker, registrations in Counter(readers).items():
        counted = guests.registrations.of(worker.origin, worker)
        demand(counted == registrations, "a read-only worker's registrations are counted", worker)
    demand(guests.registrations.total == len(readers), "read-only registrations are counted", guests.registrations)
    patches = Counter(
        lease.holding.peers for lease in cluster.leases.values() if lease.partial and lease.state is LeaseState.ACTIVE
    )
    for version in (version for model in cluster.models.values() for version in model.versions.values()):
        for there in (there for layout in version.layouts for there in layout.values()):
            demand(there.patches == patches[there], "partial leases are counted", version)
    for model in cluster.models.values():
        members = sum(not m.worker.read_only for group in model.groups.values() for m in group.members.values())
        demand(model.members == members, "a model's members are counted", model)
        ordered = any(write.model is model for write in cluster.pending_writes.values())
        of_guests = not model.is_of_workers and not ordered
        demand((model.name in cluster.guest_models) <= of_guests, "only guests wait for it", model)
    demand(cluster.guest_models <= cluster.models.keys(), "forgotten models are forgotten", cluster.guest_models)
