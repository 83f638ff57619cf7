"""What heartbeats say, and when a session in which nothing comes back is given up."""

from __future__ import annotations

from tensorhub.messages import Heartbeat, HeartbeatAck, Welcome
from tensorhub.worker.heartbeats import BEATS_PER_LEASE, Heartbeats


def welcome(lease_s: float, said_at: float) -> Welcome:
    return Welcome("cluster", 1, lease_s, known=True, said_at=said_at)


def test_a_beat_says_when_the_coordinator_said_what_came_last() -> None:
    beats = Heartbeats(8.0)
    assert (beats.next(), beats.every_s) == (Heartbeat(1, 0.0), 2.0)
    beats.heard(welcome(4.0, 7.0))
    assert (beats.next(), beats.every_s, beats.lease_s) == (Heartbeat(2, 7.0), 1.0, 4.0)
    beats.heard(HeartbeatAck(2, 9.0))
    assert beats.next() == Heartbeat(3, 9.0)


def test_a_coordinator_is_late_by_the_beats_that_it_has_not_answered_in_this_session() -> None:
    beats = Heartbeats(8.0)
    assert beats.late_s == 0.0
    for _ in range(3):
        beats.next()
    assert beats.late_s == 6.0
    beats.heard(HeartbeatAck(2, 1.0))
    assert beats.late_s == 2.0
    beats.connected()
    assert beats.late_s == 0.0


def test_a_lease_without_a_word_is_the_end_of_a_session_and_the_next_one_begins_anew() -> None:
    beats = Heartbeats(8.0)
    assert [beats.is_in_vain() for _ in range(BEATS_PER_LEASE)] == [False] * BEATS_PER_LEASE
    beats.heard(HeartbeatAck(1, 1.0))
    assert [beats.is_in_vain() for _ in range(BEATS_PER_LEASE + 1)] == [False] * BEATS_PER_LEASE + [
        True
    ]
    beats.connected()
    assert not beats.is_in_vain()
