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

from dataclasses import dataclass, field

from tensorhub.coordinator.cluster import Cluster
from tensorhub.coordinator.entities import RankPart
from tensorhub.coordinator.readers import grant_of
from tensorhub.coordinator.states import WorkerState
from tensorhub.messages import Grant
from tensorhub.types import BUNDLES_BY


@dataclass(eq=False, repr=False)
class Mates:
    """Of the ranks of one operation, which are told in their order what to read."""

    _cluster: Cluster
    _last: dict[tuple[str, str], RankPart] = field(default_factory=dict, init=False)  # by site and bundle

    def of(self, part: RankPart) -> tuple[Grant, ...]:
        """Those of the next rank, which has its leases, for each of its bundles. It may be a mate of those behind it."""
        site, found = part.member.worker.location.site, list[Grant]()
        needs_them = _reads_far(part)
        for bundle in dict.fromkeys(part.bundles):  # else who names one twice would be its own mate
            mate = self._last.get((site, bundle))
            if mate is not None and mate.holding is not None and needs_them and _can_be_read(mate, part):
                found.append(grant_of(mate.holding, self._cluster.new_id(), complete=False, selection=bundle))
            if part.holding is not None and part.reads and BUNDLES_BY in part.member.worker.strided:
                self._last[site, bundle] = part
        return tuple(found)


def _reads_far(part: RankPart) -> bool:
    """Whether it reads in another site, and need not vouch for anything."""
    site, leases = part.member.worker.location.site, part.leases.values()
    is_far = any(lease.holding.member.worker.location.site != site for lease in leases)
    return is_far and not any(lease.root for lease in leases)


def _can_be_read(mate: RankPart, part: RankPart) -> bool:
    reader, source = part.member.worker, mate.member.worker
    return source.state is WorkerState.LIVE and BUNDLES_BY in reader.reaches(source, across=True)
