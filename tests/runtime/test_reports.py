"""What a call that has pulled more than once says of its bytes."""

from __future__ import annotations

from tensorhub.runtime.data.lanes import PullReport
from tensorhub.runtime.reports import CallTimes

PHASES = {"wait": 0.0, "transfer": 0.0, "verify": 0.0}


def pull(wanted: int, verified: int, read: int) -> PullReport:
    """Of 100 bytes, all but `wanted` of which were there at first."""
    return PullReport(read, 0, 0, 0, verified, wanted, PHASES, (), ())


def reread(*pulls: PullReport, again: bool = False) -> tuple[int, int]:
    times = CallTimes()
    for each in pulls:
        times.begin_pull(0.0, again=again)
        times.add_pull(each, 0.0, again=again)
    assert times.pull is not None
    return times.pull.bytes_read, times.pull.reread_bytes


def test_what_is_carried_over_into_other_chunks_is_not_read_again() -> None:
    assert reread(pull(100, 40, 45), pull(60, 60, 60)) == (105, 0)
    assert reread(pull(100, 40, 45), pull(90, 90, 90)) == (135, 30)  # 10 of the 40 were carried over


def test_what_is_lost_twice_counts_as_often_as_it_is_read() -> None:
    assert reread(pull(100, 40, 40), pull(100, 0, 0), pull(100, 100, 100)) == (140, 40)
    assert reread(pull(100, 40, 40), pull(100, 50, 50), pull(100, 100, 100)) == (190, 90)


def test_what_was_not_as_published_is_read_again() -> None:
    assert reread(pull(100, 100, 100), pull(10, 10, 14), again=True) == (114, 14)
