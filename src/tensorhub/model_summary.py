"""What `summarize` returns: a model in counts, as short for thousands of workers as for ten.

Responsible for the values. `coordinator.summaries` counts; `types.ModelInfo` has the details.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated

from tensorhub.types import U64, Id, Length, Name, Seconds


@dataclass(frozen=True, slots=True)
class LayoutSummary:
    """One of the layouts in which a version is held, in `summarize`. Readers of one layout read from one another chunk by
    chunk; its first ones bridge: they read from holders of the published layout.
    """

    layout_id: Name
    published: bool  # it is the one in which the version was published
    replicas: U64
    ready: U64  # of these
    bridging: U64  # groups of which a rank reads from replicas of another layout now
    shards: U64  # of all its replicas
    chunks: U64  # of all these shards, when they are complete
    chunks_verified: U64  # that are there


@dataclass(frozen=True, slots=True)
class VersionSummary:
    """One version in `summarize`. Replicas are counted by state; a shard of a replica is one rank's memory."""

    version: U64
    state: Name
    lineage: U64
    nbytes: U64
    world_size: U64
    retained: bool
    copies: U64  # complete copies that can be read now: of each shard so many at least
    ready: U64  # replicas
    filling: U64
    draining: U64
    torn: U64
    doubtful: U64  # shards whose worker is not heard at the moment, and may be dead
    quarantined: U64  # shards whose bytes have changed: nobody reads them
    readers: U64  # reads that are running
    layouts_known: U64 = 0  # in which there are replicas; `layouts` has 8 of them at most
    # If it is held in other layouts than the published one: that one first, then those with the most replicas.
    layouts: Annotated[tuple[LayoutSummary, ...], Length(1024)] = ()
    missing: U64 = 0  # shards of the published layout that no replica which takes readers has all of


@dataclass(frozen=True, slots=True)
class CallsSummary:
    """The calls of one kind that are under way and wait for the same thing. A group's call counts once.

    `call`: "publish", "replicate", "update", "prefetch", "fetch", "leave" (`unpublish`, `close` and the like), "retain",
    "pin", "unpin" or "rollback". `waits_for`:

    - "ranks": other ranks of the group, which have not called yet.
    - "version": a version that can be fetched; nothing that fits is published, or nobody holds it now.
    - "successor": another holder of a retained version, which the caller holds last.
    - "before_write": a rank that is not ready to be overwritten; its `before_write` runs.
    - "source": a worker to read from.
    - "chunks": bytes that are being read.
    - "digests": agreement with the digests of the publisher.
    - "readers": running reads of the memory that is to be given up.
    - "holders": holders that have not acknowledged yet that they keep the version.
    - "store": the coordinator's store.

    `longest_s`: for how long nothing has come of the one that has stood still longest. The call itself, a chosen version,
    new bytes and a rank's vote end a standstill. A call that waits for chunks, and stands still for more than a few seconds,
    is stalled.
    """

    call: Name
    waits_for: Name
    count: U64
    longest_s: Seconds
    who: Name  # the group of the one that has stood still longest; of a leave the worker, of the last four kinds nobody


@dataclass(frozen=True, slots=True)
class SilentWorker:
    """A worker in `summarize` that is suspect: it is not heard, and may be dead."""

    name: Name
    incarnation: Id
    silent_s: Seconds


@dataclass(frozen=True, slots=True)
class ModelSummary:
    """What the coordinator knows about one model, in counts. All counts are of the same moment."""

    model: Name
    lineage: U64
    mark: int | None  # the newest number ever published in this lineage
    retain: U64
    workers: U64  # that have registered memory, read-only ones included
    suspect: U64  # those of them that are not heard
    groups: U64
    shards: U64  # of all replicas
    reads: U64  # read leases: reads that run, and reads that are being cut off
    versions_known: U64  # `versions` has the newest 32 of them
    versions: Annotated[tuple[VersionSummary, ...], Length(1024)]  # the newest first
    calls: Annotated[tuple[CallsSummary, ...], Length(1024)]  # what has stood still longest first
    silent: Annotated[tuple[SilentWorker, ...], Length(1024)]  # 16 suspect workers at most, longest silent first
    coordinator_behind_s: Seconds = field(default=0.0, compare=False)  # how late the coordinator is with calls

    @property
    def rows(self) -> int:
        """How many versions, shards, reads and workers `describe` would list."""
        return self.versions_known + self.shards + self.reads + self.workers
