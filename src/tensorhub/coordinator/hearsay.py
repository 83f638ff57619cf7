"""Digests of a selection that others than its publisher have said: how they cease to count.

Theory of operation. What others say stands in for a publisher that does not know a selection, is out of touch, or is
lost. Who was asked first may lie. So hearsay (`Testimony.hearsay`) holds only until the publisher says otherwise: then its
word stands. It is *disputed* once somebody finds otherwise in what the selection was read of. Nobody can know then who is
right. So each reader reads it with what encloses it, and needs nobody's word, as long as there is somebody whom it can read
so. After that what was said first stands again: else honest copies would be lost, too.

Not responsible for who is asked (`tellers`), nor for what is told and which votes count (`testimonies`).
"""

from __future__ import annotations

from tensorhub.coordinator import bridges
from tensorhub.coordinator.cluster import Cluster
from tensorhub.coordinator.entities import RankPart, Testimony
from tensorhub.errors import GroupAborted
from tensorhub.messages import Need


def overrule(cluster: Cluster, testimony: Testimony) -> None:
    """Its publisher says otherwise. What is committed already is found out as all wrong bytes are."""
    testimony.root, testimony.hearsay, testimony.disputed = b"", False, False
    testimony.asked.clear()
    testimony.answered.clear()
    _begin_anew(cluster, testimony)


def dispute(cluster: Cluster, part: RankPart, testimony: Testimony, need: Need) -> None:
    """This rank has found otherwise in what that was read of. Or who holds that lies, which is found out in the same way."""
    was_disputed, testimony.disputed = testimony.disputed, True
    if not was_disputed and bridges.must_enclose(part, need):
        _begin_anew(cluster, testimony)


def _begin_anew(cluster: Cluster, testimony: Testimony) -> None:
    """All have to who have agreed with what was known of that, or were told it."""
    for part in testimony.needed_by:
        compares = part.page is not None and part.compares == testimony.need and not part.encloses
        agrees = part.voted or (part.claim is not None and testimony.need not in part.claim)
        if part.operation.running and (agrees or compares or part.rereads == testimony.need):
            part.misled = True
            cluster.changed(part.operation, part)


def misled(part: RankPart) -> GroupAborted:
    """Why it begins anew."""
    operation = part.operation
    return GroupAborted(
        f"{operation.kind} of {operation.group.model.name!r}: version {operation.bound.number}: rank {part.rank} was told "
        "digests by others than the publisher, and they are wrong, or may be; call again"
    )
