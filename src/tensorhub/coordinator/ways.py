"""In which layout, and from which origin, a group reads a version.

Theory of operation. A version is read by a *way*: an origin, whose shards' selections are read, and the reader's own layout
as it follows from that origin, whose holders he copies from chunk by chunk. The published layout is an origin. So is another
one in which a group holds all of the version, if its ranks have said where their tensors lie. Who has the published layout
reads it chunk by chunk, without an origin. He has an origin where nobody holds what was published any more.

The way is chosen when an operation is bound, and does not change any more: what has arrived is in its chunks. Where it
cannot be gone on with, and there is another one, the operation ends, and its ranks make the same call again (`others`). Only
complete holdings of an origin that was read from others are read, so nobody waits in a circle.

Responsible for that choice. Not responsible for which source a rank gets (`bridges`, `readers`).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from tensorhub.coordinator.cluster import Cluster
from tensorhub.coordinator.entities import Holding, Member, Operation, RankPart, Version
from tensorhub.coordinator.layout_holdings import LayoutHoldings
from tensorhub.messages import Begun

Layout = LayoutHoldings[Holding]


class Way(NamedTuple):
    """`layout`: the reader's own; None: nobody holds or fills it yet. `origin` None: it is the published one. `shard`: the
    only one that is read; None: all of them.
    """

    layout: Layout | None
    origin: Layout | None
    shard: int | None = None

    @property
    def serves(self) -> bool:
        """Whether there are sources for everything: in the reader's own layout, or of each class of the origin's shards."""
        if self.layout is not None and self.shard is not None:
            return self.layout.of(self.shard).sources > 0
        return (self.layout is not None and self.layout.have_sources()) or (
            self.origin is not None and self.origin.has_each_class()
        )

    @property
    def can_be_read(self) -> bool:
        """The same, of workers that are heard of now."""
        return (self.layout is not None and self.layout.copies() > 0) or (
            self.origin is not None and self.origin.can_each_class_be_read()
        )


def first_part(operation: Operation) -> RankPart:
    """That of the rank that has called first."""
    return next(iter(operation.parts.values()))


def first_member(operation: Operation) -> Member:
    """The same rank's."""
    return first_part(operation).member


def as_published(version: Version, operation: Operation) -> bool:
    """Whether its ranks have the layout in which that version was published."""
    member = first_member(operation)
    return member.fits_any_layout or version.is_laid_out_as(member.group)


def of(cluster: Cluster, version: Version, operation: Operation) -> Iterator[Way]:
    """Those in which it may be read; once it is bound, the one that was chosen."""
    part, begun = first_part(operation), operation.resumes
    if part.in_layout is not None and operation.version is version:
        return iter([_chosen(part)])
    return _all(cluster, version, operation, None if begun is None or begun.anew else begun)


def others(cluster: Cluster, version: Version, operation: Operation) -> Iterator[Way]:
    """Those in which it could be read if its ranks called again, and which have sources."""
    return (way for way in _all(cluster, version, operation, None) if way.serves)


def _all(cluster: Cluster, version: Version, operation: Operation, begun: Begun | None) -> Iterator[Way]:
    """All that there are; of what was `begun`, in its chunks."""
    member = first_member(operation)
    is_published = as_published(version, operation)
    if is_published and (begun is None or not begun.publication):
        yield Way(version.holdings, None, _only_shard(version.holdings, None, member))
    if member.fits_any_layout:
        return
    held, is_copy = _held(version, operation), member.is_of_one_shard
    for origin in version.others.values() if is_published or is_copy else version.layouts:
        if is_copy and not (origin.layout_id == member.said.layout_id and member.shard in origin):
            continue  # it is a copy of a shard of that one
        if not origin.is_described or id(origin) in held:  # nobody reads what he overwrites
            continue
        origin_id = cluster.describe(version, origin)
        layout = version.others.get((member.group.reads_as, origin_id))
        if (begun is None or begun.publication == origin_id) and (layout is None or member.shard in layout):
            yield Way(layout, origin)


def find(cluster: Cluster, version: Version, operation: Operation) -> Way | None:
    """By which its ranks read it best; None: there is none now."""
    found = [way for way in of(cluster, version, operation) if way.serves]
    if len(found) < 2:
        return found[0] if found else None
    held = _held(version, operation)
    found = [way for way in found if id(way.layout) in held] or found
    found = [way for way in found if not any(offered_in_vain(p, version, way) for p in operation.parts.values())] or found
    return min(found, key=lambda way: _order(way, version))


def _held(version: Version, operation: Operation) -> set[int]:
    """The identities of the layouts in which some of its ranks hold it already."""
    held = (part.member.holding for part in operation.parts.values())
    return {id(holding.layout) for holding in held if holding is not None and holding.version is version}


def _order(way: Way, version: Version) -> tuple[bool, bool]:
    """What was published comes first, and then the reader's layout."""
    layout, origin, _ = way
    is_published = origin is None or (origin is version.holdings and origin.has_each_class())
    return not is_published, not (layout is not None and layout.have_sources())


def offered_in_vain(part: RankPart, version: Version, way: Way) -> list[str]:
    """The transports of this shard's sources, if there are sources, and the reader has none of those that it needs."""
    (layout, origin, _), reader = way, part.member.worker
    held = part.member.holding
    if held is not None and held.version is version and held.complete:
        return []
    own = [layout[part.shard]] if layout is not None and part.shard in layout else []
    offers = [own]
    if origin is not None:  # it needs one for each class then
        offers = [[*own, *(origin[shard] for shard in each)] for each in origin.classes.values()]
    for each in offers:
        theirs = set[str]()
        for source in (holding.member for there in each for holding in there if holding.is_source):
            if source is not part.member and reader.reaches(source.worker, across=origin is not None):
                break  # of very many sources mostly the first
            theirs |= source.worker.transports
        else:
            return sorted(theirs)
    return []


def serve(operation: Operation) -> bool:
    """Whether the version to which it is bound can be read by the way that was chosen."""
    return _chosen(first_part(operation)).serves


def _chosen(part: RankPart) -> Way:
    return Way(part.in_layout, part.origin, _only_shard(part.in_layout, part.origin, part.member))


def _only_shard(layout: Layout | None, origin: Layout | None, member: Member) -> int | None:
    """That of a copy of a published shard: what the ranks of its group had lost need not hinder it."""
    is_one = member.is_of_one_shard and origin is None and layout is not None and member.shard in layout
    return member.shard if is_one else None
