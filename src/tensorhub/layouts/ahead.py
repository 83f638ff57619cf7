"""A plan that is shown before anything is read: the reader's own one, counted by source.

Responsible for counting. What is read from whom is what `reading_for` says: a fill makes the same plan.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from tensorhub.layouts.arrangement import Coordinates
from tensorhub.layouts.joining import Declaration, publication_of, reader_of, reading_for
from tensorhub.layouts.published import Published
from tensorhub.layouts.reading import Part, Reading
from tensorhub.layouts.whole import whole_manifest
from tensorhub.manifest import Manifest
from tensorhub.read_plan import PlannedSource, ReadPlan
from tensorhub.types import ModelInfo, ReplicaView, VersionInfo


@dataclass(frozen=True, slots=True)
class Known:
    """Of a version. `layout_id`: in which it was published. `parts`: what `published` names. `info`: who holds what."""

    version: VersionInfo
    layout_id: str
    published: Published
    parts: Mapping[str, bytes]
    info: ModelInfo


def plan_ahead(known: Known, reader: tuple[Manifest, Declaration] | None, names: tuple[str, ...] | None = None) -> ReadPlan:
    """What this reader would read of that version. `reader` None: the whole model, or the tensors of these names.

    Raises as `publication_of`, `whole_manifest` and `reading_for`. Takes up to seconds.
    """
    published, publication = known.published, publication_of(known.published, known.parts)
    if reader is None:
        reader = whole_manifest(published, publication, names), Declaration(partial=names is not None)
    manifest, declared = reader
    reading = reading_for(published, publication, manifest, declared).reading
    shards = {each.ranks[0]: each.coordinates for each in publication.classes}
    as_published = [view for view in known.info.replicas if view.layout_id == known.layout_id]
    mine = [view for view in known.info.replicas if manifest.layout_id == view.layout_id != known.layout_id]
    sources = [_source(part, reading, shards[part.shard], as_published) for part in reading.parts]
    return ReadPlan(
        known.version,
        known.layout_id,
        declared.rank,
        declared.world_size,
        _nbytes(reader_of(publication, manifest, declared)),
        tuple(sources),
        _holders(mine, [declared.rank]),
    )


def _source(part: Part, reading: Reading, shard: Coordinates, replicas: Iterable[ReplicaView]) -> PlannedSource:
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
    return tuple(sorted({shard.worker for shard in ready if shard.rank in ranks and shard.state == "complete"}))


def _nbytes(reader: Coordinates) -> int:
    """Of the memory that its pieces are in."""
    sizes = reader.form_sizes
    its = reader.arrangement
    places = {(region, offset, sizes[f]) for region, offset, f in zip(its.regions, its.offsets, its.form_of, strict=True)}
    return sum(size for _, _, size in places)
