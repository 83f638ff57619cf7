"""What a WAN does to packets."""

from __future__ import annotations

import random

from benches.testbed.wan import OVERHEAD_BYTES, QUEUE_S, Direction

RATE = 1000.0  # bytes per second
PACKET = bytes(100 - OVERHEAD_BYTES)  # 0.1 s on the line


def way(loss: float = 0.0, seed: int = 1) -> Direction:
    return Direction(RATE, 0.5, loss, random.Random(seed))


def test_a_packet_takes_its_time_on_the_line_and_the_delay() -> None:
    line = way()
    line.take(PACKET, 10.0)
    assert line.due_s == 10.6
    assert line.arrived(10.59) is None
    assert line.arrived(10.6) == PACKET
    assert line.arrived(99.0) is None
    assert line.due_s is None


def test_the_line_sends_one_after_the_other() -> None:
    line = Direction(RATE * 100, 0.5, 0.0, random.Random(1))
    for _ in range(3):
        line.take(PACKET, 0.0)
    arrivals = []
    while line.due_s is not None:
        arrivals.append(round(line.due_s, 6))
        line.arrived(line.due_s)
    assert arrivals == [0.501, 0.502, 0.503]


def test_what_would_wait_too_long_is_lost() -> None:
    line = Direction(RATE * 100, 0.5, 0.0, random.Random(1))
    for _ in range(100):
        line.take(PACKET, 0.0)
    kept = int(QUEUE_S / 0.001) + 1
    assert kept - 1 <= 100 - line.lost <= kept + 1
    line.take(PACKET, 1.0)
    assert line.lost <= 100 - kept + 1  # the queue is empty by then


def test_loss_is_its_seeds() -> None:
    def lost(seed: int) -> list[int]:
        line, found = Direction(1e9, 0.0, 0.1, random.Random(seed)), list[int]()
        for _ in range(200):
            line.take(PACKET, 0.0)
            found.append(line.lost)
        return found

    assert lost(1) == lost(1) != lost(2)
    assert 5 < lost(1)[-1] < 50
