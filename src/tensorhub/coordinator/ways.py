"""In which layout a group reads a version, and from which holders.

A group whose layout is the published one reads that, chunk by chunk. A group of another layout reads each chunk from a
holder of its own layout, or from a complete holder of the published layout. There is no third kind of source, so a reader's
chunks follow from the published layout and from its own.

Responsible for that choice. Not responsible for which source a rank gets (`bridges`, `readers`).
"""

from __future__ import annotations

from typing import NamedTuple

from tensorhub.coordinator.entities import Holding, Member, Operation, RankPart, Version
from tensorhub.coordinator.layout_holdings import LayoutHoldings

Layout = LayoutHoldings[Holding]


class Way(NamedTuple):
    """`layout`: the group's own; None: no worker holds or fills it yet. `published`: the published layout, where the group
    has another one. `shard`: the only shard that is read; None: all shards. `is_known`: a rank can tell which chunks it
    reads.
    """

    layout: Layout | None
    published: Layout | None = None
    shard: int | None = None
    is_known: bool = True

    @property
    def serves(self) -> bool:
        """Whether there are sources for everything: in the group's own layout, or of each class of published shards."""
        if self.layout is not None and (self.layout.have_sources() if self.shard is None else self._sources_of_shard()):
            return self.is_known
        return self.is_known and self.published is not None and self.published.has_each_class()

    def _sources_of_shard(self) -> int:
        assert self.layout is not None
        assert self.shard is not None
        return self.layout.of(self.shard).sources

    @property
    def can_be_read(self) -> bool:
        """The same, of workers that are heard of now."""
        is_own = self.layout is not None and self.layout.copies() > 0
        return self.is_known and (is_own or (self.published is not None and self.published.can_each_class_be_read()))

    @property
    def has_holders(self) -> bool:
        """Whether a worker holds or fills some of what could be read."""
        return any(each is not None and each.has_holders for each in (self.layout, self.published))


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


def of(version: Version, operation: Operation) -> Way:
    """How its ranks read that version. A rank that goes on with what it has begun has its plan already."""
    member, begun, published = first_member(operation), operation.resumes, version.holdings
    if as_published(version, operation):
        is_one = member.is_of_one_shard and member.shard in published
        return Way(published, shard=member.shard if is_one else None)  # what other shards have lost need not hinder a copy
    is_planned = begun is not None and begun.publication == published.described_as != ""
    layout = version.others.get(member.group.reads_as)
    return Way(layout, published, is_known=published.is_described or is_planned)


def offered_in_vain(part: RankPart, version: Version, way: Way) -> list[str]:
    """The transports of this shard's sources, if there are sources, and the reader has none of those that it needs."""
    layout, published, reader = way.layout, way.published, part.member.worker
    held = part.member.holding
    if held is not None and held.version is version and held.complete:
        return []
    own = [layout[part.shard]] if layout is not None and part.shard in layout else []
    offers = [own]
    if published is not None:  # it needs one for each class then
        offers = [[*own, *(published[shard] for shard in each)] for each in published.classes.values()]
    for each in offers:
        theirs = set[str]()
        for source in (holding.member for there in each for holding in there if holding.is_source):
            if source is not part.member and reader.reaches(source.worker, across=published is not None):
                break  # of very many sources mostly the first
            theirs |= source.worker.transports
        else:
            return sorted(theirs)
    return []


def serve(operation: Operation) -> bool:
    """Whether the version to which it is bound can be read."""
    return of(operation.bound, operation).serves
