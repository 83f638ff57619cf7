"""What the seconds of a thread went to: the cores that it had, those that it waited for, the GIL,
and the rest, in which it was blocked.

The kernel counts the first two. A lane that waits for the GIL is blocked as one that waits for a
network is, so a rare probe tells them apart: it sleeps for a moment, and looks how much longer than
that it took until it had a core and the GIL, without the wait for the core. Beside a thread that
computes in Python that is 3 to 5 ms; beside twenty busy processes on two cores, or beside nothing,
less than 0.1 ms. Each call of the thread that may block is taken to have cost the same. (A probe
that does not sleep mostly has the GIL back before another thread has woken up to take it. Where
cores are short as well, that happens here, too: then the estimate is too low.)

Not responsible for what the seconds are told for (`lane_times`, `served_times`).
"""

from __future__ import annotations

import os
import time
from operator import add
from typing import NamedTuple

SCHEDSTAT = "/proc/thread-self/schedstat"
PROBE_S = 0.0005  # that a probe sleeps
PROBE_AFTER_S = 0.05  # of the thread's work: shorter work is not worth a probe
# between two: a socket's buffer has work for that long, so that nothing waits for a probe
PROBE_EVERY_S = 0.1
PROBES_APART = 20  # times what the last probe took
WAKING_S = 0.0002  # the kernel takes up to that to wake a thread


class Spent(NamedTuple):
    """Seconds of one thread or of several, which add up to `seconds`. `idle_s` and `empty_s`: see
    `ThreadTime`.
    """

    seconds: float = 0.0
    cpu_s: float = 0.0
    delay_s: float = 0.0
    gil_s: float = 0.0
    idle_s: float = 0.0
    empty_s: float = 0.0
    blocked_s: float = 0.0  # on whatever else

    def plus(self, other: Spent) -> Spent:
        """Of both."""
        return Spent(*map(add, self, other))


class ThreadTime:
    """That of the thread that has made it, and that alone uses it."""

    __slots__ = (
        "_cpu_s",
        "_delay_s",
        "_next",
        "_probed_s",
        "_probes",
        "_started",
        "calls",
        "empty_s",
        "idle_s",
    )

    def __init__(self) -> None:
        self.calls = 0  # that blocked, or could have
        self.idle_s = 0.0  # in which it had nothing to do
        self.empty_s = 0.0  # in which what it works for was not there yet
        self._probes, self._probed_s = 0, 0.0
        self._delay_s, self._cpu_s = run_delay_s(), time.thread_time()
        self._started = time.perf_counter()
        self._next = self._started + PROBE_AFTER_S

    def probe(self, now: float) -> None:
        """Look how long the GIL takes, if it is time for that at `now` (`perf_counter`)."""
        if now < self._next:
            return
        delay_s, cpu_s, began = run_delay_s(), time.thread_time(), time.perf_counter()
        process_s = time.process_time()
        time.sleep(PROBE_S)
        took_s, own_s = time.perf_counter() - began, time.thread_time() - cpu_s
        others_s = time.process_time() - process_s - own_s
        waited_s = took_s - own_s - (run_delay_s() - delay_s)
        self._probes += 1
        self._probed_s += max(0.0, min(waited_s - PROBE_S - WAKING_S, others_s))
        ended = time.perf_counter()
        self._next = ended + max(PROBE_EVERY_S, PROBES_APART * (ended - now))

    def spent(self) -> Spent:
        """Up to now."""
        seconds = time.perf_counter() - self._started
        cpu_s = min(seconds, time.thread_time() - self._cpu_s)
        delay_s = min(seconds - cpu_s, max(0.0, run_delay_s() - self._delay_s))
        left_s = seconds - cpu_s - delay_s
        idle_s = min(left_s, self.idle_s)
        left_s -= idle_s
        gil_s = min(left_s, self.calls * self._probed_s / max(1, self._probes))
        left_s -= gil_s
        empty_s = min(left_s, self.empty_s)
        return Spent(seconds, cpu_s, delay_s, gil_s, idle_s, empty_s, left_s - empty_s)


def run_delay_s() -> float:
    """How long this thread has waited for a core in all its life; 0.0 where the kernel does not
    count, or says what cannot be read: no read fails for that.
    """
    try:
        descriptor = os.open(SCHEDSTAT, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return 0.0
    try:
        return int(os.read(descriptor, 128).split()[1]) / 1e9
    except (OSError, ValueError, IndexError):
        return 0.0
    finally:
        os.close(descriptor)
