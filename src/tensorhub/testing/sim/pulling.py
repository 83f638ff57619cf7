"""A running fill: the real `scheduler.Pull`, and a lane to each granted source, as
`runtime.data.lanes` has them.

A lane is both of its ends: the reader's, which takes batches and settles what arrives, and the
owner's, which begins an access for what it was asked, and sends when that ends. The cluster's
driver takes it from one step to the next.

Responsible for what each step does to the books, to memory and to the owner. Not responsible for
when it happens.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from collections.abc import Mapping, Sequence
from typing import NamedTuple, Protocol
from zlib import crc32

from tensorhub.layouts.reading import Selection
from tensorhub.memory.on_demand import Loader
from tensorhub.messages import HAS_RUNS_MAX, Grant, Origin
from tensorhub.model.accesses import Access, Refusal, Wait
from tensorhub.model.digests import runs_of
from tensorhub.model.manifest import Manifest
from tensorhub.scheduler.links import FlowMeter
from tensorhub.scheduler.pull import Pull
from tensorhub.scheduler.requests import Requests, patience_s
from tensorhub.testing.sim.digests import SimDigests
from tensorhub.testing.sim.filler import SimFiller
from tensorhub.testing.sim.layouts import covered, part_of
from tensorhub.testing.sim.memory import digest_of, sent_digest
from tensorhub.testing.sim.ports import HandlePort, WorldPort
from tensorhub.types import ContentId, LeaseId
from tensorhub.worker.calls import StartPull


class Frame(NamedTuple):
    """One answer on its way to a reader: chunks (number, the cell, its digest); or the chunks that
    its source lacks, and the chunks that it has; or why the lane ends.
    """

    chunks: tuple[tuple[int, str, int | None], ...] = ()
    lacking: tuple[int, ...] = ()
    has: tuple[tuple[int, int], ...] = ()
    failure: str = ""
    at_source: int | None = None  # the source's own chunk that was wrong
    # of the chunks that are sent as deltas: the cells that the deltas start from
    bases: Mapping[int, str] = {}


class LaneEnd(HandlePort, Protocol):
    """A handle that reads, or is read."""

    filler: SimFiller
    digests: SimDigests
    pull: Reading | None  # the last fill's
    serving: dict[SimLane, None]  # of others, which read this memory
    reads_backwards: bool  # the last chunk of a request first
    loader: Loader | None  # of an archived version
    base: tuple[ContentId, dict[int, str]] | None  # what it has of the content before
    shadow: tuple[ContentId, Sequence[str]] | None  # what it keeps of the content before

    @property
    def cluster(self) -> LaneWorld: ...

    def select(self, generation: int, selection: Selection) -> None:
        """A reader says of which of its bytes the next chunks are."""

    @property
    def layout_of_cells(self) -> Manifest:
        """Of which its cells are the chunks."""

    def pull_done(self, start: StartPull) -> None:
        """All that was wanted is there."""


class LaneWorld(WorldPort, Protocol):
    """What lanes need of their world."""

    data: DataPlane

    def find(self, grant: Grant) -> LaneEnd | None:
        """The memory that a grant names, if its process is alive."""


class DataPlane(Protocol):
    """When what lanes want to happen does."""

    def lane_made(self, lane: SimLane) -> None:
        """It is to connect."""

    def chunks_offered(self, handle: LaneEnd) -> None:
        """Readers that wait there may go on: what they wait for has come, or never will."""

    def lanes_wanted(self, reading: Reading) -> None:
        """There may be chunks to ask for."""

    def lane_closed(self, lane: SimLane) -> None:
        """Its reader's end is over; its owner's will be."""

    def lane_cut(self, lane: SimLane) -> None:
        """Its reader wants it to end."""

    def lane_shut(self, lane: SimLane) -> None:
        """Its owner shuts the connection."""

    def reader_died(self, lane: SimLane) -> None:
        """Its reader's process is no more."""

    def source_died(self, lane: SimLane) -> None:
        """Its owner's process is no more."""


class SimLane:
    """One source of one fill."""

    def __init__(self, reading: Reading, grant: Grant) -> None:
        self.reading = reading
        self.reader = reading.reader
        self.grant = grant
        self.lease = LeaseId(grant.lease)
        # What it brings, where it reads a selection. On its way are the numbers in that; frames
        # have the reader's.
        self.part = part_of(reading.start.manifest, grant.shard, grant.selection)
        self.brings = None if self.part is None else self.part.chunks
        self.reader.cluster.guarantees.asks(self.reader, grant, self.part)
        self.incarnation = reading.reader.worker.incarnation  # as whom it reads
        self.source: LaneEnd | None = None  # once connected
        stall_timeout_s = reading.reader.cluster.options.stall_timeout_s
        self.requests = Requests(reading.books, self.lease, patience_s(stall_timeout_s))
        self.meter = FlowMeter()
        # at the owner: what it was asked for, and has not begun to send
        self.queue: deque[tuple[int, ...]] = deque()
        self.access: Access | None = None  # the owner's running one
        self.is_cut = False  # its reader wants no more of it
        self.is_stopped = False  # its owner serves it no more
        self.ended = False  # nobody writes for it any more
        self.failure = ""  # why it has, where its reader did not want it
        self.began = reading.reader.cluster.now
        self.ended_at: float | None = None
        # Of a driver with a clock:
        self.is_open = False  # connected
        self.is_feeding = False  # its reader's thread is woken
        self.is_waiting = False  # its owner lacks what it is asked for, or has nothing to do
        self.is_watched = False  # its reader looks for a stall
        self.up_due = 0.0
        self.down_due = 0.0
        self.heard_at = 0.0  # by its reader
        self.patient_until = 0.0  # its owner waits for what it lacks
        self.stalled_until = 0.0  # its owner sends nothing before

    def __repr__(self) -> str:
        return (
            f"<SimLane {self.lease} {self.reader.name} <- "
            f"{self.grant.source}{', ended' if self.ended else ''}>"
        )

    # -- the reader's side

    def connect(self) -> str:
        """Find the owner; why it cannot be reached, or nothing."""
        source = self.reader.cluster.find(self.grant)
        if source is None or source.worker.incarnation != self.grant.incarnation:
            return "unreachable"
        if self.source is None:
            self.source = source
            source.serving[self] = None
            is_open = source.worker.owner.digests(source.id, self.grant.generation) is not None
            if self.part is not None and is_open:
                source.select(self.grant.generation, self.part.selection)
        return ""

    def submit(self, batch_bytes: int) -> list[tuple[int, ...]]:
        """Ask for batches."""
        if self.is_cut or self.ended:
            return []
        batches = self.requests.ask(batch_bytes)
        if (brings := self.brings) is not None:
            batches = [tuple([bisect_left(brings, chunk) for chunk in batch]) for batch in batches]
        return [batch[::-1] if self.reader.reads_backwards else batch for batch in batches]

    def _mine(self, chunks: Sequence[int]) -> tuple[int, ...]:
        """These chunks in the reader's numbers."""
        return (
            tuple(chunks)
            if self.brings is None
            else tuple([self.brings[chunk] for chunk in chunks])
        )

    def settle(self, frame: Frame) -> None:
        """Take an arrived frame: check it, enter it into the books, and offer its chunks to
        readers.
        """
        if frame.failure:
            self.end(frame.failure, frame.at_source)
            return
        reading, reader = self.reading, self.reader
        if frame.lacking:
            if self.requests.lacked(frame.lacking, frame.has, reader.cluster.now):
                reader.cluster.took("source given up that lacks the rest")
                self.end("starved")
                return
            reader.cluster.data.lanes_wanted(reading)
            return
        nbytes = sum(reading.start.manifest.sizes[chunk] for chunk, _, _ in frame.chunks)
        self.meter.arrived(nbytes, reader.cluster.now)
        frame = frame._replace(chunks=self._made_of(frame))
        for chunk, cell, _ in frame.chunks:
            reader.filler.receive(chunk, cell, reading.start)
        content_id, cells = reading.start.version.content_id, (cell for _, cell, _ in frame.chunks)
        if self.source is not None and not reading.start.again:
            reader.cluster.guarantees.crossings.arrived(reader, self.source, content_id, cells)
        named = [(chunk, digest) for chunk, _, digest in frame.chunks]
        is_digested = reading.start.manifest.digest != "none"
        made = {chunk: digest_of(cell) for chunk, cell, _ in frame.chunks if is_digested}
        good, bad = Requests.sort_out(named, made, reading.start.published, is_digested=is_digested)
        self.requests.arrived(good, bad)
        origin = Origin(self.grant.registration, self.grant.generation)
        reader.filler.offer(reading.start, good, origin)
        reading.settled(self)
        corrupt = [chunk for chunk in bad if chunk not in frame.bases]
        if corrupt:
            first = corrupt[0]
            self.end("corrupt", first if self.brings is None else bisect_left(self.brings, first))
        elif bad:
            reader.cluster.took("wrong delta")

    def _made_of(self, frame: Frame) -> tuple[tuple[int, str, int | None], ...]:
        """What the reader has of a frame's chunks once it has applied their deltas."""
        held = self.reader.base[1] if self.reader.base is not None else {}
        made: list[tuple[int, str, int | None]] = []
        for chunk, cell, digest in frame.chunks:
            before = held.pop(chunk, "no base")
            is_right = chunk not in frame.bases or before == frame.bases[chunk]
            made.append((chunk, cell if is_right else f"a delta applied to {before}", digest))
        return tuple(made)

    # -- the owner's side

    def begin(self, wanted: tuple[int, ...], bytes_max: int) -> Access | Wait | Refusal:
        """Begin an access to some of the wanted chunks."""
        assert self.source is not None
        if self.is_stopped:
            return Refusal("this reader is served no more")
        grant, content = self.grant, ContentId(self.reading.start.version.content_id)
        if self.part is not None:
            self.source.select(grant.generation, self.part.selection)
        begun = self.source.worker.owner.begin(
            self.source.id, grant.generation, content, wanted, bytes_max, grant.selection
        )
        if self.source.loader is not None and not isinstance(begun, Refusal):
            own = wanted if self.part is None else range(len(self.source.cells))
            fault = self.source.loader.want(runs_of(own))
            begun = fault if fault is not None and isinstance(begun, Wait) else begun
        if isinstance(begun, Access):
            self.access, chunks = begun, begun.chunks
            if self.part is not None:
                selected, theirs = self.part.selection.chunks, self.source.layout_of_cells
                chunks = tuple(own for chunk in chunks for own in covered(theirs, selected[chunk]))
            self.source.cluster.guarantees.served(
                self.source, grant, chunks, self.reading.start.version
            )
        return begun

    def lack(self) -> Frame:
        """End the request at the head of the queue: nothing of it is here, or comes soon."""
        return Frame(lacking=self._mine(self.queue.popleft()), has=self.has())

    def has(self) -> tuple[tuple[int, int], ...]:
        """What the owner could send, as runs."""
        assert self.source is not None
        has = self.source.worker.owner.has(
            self.source.id, self.grant.generation, HAS_RUNS_MAX, self.grant.selection
        )
        if self.brings is None:
            return has
        return tuple(
            run for first, count in has for run in runs_of(self._mine(range(first, first + count)))
        )

    def finish(self) -> Frame:
        """End the access: what its cells hold now is on its way, with digests that are made of it
        if there are none yet.
        """
        source, access = self.source, self.access
        assert source is not None
        assert access is not None
        digested = self.reading.start.manifest.digest != "none"
        found: list[tuple[int, str, int | None]] = []
        for chunk, known in zip(access.chunks, access.digests, strict=True):
            cell = source.cell_in(access.selection, chunk)
            digest = (
                sent_digest(source.worker.owner, access, chunk, known, cell) if digested else known
            )
            (number,) = self._mine([chunk])
            found.append((number, cell, digest))
        self.let_go()
        if source.worker.alive:
            source.digests.tell_made()
        return Frame(tuple(found), bases=self._bases([chunk for chunk, _, _ in found]))

    def _bases(self, chunks: Sequence[int]) -> Mapping[int, str]:
        """Which of these chunks are sent as deltas, and what those start from. Some lanes are so
        fast that none is asked for.
        """
        wanted, source = self.reader.base, self.source
        if source is None or source.shadow is None or wanted is None or self.part is not None:
            return {}
        is_slow = crc32(self.lease.encode()) % 2 == 0
        if not is_slow or self.reading.start.staged or source.shadow[0] != wanted[0]:
            return {}
        found = {chunk: source.shadow[1][chunk] for chunk in chunks if chunk in wanted[1]}
        if found:
            self.reader.cluster.took("read as deltas")
        return found

    def let_go(self) -> None:
        """The owner's access, if one runs, is over."""
        access, self.access = self.access, None
        if access is not None and self.source is not None and self.source.worker.alive:
            self.source.worker.owner.end(access)
            self.source.cluster.access_ended(self.source)

    # -- its end

    def end(self, failure: str = "", chunk: int | None = None) -> None:
        """The lane writes no more; `failure`: why, if its reader did not want it; `chunk`: that was
        corrupt.
        """
        if self.ended:
            return
        self.ended, self.ended_at = True, self.reader.cluster.now
        self.failure = failure
        if failure == "corrupt" and self.reader.last_call is not None:
            self.reader.last_call.damaged.add(self.grant.source)
        self.reader.cluster.data.lane_closed(self)
        self.reading.lane_ended(self, failure, chunk)

    def close(self) -> None:
        """The owner's thread for it is over."""
        self.is_stopped = True
        self.queue.clear()
        self.let_go()
        if self.source is not None:
            self.source.serving.pop(self, None)


class Reading:
    """The chunks that a fill still lacks, and the sources that it may read from."""

    def __init__(self, reader: LaneEnd, start: StartPull) -> None:
        self.reader = reader
        self.start = start
        self.books = Pull(start.manifest.sizes, start.copied)
        self.chunk_bytes = max(start.manifest.sizes, default=1)
        self.lanes: dict[str, SimLane] = {}  # by lease; those that have not ended
        self.all_lanes: list[SimLane] = []
        self.over = self.books.done  # all is verified, or it was stopped: nothing more is asked for
        self.stopped = False
        self.is_checked = False  # its books, since it has ended: they change no more
        self.patched = False  # some source was granted while nobody held all of it
        self.resumed = False  # a source was added when something had been verified
        for grant in start.grants:
            self.add(grant)

    def __repr__(self) -> str:
        return f"<Reading of {self.reader.name}: {self.books!r}>"

    @property
    def grants(self) -> dict[str, Grant]:
        """Those that are still read under, by lease."""
        return {lease: lane.grant for lease, lane in self.lanes.items() if not lane.is_cut}

    @property
    def missing(self) -> set[int]:
        """Chunks that are not verified yet."""
        return {chunk for chunk, verified in enumerate(self.books.verified) if not verified}

    @property
    def ended(self) -> bool:
        """Whether nothing of it runs any more."""
        return self.over and not self.lanes

    def add(self, grant: Grant) -> None:
        """Read from this source as well."""
        if self.over:
            return
        lane = self.lanes[grant.lease] = SimLane(self, grant)
        self.books.add_source(lane.lease, grant.complete, lane.brings)
        self.resumed = self.books.chunks_verified > 0
        self.all_lanes.append(lane)
        self.reader.cluster.data.lane_made(lane)

    def drop(self, lease: str) -> None:
        """Ask nothing more of this source."""
        lane = self.lanes.get(lease)
        if lane is not None and not lane.is_cut:
            lane.is_cut = True
            self.books.drop_source(lane.lease)
            self.reader.cluster.data.lane_cut(lane)

    def stop(self) -> None:
        """End every read; over when no lane is left."""
        if not self.stopped:
            self.over = self.stopped = True
            self._cut_all()

    def _tell_flows(self) -> None:
        """What links have carried, where that tells something."""
        flows = tuple(
            flow
            for lane in self.all_lanes
            if not lane.failure and (flow := lane.meter.flow(lane.lease)) is not None
        )
        progress = self.reader.member.progress(
            self.books.chunks_verified, self.books.bytes_read, flows
        )
        if flows and progress is not None:
            self.reader.worker.say(progress)

    def settled(self, lane: SimLane) -> None:
        """Something has arrived."""
        if self.books.done and not self.over:
            self._end()
            lane.end()
            self._cut_all()
        elif not self.over:
            self.reader.cluster.data.lanes_wanted(self)

    def _end(self) -> None:
        self.over = True
        self._tell_flows()

    def _cut_all(self) -> None:
        for lane in list(self.lanes.values()):
            lane.is_cut = True
            self.reader.cluster.data.lane_cut(lane)

    def lane_ended(self, lane: SimLane, failure: str, chunk: int | None) -> None:
        """Its thread is over."""
        del self.lanes[lane.grant.lease]
        self.books.lane_ended(lane.lease)
        cluster, reader = self.reader.cluster, self.reader
        if not reader.worker.alive:
            return
        if failure and not lane.is_cut and not self.over:
            reader.apply(
                reader.member.source_failed(
                    lane.grant.lease, failure, "", reader.worker.now, chunk=chunk
                )
            )
        if self.books.done and not self.over:
            self._end()
            self._cut_all()
        if not self.over:
            cluster.data.lanes_wanted(self)
        elif not self.lanes and not self.stopped:
            reader.pull_done(self.start)
        elif not self.lanes:
            cluster.handle_moved(reader)
