"""The preview of a transfer plan: the reader's own plan, counted by source, before anything is
read.

Responsible for counting. `reading_for` makes the plan, as it does for a fill.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from tensorhub.layouts.arrangement import Coordinates
from tensorhub.layouts.joining import publication_of, reading_for
from tensorhub.layouts.pieces import Declaration
from tensorhub.layouts.publication import Publication
from tensorhub.layouts.published import Published
from tensorhub.layouts.reading import Part, Reading, ReshardedManifest
from tensorhub.layouts.whole import whole_manifest
from tensorhub.model.manifest import Manifest
from tensorhub.model.read_plan import PlannedSource, ReadPlan
from tensorhub.types import DeltaUse, ModelInfo, ReplicaView, VersionInfo


@dataclass(frozen=True, slots=True)
class Known:
    """Of a version. `layout_id`: in which it was published. `parts`: of `published`, by id. `info`:
    its holders. `deltas`: why the reader's worker asks for none.
    """

    version: VersionInfo
    layout_id: str
    published: Published
    parts: Mapping[str, bytes]
    info: ModelInfo
    deltas: DeltaUse = DeltaUse.UNDECIDED


def preview_whole(known: Known, names: tuple[str, ...] | None) -> ReadPlan:
    """What a fetch of the whole model would read of that version, or of the tensors of these names.

    Raises as `publication_of` and `whole_manifest`. Takes up to seconds.
    """
    publication = publication_of(known.published, known.parts)
    manifest = whole_manifest(known.published, publication, names)
    declared = Declaration(partial=names is not None)
    known = replace(known, deltas=DeltaUse.NO_BASE)  # its memory is new
    return _counted(
        known, publication, reading_for(known.published, publication, manifest, declared), declared
    )


def preview_ranks(known: Known, readers: Sequence[tuple[Manifest, Declaration]]) -> list[ReadPlan]:
    """What each of these ranks of one group would read of that version.

    Raises as `publication_of` and `reading_for`; also, if they are all ranks of their group, if
    they leave bytes unread. Takes up to seconds.
    """
    publication = publication_of(known.published, known.parts)
    made = [reading_for(known.published, publication, *reader) for reader in readers]
    if len(readers) == readers[0][1].world_size:
        is_partial = all(declared.partial for _, declared in readers)
        publication.check_readers(
            [each.lies for each in made if each.lies is not None], partial=is_partial
        )
    return [
        _counted(known, publication, each, declared)
        for each, (_, declared) in zip(made, readers, strict=True)
    ]


def _counted(
    known: Known, publication: Publication, made: ReshardedManifest, declared: Declaration
) -> ReadPlan:
    shards = {each.ranks[0]: each.coordinates for each in publication.classes}
    as_published = [view for view in known.info.replicas if view.layout_id == known.layout_id]
    mine = [
        view for view in known.info.replicas if made.layout_id == view.layout_id != known.layout_id
    ]
    sources = [_source(part, made.reading, shards[part.shard], as_published) for part in made.parts]
    is_chunks = bool(mine) or made.layout_id == known.layout_id
    return ReadPlan(
        known.version,
        known.layout_id,
        declared.rank,
        declared.world_size,
        _nbytes(made.lies) if made.lies is not None else 0,
        tuple(sources),
        _holders(mine, [declared.rank]),
        known.deltas if is_chunks else DeltaUse.OTHER_LAYOUT,
    )


def _source(
    part: Part, reading: Reading, shard: Coordinates, replicas: Iterable[ReplicaView]
) -> PlannedSource:
    return PlannedSource(
        part.ranks,
        _holders(replicas, part.ranks),
        chunks=len(part.chunks),
        cells=sum([reading.counts[chunk][0] for chunk in part.chunks]),
        runs=sum([reading.counts[chunk][1] for chunk in part.chunks]),
        nbytes=part.selection.nbytes,
        shard_nbytes=shard.nbytes,
    )


def _holders(replicas: Iterable[ReplicaView], ranks: Sequence[int]) -> tuple[str, ...]:
    """The workers that can be read."""
    ready = (shard for view in replicas if view.state == "ready" for shard in view.shards)
    return tuple(
        sorted(
            {shard.worker for shard in ready if shard.rank in ranks and shard.state == "complete"}
        )
    )


def _nbytes(reader: Coordinates) -> int:
    """Of the memory that its pieces are in."""
    sizes = reader.form_sizes
    its = reader.arrangement
    places = {
        (region, offset, sizes[f])
        for region, offset, f in zip(its.regions, its.offsets, its.form_of, strict=True)
    }
    return sum(size for _, _, size in places)
