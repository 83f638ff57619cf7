"""What the seconds of a thread went to."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pytest

from tensorhub.runtime.data import thread_time
from tensorhub.runtime.data.thread_time import (
    PROBE_AFTER_S,
    PROBE_EVERY_S,
    PROBE_S,
    PROBES_APART,
    WAKING_S,
    Spent,
    ThreadTime,
    run_delay_s,
)


@dataclass
class Clock:
    """In place of the module `time`, and of what the kernel counts."""

    now: float = 100.0
    cpu_s: float = 7.0
    process_s: float = 20.0
    delay_s: float = 3.0
    sleep_takes: float = PROBE_S + WAKING_S
    others_take: float = 0.0  # of a processor, while this thread sleeps
    delayed: float = 0.0  # of a sleep, for want of a core
    slept: int = 0

    def perf_counter(self) -> float:
        return self.now

    def thread_time(self) -> float:
        return self.cpu_s

    def process_time(self) -> float:
        return self.process_s

    def sleep(self, seconds: float) -> None:
        assert seconds == PROBE_S
        self.slept += 1
        self.now += self.sleep_takes
        self.delay_s += self.delayed
        self.process_s += self.others_take


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr(thread_time, "time", made)
    monkeypatch.setattr(thread_time, "run_delay_s", lambda: made.delay_s)
    return made


def test_each_second_of_a_thread_is_told_once(clock: Clock) -> None:
    spent = ThreadTime()
    clock.now, clock.cpu_s, clock.delay_s = 110.0, 10.0, 5.0
    spent.idle_s, spent.empty_s = 1.0, 1.5
    assert spent.spent() == Spent(10.0, 3.0, 2.0, 0.0, 1.0, 1.5, 2.5)


@pytest.mark.parametrize(
    ("cpu_s", "delay_s", "idle_s", "empty_s", "told"),
    [
        (99.0, 99.0, 99.0, 99.0, Spent(10.0, 10.0)),
        (4.0, 99.0, 99.0, 99.0, Spent(10.0, 4.0, 6.0)),
        (4.0, 1.0, 99.0, 99.0, Spent(10.0, 4.0, 1.0, idle_s=5.0)),
        (4.0, 1.0, 2.0, 99.0, Spent(10.0, 4.0, 1.0, idle_s=2.0, empty_s=3.0)),
        (4.0, -1.0, 2.0, 1.0, Spent(10.0, 4.0, 0.0, idle_s=2.0, empty_s=1.0, blocked_s=3.0)),
    ],
)
def test_clocks_that_contradict_one_another_tell_no_second_twice(
    clock: Clock, cpu_s: float, delay_s: float, idle_s: float, empty_s: float, told: Spent
) -> None:
    spent = ThreadTime()
    clock.now += 10.0
    clock.cpu_s += cpu_s
    clock.delay_s += delay_s
    spent.idle_s, spent.empty_s = idle_s, empty_s
    assert spent.spent() == told


def test_a_thread_is_probed_now_and_then(clock: Clock) -> None:
    """Not while it has worked for a moment only, and the rarer the longer a probe takes."""
    spent, began = ThreadTime(), clock.now
    spent.probe(began + 0.9 * PROBE_AFTER_S)
    assert clock.slept == 0
    clock.now += PROBE_AFTER_S
    spent.probe(clock.now)
    assert clock.slept == 1
    spent.probe(clock.now + 0.9 * PROBE_EVERY_S)
    assert clock.slept == 1
    clock.now += PROBE_EVERY_S
    clock.sleep_takes = 1.0
    spent.probe(clock.now)
    assert clock.slept == 2
    spent.probe(clock.now + 0.9 * PROBES_APART)
    assert clock.slept == 2
    spent.probe(clock.now + PROBES_APART)
    assert clock.slept == 3


@pytest.mark.parametrize(
    ("waited_s", "others_take", "delayed", "gil_s"),
    [
        (0.01, 1.0, 0.0, 0.01),  # another thread of the process computed all the while
        (0.01, 0.004, 0.0, 0.004),  # and no longer than it computed, it had the GIL
        (0.01, 1.0, 0.007, 0.003),  # the wait for a core is none for the GIL
        (0.0, 1.0, 0.0, 0.0),
        (-PROBE_S, 1.0, 0.0, 0.0),
    ],
)
def test_a_call_waits_for_the_gil_as_long_as_a_probe_does(
    clock: Clock, waited_s: float, others_take: float, delayed: float, gil_s: float
) -> None:
    spent = ThreadTime()
    clock.sleep_takes += waited_s
    clock.others_take, clock.delayed = others_take, delayed
    clock.now += 1.0
    spent.probe(clock.now)
    clock.now += 1.0
    clock.others_take = 0.0
    spent.probe(clock.now)  # it waits for nothing
    spent.calls = 3
    clock.now += 1.0
    told = spent.spent()
    assert told.gil_s == pytest.approx(3 * gil_s / 2)
    assert sum(told[1:]) == pytest.approx(told.seconds)


def test_the_seconds_of_two_threads_are_told_as_their_sum() -> None:
    one, other = Spent(1, 2, 3, 4, 5, 6, 7), Spent(10, 20, 30, 40, 50, 60, 70)
    assert one.plus(other) == Spent(11, 22, 33, 44, 55, 66, 77)


@pytest.mark.parametrize(
    ("said", "delay_s"), [("9 2500000000 4\n", 2.5), ("", 0.0), ("9", 0.0), ("9 much 4", 0.0)]
)
def test_no_read_fails_for_what_the_kernel_says_of_delay(
    said: str, delay_s: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(thread_time, "SCHEDSTAT", str(tmp_path / "schedstat"))
    assert run_delay_s() == 0.0
    (tmp_path / "schedstat").write_text(said)
    assert run_delay_s() == delay_s
