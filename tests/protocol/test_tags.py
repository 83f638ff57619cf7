"""The numbers of messages on the wire are pinned: whoever changes one changes the protocol."""

from __future__ import annotations

from tensorhub.protocol.tags import TAGS
from tensorhub.transport.archive import DIALECT as ARCHIVE
from tensorhub.transport.cma import DIALECT as CMA
from tensorhub.transport.cuda_ipc import DIALECT as CUDA_IPC
from tensorhub.transport.nixl.agents import DIALECT as NIXL
from tensorhub.transport.rdma.messages import DIALECT as RDMA
from tensorhub.transport.shm import DIALECT as SHM

NUMBERS = """
    ClientHello=1 ServerHello=2 Proof=3 Join=16 Heartbeat=17 Leave=18 Register=19 Deregister=20 Publish=21 Fill=22
    ReadyToWrite=23 Prepared=24 Abandon=25 Resolve=26 ReadFailed=27 Progress=28 LeaveRequest=29 Fenced=30 ReaderCut=31
    GetManifest=32 Watch=33 Check=34 Describe=35
    Rollback=40 Retain=41 Pin=42 Unpin=43 CopyRefused=44 RetainedAck=45
    DigestedAgain=46 Unwatch=47 BegunWith=48 Digests=49 Compared=50 Restore=51 Welcome=64 Dismissed=65
    HeartbeatAck=66 Registered=67 Done=68 Refused=69 EpochChanged=70 Start=71 Write=72 AddSource=73 DropSource=74
    Outcome=75 LeaveGranted=76 CutReader=77 ManifestReply=78 Announce=79 Description=80 Revoked=84 MakeCopy=86
    DropCopy=87 SetRetained=88 DigestAgain=89 TellDigests=90 Compare=91 RegisterAgain=96 ReadyAgain=97
    CheckCoverage=99 Covered=57
    Read=112 Locate=113 ChunksFollow=120 StillWaiting=121 ReadRefused=122 ChunksLie=123 ChunkFollows=126 ChunkDigest=127
    TransportRequest=102 TransportReply=103 NotThisWay=106 GetPart=56 Select=60 Selected=61
    DoneReading=101
    Took=37 Served=38 GetEvents=39 Explain=52 GetUpdates=53 Events=82 Explained=83 Updates=92
    GetPublication=58 PublicationReply=98 CheckStamp=54 VersionReply=100 DeltasFollow=59
    Advice=93
"""
# used once, and never to be used again
RETIRED = {36, 55, 62, 63, 81, 85, 95, 104, 105, *range(107, 112), *range(114, 120), 124, 125}
OWN = {
    ARCHIVE: "Find=1 ArchivedPlace=2",
    CMA: "Find=1 MemoryIs=2 FindRegions=3 RegionsAre=4",
    SHM: "Find=1 SegmentsAre=2 FindRegions=3 RegionsAre=4",
    CUDA_IPC: "Find=1 AllocationsAre=2 FindRegions=3 RegionsAre=4",
    NIXL: "Find=1 AgentIs=2 FindRegions=3 RegionsAre=4",
    RDMA: "FindPorts=1 Pair=2 PieceTaken=3 PortsAre=4 Paired=5 ChunksPinned=6 PieceStaged=7",
}


def pinned(text: str) -> dict[str, int]:
    return {name: int(number) for name, number in (each.split("=") for each in text.split())}


def test_the_protocols_numbers_are_what_they_were() -> None:
    """If this fails, the protocol has changed: pin the new numbers here."""
    assert {kind.__name__: number for kind, number in TAGS.items()} == pinned(NUMBERS)
    assert len(set(TAGS.values())) == len(TAGS)
    assert not RETIRED & set(TAGS.values())


def test_the_numbers_of_each_transport_are_what_they_were() -> None:
    for dialect, text in OWN.items():
        assert {kind.__name__: number for kind, number in dialect.numbers.items()} == pinned(text)
        assert len(set(dialect.numbers.values())) == len(dialect.numbers)
