"""The result of `plan`: a reader's transfer plan, as counts for each source.

Responsible for the values. `layouts.preview` makes them.
"""

from __future__ import annotations

from dataclasses import dataclass

from tensorhub.types import DeltaUse, VersionInfo


@dataclass(frozen=True, slots=True)
class PlannedSource:
    """What would be read of one published shard. Ranks with equal shards are one source: any of
    them may be read.

    A cell is a part of a tensor that the source has and the reader wants: runs at equal distances.
    A run is contiguous in both memories. Cells are read in chunks, each of which has its own
    digest.
    """

    ranks: tuple[int, ...]  # of the group that published the version
    workers: tuple[str, ...]  # that hold one of these shards now, by name
    chunks: int
    cells: int
    runs: int
    nbytes: int
    shard_nbytes: int  # of all that the shard holds; tied tensors count each time


@dataclass(frozen=True, slots=True)
class ReadPlan:
    """The reads of one rank of a layout, for a version without a holder in that layout.

    `nbytes`, `chunks`, `cells`, `runs`: of all sources together. `excess_nbytes`: bytes that would
    be read and not kept. `as_dict()`: for JSON.
    """

    version: VersionInfo
    layout_id: str  # in which the version was published
    rank: int  # of the reader
    world_size: int
    # of the reader's tensors, without what no source is said for; tied tensors count once
    nbytes_wanted: int
    sources: tuple[PlannedSource, ...]
    # workers that hold it as this reader would, which then reads from them, chunk by chunk
    alike: tuple[str, ...] = ()
    # why no chunk would come as a delta; "undecided": the read decides, by what the reader holds,
    # and by each source's host and link
    deltas: DeltaUse = DeltaUse.UNDECIDED

    @property
    def chunks(self) -> int:
        return sum(source.chunks for source in self.sources)

    @property
    def cells(self) -> int:
        return sum(source.cells for source in self.sources)

    @property
    def runs(self) -> int:
        return sum(source.runs for source in self.sources)

    @property
    def nbytes(self) -> int:
        """What would be read."""
        return sum(source.nbytes for source in self.sources)

    @property
    def excess_nbytes(self) -> int:
        """What would be read and not kept: nothing, as long as plans take each byte once."""
        return self.nbytes - self.nbytes_wanted

    def as_dict(self) -> dict[str, object]:
        """For JSON."""
        names = "ranks workers chunks cells runs nbytes shard_nbytes".split()
        return {
            "model": self.version.model,
            "version": self.version.version,
            "content_id": self.version.content_id,
            "layout_id": self.layout_id,
            "rank": self.rank,
            "world_size": self.world_size,
            "nbytes": self.nbytes,
            "excess_nbytes": self.excess_nbytes,
            "chunks": self.chunks,
            "cells": self.cells,
            "runs": self.runs,
            "sources": [{name: getattr(source, name) for name in names} for source in self.sources],
            "alike": self.alike,
            "deltas": self.deltas,
        }
