"""Which number stands for which message on the wire.

The numbers are explicit, so that renaming or reordering classes does not change the protocol. A
message's fields are written in the order of their declaration. A number that was used once is never
given to another message.

A field that is appended has a default and names its version (`types.Since`). So does a new message,
in `SINCE`, and nothing else of it has to be done: an older peer is sent neither. Any other change
that an older peer would misread needs a new `messages.PROTOCOL_VERSION`.

A worker's new message gets a number from `QUESTIONS` if its first field is `request`. So a
coordinator that does not know the message can refuse it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from tensorhub import messages as m

QUESTIONS: Final = range(128, 192)

TAGS: Final[Mapping[type, int]] = {
    m.ClientHello: 1,
    m.ServerHello: 2,
    m.Proof: 3,
    # From a worker to the coordinator.
    m.Join: 16,
    m.Heartbeat: 17,
    m.Leave: 18,
    m.Register: 19,
    m.Deregister: 20,
    m.Publish: 21,
    m.Fill: 22,
    m.ReadyToWrite: 23,
    m.Prepared: 24,
    m.Abandon: 25,
    m.Resolve: 26,
    m.ReadFailed: 27,
    m.Progress: 28,
    m.LeaveRequest: 29,
    m.Fenced: 30,
    m.ReaderCut: 31,
    m.GetManifest: 32,
    m.GetPart: 56,
    m.GetPublication: 58,
    m.Watch: 33,
    m.Check: 34,
    m.Describe: 35,
    m.Rollback: 40,
    m.Retain: 41,
    m.Pin: 42,
    m.Unpin: 43,
    m.CopyRefused: 44,
    m.RetainedAck: 45,
    m.DigestedAgain: 46,
    m.Unwatch: 47,
    m.BegunWith: 48,
    m.Digests: 49,
    m.Compared: 50,
    m.Restore: 51,
    m.Covered: 57,
    m.Took: 37,
    m.Served: 38,
    m.GetEvents: 39,
    m.Explain: 52,
    m.GetUpdates: 53,
    m.CheckStamp: 54,
    # From the coordinator to a worker.
    m.Welcome: 64,
    m.Dismissed: 65,
    m.HeartbeatAck: 66,
    m.Registered: 67,
    m.Done: 68,
    m.Refused: 69,
    m.EpochChanged: 70,
    m.Start: 71,
    m.Write: 72,
    m.AddSource: 73,
    m.DropSource: 74,
    m.Outcome: 75,
    m.LeaveGranted: 76,
    m.CutReader: 77,
    m.ManifestReply: 78,
    m.PublicationReply: 98,
    m.VersionReply: 100,
    m.Announce: 79,
    m.Description: 80,
    m.Revoked: 84,  # (85 was MustStay)
    m.MakeCopy: 86,
    m.DropCopy: 87,
    m.SetRetained: 88,
    m.DigestAgain: 89,
    m.TellDigests: 90,
    m.Compare: 91,
    m.RegisterAgain: 96,
    m.ReadyAgain: 97,
    m.CheckCoverage: 99,
    m.Events: 82,
    m.Explained: 83,
    m.Updates: 92,
    m.Advice: 93,
    # From a reader to an owner, and back. (104, 105, 107 to 111, 114 to 119, 124 and 125 were
    # messages of transports, which have dialects of their own since version 4.)
    m.Read: 112,
    m.Locate: 113,
    m.DoneReading: 101,
    m.Select: 60,
    m.Selected: 61,
    # (62 and 63 were ListChunks and Listed)
    m.ChunksFollow: 120,
    m.StillWaiting: 121,
    m.ReadRefused: 122,
    m.ChunksLie: 123,
    m.ChunkFollows: 126,
    m.DeltasFollow: 59,
    m.ChunkDigest: 127,
    m.TransportRequest: 102,
    m.TransportReply: 103,
    m.NotThisWay: 106,
}
# The version of the protocol that brought a message, where it is not the oldest one.
SINCE: Final[Mapping[type, int]] = {m.Advice: 19}
