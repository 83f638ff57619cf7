"""Ranks of one group that have something in common: one of a site brings it there, and the others have it from that one.

Theory of operation. Ranks of a group which reads another layout have different parts of the model, and some of it each has
just so: norms, key-value heads, attention beside experts. They say names of that (`layouts.bundles`). Where one of them
reads in another site, it is told of its *mates*: for each bundle the rank before it, among those of its site that have that
bundle. So the first one brings it into the site, and each of the others has it from the one before.

Mates are no leases. They fill in one operation: if one of them fails, none of them ends well. So nobody waits for a mate in
vain, nor in a circle; and who cannot read its mate reads what is missing where it reads the rest.

Who reads its source's own chunks, since nobody's digests of what it needs count yet, has no mates: it has to vouch for what
it has, and for that it must have read it there.

Responsible for who has which mates. Not responsible for leases (`readers`), nor for ranks that have all in common
(`replicas.twins`).
"""

from __future__ import annotations

from tensorhub.coordinator.cluster import Cluster
from tensorhub.coordinator.entities import RankPart
from tensorhub.coordinator.states import WorkerState
from tensorhub.messages import Grant
from tensorhub.scheduler.links import Distance, distance
from tensorhub.types import BUNDLES_BY


def mates(cluster: Cluster, part: RankPart) -> tuple[Grant, ...]:
    """Those of a rank that has its leases, for each of its bundles."""
    worker, leases = part.member.worker, part.leases.values()
    is_far = any(distance(worker.location, lease.holding.member.worker.location) is Distance.FAR for lease in leases)
    if not part.bundles or not is_far or any(lease.root for lease in leases):
        return ()
    before = [each for _, each in sorted(part.operation.parts.items(), reverse=True) if each.rank < part.rank]
    near = [each for each in before if _can_be_read(each, part)]
    found = ((name, next((each for each in near if name in each.bundles), None)) for name in part.bundles)
    return tuple([_grant(cluster.new_id(), name, mate) for name, mate in found if mate is not None])


def _can_be_read(mate: RankPart, part: RankPart) -> bool:
    """Whether it fills memory that others read, in that rank's site."""
    reader, source = part.member.worker, mate.member.worker
    is_filled = mate.holding is not None and mate.reads and mate.layout is part.layout
    is_near = distance(reader.location, source.location) is not Distance.FAR
    return is_filled and is_near and source.state is WorkerState.LIVE and BUNDLES_BY in reader.reaches(source, across=True)


def _grant(lease: str, bundle: str, mate: RankPart) -> Grant:
    holding, worker = mate.holding, mate.member.worker
    assert holding is not None
    return Grant(
        lease=lease,
        source=worker.name,
        incarnation=worker.incarnation,
        registration=mate.member.registration,
        generation=holding.generation,
        endpoints=worker.endpoints,
        location=worker.location,
        complete=False,
        selection=bundle,
    )
