"""What workers say that they hold, after a lost connection or a coordinator's restart.

Responsible for whether that counts, and for making it a holding again. Not responsible for who is a rank (`membership`).
"""

from __future__ import annotations

from dataclasses import dataclass

from tensorhub.coordinator import bridges, limits
from tensorhub.coordinator.cluster import Cluster
from tensorhub.coordinator.entities import Holding, Member, Version
from tensorhub.coordinator.holdings import Holdings
from tensorhub.coordinator.states import ReplicaState
from tensorhub.coordinator.testimonies import Testimonies
from tensorhub.errors import ProtocolError
from tensorhub.layouts.published import Published
from tensorhub.messages import Held
from tensorhub.model.manifest import id_of
from tensorhub.types import Purpose


@dataclass(eq=False, repr=False)
class Announcements:
    """Brings back holdings of former sessions."""

    _cluster: Cluster
    _holdings: Holdings
    _testimonies: Testimonies

    def heard(self, member: Member, held: Held, parts: tuple[bytes, ...], request: int) -> bool:
        """A worker of a former session says what it holds. Content that is not the recorded one is ordered out (R2).

        What the rank has only voted for does not count: it asks how that ended, and then says again what it holds. What it
        held before does not count either if its vote has committed the group to another content.
        """
        cluster, group, origins = self._cluster, member.group, b""
        if held.publication:
            *found, origins = parts
            parts = tuple(found)
        committed = None
        if group.world_size > 1 and member.purpose is Purpose.USE:  # a prefetch may commit to what its handles hold already
            committed = cluster.committed_content(group.model.name, group.name)
        if held.voted or committed not in (None, held.content_id):
            return True
        if not (member.serves and held.manifest):
            return False
        version = group.model.versions.get(held.version)
        if version is None or not version.visible or version.info.content_id != held.content_id:
            return False
        if member.worker.incarnation in version.condemned:
            return False
        is_publishers = held.published and group.name == version.publisher.group
        testimony = version.testimonies.get(member.shard)
        root = testimony.root if testimony is not None else b""
        # The other ranks of its group may never come back; this rank has the bytes of that published shard all the same.
        is_proven = root != b"" and held.root == root and group.world_size == version.info.world_size
        is_known = not held.publication and (member.fits_any_layout or is_publishers or is_proven)
        if not is_known and group.layout_id is None:
            member.unheard = request
            return True  # it says this again once all ranks are here
        is_published = version.is_laid_out_as(group)
        if is_known or (is_published and not held.publication):
            layout = version.holdings
        elif held.publication and (is_published or bridges.misfit(group, version) is None):
            if not (
                _may_be_origin(version, member, origins) and cluster.manifests.has_room_for(held.manifest, *parts, origins)
            ):
                return False
            layout = cluster.lay_out(version, group, origins)
        else:
            return False
        if member.shard not in layout:
            return False
        if layout is version.holdings and root and held.root not in (b"", root):
            return False  # it is not what was published (R8)
        recorded = version.recorded(member.shard) if layout is version.holdings else None
        if recorded is not None and recorded[0] != cluster.manifests.name(held.manifest):
            return False  # nor are these the tensors
        if layout is not version.holdings and not layout.takes(member.shard, parts):
            return False
        is_described = bool(layout.manifests.get(member.shard)) and member.shard in layout.parts
        if not is_described and not cluster.manifests.has_room_for(held.manifest, *parts):
            return False
        cluster.learn(version, layout, member.shard, held.manifest, bridges.as_known(member, version, parts))
        replica = next((r for r in group.replicas if r.version is version and r.state is not ReplicaState.TORN), None)
        if replica is None:
            replica = self._holdings.new_replica(version, member)
        holding = Holding(replica, member, held.generation, True, True, layout)
        holding.chunks_verified = member.chunks
        holding.by_source = not (is_publishers or is_proven)
        self._holdings.add(holding)
        if held.published and group.name == version.publisher.group and member.purpose is Purpose.USE:
            self._testimonies.publisher_is_back(holding)
        if replica.state is not ReplicaState.READY and replica.is_whole:  # if DRAINING: whoever wanted to leave has stayed
            self._holdings.make_ready(replica, "announced again by every rank")
        return True


def _may_be_origin(version: Version, member: Member, said: bytes) -> bool:
    """Whether that describes who holds what. A few bytes may say very many shards, and copies are laid out for as many."""
    try:
        shards = len(Published.decode(said, limits.ANNOUNCED_SHARDS_MAX).shards)
    except ProtocolError:
        return False
    if not member.is_of_one_shard or (member.group.reads_as, id_of(said)) in version.others:
        return True
    return sum(map(len, version.others.values())) + shards <= limits.ANNOUNCED_SHARDS_MAX
