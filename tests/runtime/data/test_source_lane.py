"""What is told of one source's lane."""

from __future__ import annotations

from math import inf

from tensorhub.deltas import Counts
from tensorhub.messages import Grant, Origin
from tensorhub.runtime.data.source_lane import SourceLane
from tensorhub.scheduler.pull import Pull
from tensorhub.scheduler.requests import Requests
from tensorhub.transport.base import Arrival
from tensorhub.types import DeltaUse, LeaseId, Location, Purpose


def test_how_chunks_came_is_told_to_the_coordinator_and_in_the_report() -> None:
    lease = LeaseId("l")
    grant = Grant("l", "source", "i", "r", 1, (), Location(), True, purpose=Purpose.SEED)
    lane = SourceLane(grant, lease, Origin("r", 1), Requests(Pull([8]), lease, inf))
    for now in (1.0, 2.0):
        lane.sizer.meter.arrived(8, now)
    for use, told in (
        (DeltaUse.UNDECIDED, DeltaUse.UNDECIDED),
        (DeltaUse.FAST_LINK, DeltaUse.FAST_LINK),
        (DeltaUse.USED, DeltaUse.USED),
        (DeltaUse.NONE_SENT, DeltaUse.USED),  # beside deltas, some chunks come whole
    ):
        lane.note_deltas(Arrival((), 0.0, 0.0, codec_s=0.5, counts=Counts(8, 1), use=use), 10, 4)
        report = lane.report(0, 3.0)
        assert lane.flow is not None
        assert (lane.flow.deltas, report.deltas) == (told, told)
    assert (report.kind, report.words, report.words_changed) == ("seed", 32, 4)
    assert (report.bytes_saved, report.codec_s) == (24, 2.0)
