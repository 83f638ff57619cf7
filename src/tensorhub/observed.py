"""What observers receive: events, and where the seconds of an update went.

Values only. `coordinator.observing` makes them; `Hub.events`, `Hub.explain` and the HTTP endpoints
hand them out.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Final

from tensorhub.types import U64, Id, Length, Name, OpKey, Range, Seconds, Since, Text

UnixTime = Annotated[float, Range(0, 10**11)]  # seconds since 1970, by the coordinator's clock

LINKS_MAX = 64  # of one rank's timings
PHASES_MAX = 16
PARTS_MAX = 64  # of one explanation
EVENTS_PAGE_MAX = 256  # of one answer
UPDATES_PAGE_MAX = 64  # of one answer

Phases = Annotated[tuple[tuple[Name, Seconds], ...], Length(PHASES_MAX)]
"""Wall seconds of one rank's call by `PHASE_NAMES`, in their order in time."""

# they add up to the call; "wait" of a `FetchReport` is the sum of those that it does not name
PHASE_NAMES: Final = {
    "resolve": "until the call was bound to a version",
    "prepare": "until the first read, besides the next four: planning it, and messages",
    "hook": "the caller's before_write ran, before or after the reads",
    "fence": "ending the reads of the old content",
    "room": "making room in host memory",
    "copy": "copies from other memory of this worker",
    "wait": "while it read: for bytes",
    "transfer": "while it read: bytes came",
    "verify": "digests of what came, or was there",
    "unpack": "from the library's own memory into the tensors",
    "apply": "what was staged, into the tensors",
    "commit": "until all ranks had voted, and this one had its outcome",
}

EVENT_KINDS: Final = {
    "published": "a version became visible",
    "readable": "a version can be read again",
    "unpublished": "a version has no complete copy any more",
    "updated": "a group has committed a version",
    "failed": "a call of a group has failed",
    "joined": "a worker has joined, with its first memory",
    "left": "a worker has left",
    "suspect": "a worker is silent",
    "lost": "a worker is taken for dead",
    "source_failed": "a reader has given up a source",
    "corrupt": "bytes had another digest than the publisher's",
    "rolled_back": "a new lineage has begun",
    "retained": "retention or a pin has changed",
    "behind": "the coordinator is late",
    "serving": "the coordinator has its state",
}

# of a worker's own endpoint
WORKER_EVENT_KINDS: Final = {
    "called": "a call of this worker that fills memory has ended",
    "served": "a reader of this worker is done",
}

PART_NAMES: Final = {
    "ranks": "waiting for the group's last rank to call",
    "version": "waiting for a version",
    "source": "waiting for a worker to read from",
    "before_write": "the caller's before_write ran",
    "fence": "ending the reads of the old version",
    "upstream": "waiting for chunks that the source itself did not have yet",
    "source busy": "the source served other readers, or was short of CPU or GIL",
    "source disk": "the source waited for its disk",
    "link": "bytes on their way: the network between source and reader",
    "loss": "bytes on their way, with many segments sent again",
    "reader": "the source waited for the reader to take bytes",
    "cpu": "the reader waited for a core, or used it",
    "gil": "the reader waited for its interpreter's lock",
    "digest": "digests of bytes that had arrived",
    "codec": "applying deltas",
    "copy": "copies within the reader",
    "digests": "waiting for the publisher's digests",
    "others": "waiting for another rank of the group",
    "store": "the coordinator's store",
    "coordinator": "the coordinator was late",
    "control": "messages between worker and coordinator, planning, and starting to read",
    "other": "not attributed",
}


@dataclass(frozen=True, slots=True)
class ClusterEvent:
    """One thing that happened. `number` counts one coordinator's events from 1 on; `epoch` says
    which one's: it grows with each start (0: not known).

    `kind`: see `EVENT_KINDS`, and `WORKER_EVENT_KINDS` for those of a worker's own endpoint.
    `worker`: a worker's or a group's name. `text`: one sentence.
    """

    number: U64
    at: UnixTime
    kind: Name
    model: Name = ""
    version: U64 | None = None
    worker: Name = ""
    text: Text = ""
    epoch: Annotated[U64, Since(19)] = 0


@dataclass(frozen=True, slots=True)
class LinkTiming:
    """What one source's lane cost its reader, in seconds summed over the lane's threads.

    `link_s`: blocked in the kernel for bytes. `empty_s`: the source had nothing to give yet, as far
    as its reader can tell (`ServedTiming.empty_s` is exact). `cpu_s`: used outside digests and
    codec. `delay_s`: runnable without a core. `gil_s`: estimated waits for the interpreter's lock.
    What is left of `seconds`, the lane had nothing to ask for.
    """

    lease: Id
    source: Name
    transport: Name
    kind: Name  # `SourceReport.kind`
    nbytes: U64
    seconds: Seconds  # wall, while it was a source
    link_s: Seconds = 0.0
    empty_s: Seconds = 0.0
    cpu_s: Seconds = 0.0
    delay_s: Seconds = 0.0
    gil_s: Seconds = 0.0
    digest_s: Seconds = 0.0
    codec_s: Seconds = 0.0
    site: Name = ""  # of the source; "" if it is the reader's


@dataclass(frozen=True, slots=True)
class ServedTiming:
    """What serving one reader cost its source, in seconds.

    `seconds`: wall, from the reader's first request until it was done; the others are summed over
    its connections. `blocked_s`: a socket took nothing more. `window_s`: the network waited for the
    reader to take its bytes (the kernel's receive window), a part of the time in which bytes were
    on their way. `empty_s`: this source itself lacked what was asked for. `resent`: TCP segments
    sent again, of `segments`. `readers`: served beside this one, on average.
    """

    lease: Id
    nbytes: U64
    seconds: Seconds
    blocked_s: Seconds = 0.0
    window_s: Seconds = 0.0
    cpu_s: Seconds = 0.0
    delay_s: Seconds = 0.0
    gil_s: Seconds = 0.0
    disk_s: Seconds = 0.0
    empty_s: Seconds = 0.0
    resent: U64 = 0
    segments: U64 = 0
    readers: Seconds = 0.0


@dataclass(frozen=True, slots=True)
class Part:
    """One part of a critical path, in its order in time. `name`: see `PART_NAMES`.

    `worker`: on which it was spent. `peer`: the source, or what `worker` waited for. `text`:
    figures, such as "210 of 500 Mbit/s".
    """

    name: Name
    seconds: Seconds
    worker: Name = ""
    peer: Name = ""
    text: Text = ""


@dataclass(frozen=True, slots=True)
class Explanation:
    """Where the seconds of one update of one group went, over all machines.

    `parts` add up to `seconds`, the wall time of the rank that took longest. `sentence` names the
    longest part. `unsure_s`: how far the division between parts on different machines may be off
    (the messages' own time). `help`: what would have made it faster, and by how much, as
    far as other updates of the model show that.
    """

    model: Name
    version: U64
    group: Name
    call: Name  # "update", "replicate", "prefetch" or "fetch"
    key: OpKey
    ended_at: UnixTime
    seconds: Seconds
    sentence: Text
    parts: Annotated[tuple[Part, ...], Length(PARTS_MAX)]
    links: Annotated[tuple[LinkTiming, ...], Length(LINKS_MAX)] = ()
    unsure_s: Seconds = 0.0
    nbytes: U64 = 0  # of the version
    help: Annotated[tuple[Text, ...], Length(8)] = ()
    lineage: Annotated[U64, Since(19)] = 0  # of the version: each rollback begins the next one

    def __str__(self) -> str:
        return self.sentence


@dataclass(frozen=True, slots=True)
class UpdateRow:
    """One recent update of one group in short, for lists and timelines; `key` has the model and
    the group.

    `version`: None if it was not bound. `outcome`: "committed", the name of the error, or
    "running", with what it took up to now. `worker`: the rank that took longest, whose `phases`
    these are, in their order in time; empty until it has told them. `longest`: the name of the
    longest part, and `sentence` what the explanation says.
    """

    key: OpKey
    version: U64 | None
    call: Name  # "update", "replicate", "prefetch" or "fetch"
    outcome: Name
    ended_at: UnixTime
    seconds: Seconds
    worker: Name = ""
    phases: Phases = ()
    bytes_read: U64 = 0  # of all ranks
    longest: Name = ""
    sentence: Text = ""
