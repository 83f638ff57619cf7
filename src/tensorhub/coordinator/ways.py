"""In which layout a group reads a version, from which holders, and which bytes a reader of another
layout needs.

A group of the published layout reads in that layout, chunk by chunk. A group of another layout
reads each chunk from a holder of its own layout, or from a complete holder of the published layout.
There is no third kind of source, so the chunks of a reader follow from the published layout and
from its own.

A rank of another layout either *follows* a holder of its own layout, chunk by chunk of its own
grid, or it *bridges*: it reads a selection of one shard of each class that it needs (`Need`). A
rank that finds a holder of its own layout within its site follows that holder, also while the
holder is filled itself. So one group of a layout bridges in a site, and further groups follow it.
The ranks of a group choose each for itself. A source across layouts is complete, so no reader waits
in a circle.

Not responsible for leases (`readers`), nor for the choice among several sources (`source_choice`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

from tensorhub.coordinator import limits
from tensorhub.coordinator.entities import Group, Holding, Member, Operation, RankPart, Version
from tensorhub.coordinator.layout_holdings import PARTS, LayoutHoldings
from tensorhub.errors import ManifestMismatch, StateError, TensorHubError
from tensorhub.layouts.identity import ALONE
from tensorhub.messages import Need, ReadyToWrite

Source = tuple[Need | None, Holding]  # the need that it serves; None: all needs
# prefixes of layout ids: these ranks know which part of the model they have
OF_ITS_OWN = ("own/", "ranks/")


def choose(
    part: RankPart, needs: Sequence[Need], best: Callable[[Need | None], Holding | None]
) -> list[Source]:
    """The sources for these needs, where there are sources. `best`: the source for a need; for
    None, in the own layout.
    """
    own = best(None)
    if own is not None and own.member.worker.location.site == part.member.worker.location.site:
        return [(None, own)]
    bridged = [(need, found) for need in needs if (found := best(need)) is not None]
    return [(None, own)] if own is not None and len(bridged) < len(needs) else list[Source](bridged)


def are_enough(sources: Iterable[Source], needs: Sequence[Need]) -> bool:
    """Whether these sources cover all needs."""
    found = list(sources)
    return any(need is None for need, _ in found) or len(found) == len(needs)


def misfit(group: Group, version: Version) -> ManifestMismatch | None:
    """Why that group can never read a version that has another layout, if it cannot. Whether names
    and shapes fit, its ranks find out.
    """
    info = version.info
    theirs = (
        f"version {info.version} of {info.model!r} (layout {version.layout_id!r} over "
        f"{info.world_size} rank(s))"
    )
    mine = f"group {group.name!r} (layout {group.layout!r} over {group.world_size})"
    parts, unsaid = (
        version.holdings.parts,
        "has plain tensors, and does not say which part of the model each rank has",
    )
    if group.layout != ALONE and not group.layout.startswith(OF_ITS_OWN):
        text, who = f"{mine} {unsaid}; {theirs} has another layout", "that group"
    elif version.info.world_size > 1 and version.holdings.is_described and not any(parts.values()):
        text, who = f"{theirs} {unsaid}; {mine} has another layout", "the publisher"
    else:
        return None
    text += (
        f": let {who} say so with sources= or DTensors, or take equal ranks on both sides "
        f"(fetch: rank=)"
    )
    return ManifestMismatch(text, differences=(text,))


def as_known(
    member: Member, version: Version, parts: tuple[bytes, ...]
) -> tuple[bytes, ...] | None:
    """The rank's statement, in the published layout, of which part of the model it holds. None: the
    rank cannot know. It has read the version from other workers and was never told.
    """
    has_own = version.layout_id if member.fits_any_layout else member.said.layout_id
    return parts if parts or not has_own.startswith(OF_ITS_OWN) else None


def check(part: RankPart, said: ReadyToWrite, selections: int) -> TensorHubError | None:
    """The error in the needs that a rank of another layout names, if there is one. `selections`:
    their number in all.
    """
    needs, version = said.needs, part.operation.bound
    known = part.layout.needs.get(part.shard)
    who = f"rank {part.rank} of group {part.member.group.name!r}"
    shards = [need.shard for need in needs]
    strange = [shard for shard in shards if shard not in version.holdings.classes]
    if strange:
        return StateError(
            f"{who} reads shard {strange[0]} of version "
            f"{version.number}: no class of shards is named so"
        )
    if len(set(shards)) < len(shards):
        return StateError(f"{who} names a class of shards twice")
    if known is not None and known != needs:
        return StateError(
            f"{who} needs other chunks than others of the layout {part.layout.layout_id}, which "
            f"fill it too"
        )
    if part.member.said.serves and len(said.part_ids) != PARTS:
        return StateError(f"{who} does not say where in its memory that lies")
    new = sum((need.shard, need.selection) not in version.selections for need in needs)
    if selections + new > limits.SELECTIONS_MAX:
        return StateError(
            f"{who}: there are {selections} selections of other layouts already (SELECTIONS_MAX)",
            retryable=True,
        )
    return None


Layout = LayoutHoldings[Holding]


class Way(NamedTuple):
    """`layout`: the group's own layout; None: no worker holds or fills it yet. `published`: the
    published layout, if the group has another layout. `shard`: the only shard that is read; None:
    all shards. `is_known`: a rank can tell which chunks it reads.
    """

    layout: Layout | None
    published: Layout | None = None
    shard: int | None = None
    is_known: bool = True

    @property
    def serves(self) -> bool:
        """Whether there are sources for everything: in the group's own layout, or of each class of
        published shards.
        """
        if self.layout is not None and (
            self.layout.have_sources() if self.shard is None else self._sources_of_shard()
        ):
            return self.is_known
        return self.is_known and self.published is not None and self.published.has_each_class()

    def _sources_of_shard(self) -> int:
        assert self.layout is not None
        assert self.shard is not None
        return self.layout.of(self.shard).sources

    @property
    def can_be_read(self) -> bool:
        """Whether workers that are heard of now have all shards of the group's own layout, or all
        published classes.
        """
        is_own = self.layout is not None and self.layout.copies() > 0
        return self.is_known and (
            is_own or (self.published is not None and self.published.can_each_class_be_read())
        )

    @property
    def has_holders(self) -> bool:
        """Whether a worker holds or fills a shard of either layout."""
        return any(each is not None and each.has_holders for each in (self.layout, self.published))


def first_part(operation: Operation) -> RankPart:
    """The part of the rank that has called first."""
    return next(iter(operation.parts.values()))


def first_member(operation: Operation) -> Member:
    """The rank that has called first."""
    return first_part(operation).member


def as_published(version: Version, operation: Operation) -> bool:
    """Whether its ranks have the layout in which that version was published."""
    member = first_member(operation)
    return member.fits_any_layout or version.is_laid_out_as(member.group)


def of(version: Version, operation: Operation) -> Way:
    """How the ranks of an operation read that version. A rank that goes on with a begun fill has
    its plan already.
    """
    member, begun, published = first_member(operation), operation.resumes, version.holdings
    if as_published(version, operation):
        is_one = member.is_of_one_shard and member.shard in published
        # what other shards have lost need not hinder a copy
        return Way(published, shard=member.shard if is_one else None)
    is_planned = begun is not None and begun.publication == published.described_as != ""
    layout = version.others.get(member.group.reads_as)
    return Way(layout, published, is_known=published.is_described or is_planned)


def offered_in_vain(part: RankPart, version: Version, way: Way) -> list[str]:
    """The transports of this shard's sources, if there are sources, and the reader has none of
    those that it needs.
    """
    layout, published, reader = way.layout, way.published, part.member.worker
    held = part.member.holding
    if held is not None and held.version is version and held.complete:
        return []
    own = [layout[part.shard]] if layout is not None and part.shard in layout else []
    offers = [own]
    if published is not None:  # then the reader needs a source for each class
        offers = [
            [*own, *(published[shard] for shard in each)] for each in published.classes.values()
        ]
    for each in offers:
        theirs = set[str]()
        for source in (holding.member for there in each for holding in there if holding.is_source):
            if source is not part.member and reader.reaches(
                source.worker, across=published is not None
            ):
                break  # of very many sources mostly the first
            theirs |= source.worker.transports
        else:
            return sorted(theirs)
    return []


def serve(operation: Operation) -> bool:
    """Whether the version to which it is bound can be read."""
    return of(operation.bound, operation).serves
