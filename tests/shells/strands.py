"""Threads of which one at a time goes on, and virtual time.

A *strand* is a thread that runs only while it has the turn. It may lose the turn wherever a thread
may block: at a lock, a blocking socket call, a sleep, a join, or a loop without a runnable task.
The seed chooses the next strand. When every strand waits, time jumps to the next deadline; if there
is none, that is a deadlock. So one seed is one order of events.
"""

from __future__ import annotations

import _thread
import hashlib
import heapq
import itertools
import math
import os
import random
import secrets
import select
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from contextvars import copy_context
from functools import partial
from typing import Any
from unittest import mock

import outcome
import trio
from trio import _threads
from trio._core import _run

POINTS_MAX = 200_000  # of one seed; more is a livelock
READING_S = 1e-6  # that a look at a clock takes, so that a loop that waits for time ends


_reading: Callable[[], float] | None = None  # of the run, if there is one


def _replace_clocks() -> None:
    """Have the clocks tell a run's time. The library is imported later: some of its functions have
    a clock as default.
    """

    def told_by(real: Callable[[], float], since: float = 0.0) -> Callable[[], float]:
        return lambda: real() if _reading is None else since + _reading()

    for name in ("monotonic", "perf_counter", "thread_time", "process_time"):
        setattr(time, name, told_by(getattr(time, name)))
    time.time = told_by(time.time, 1.7e9)


_replace_clocks()


class Stuck(BaseException):
    """The run cannot go on: a deadlock or a livelock. Raised in every strand."""


class Strand:
    """One thread. `ready`: what it waits for; None: nothing."""

    __slots__ = ("deadline", "gate", "ident", "is_done", "name", "ready")

    def __init__(self, name: str) -> None:
        self.name = name
        self.gate = _thread.allocate_lock()
        self.gate.acquire()
        self.ready: Callable[[], bool] | None = None
        self.deadline = math.inf
        self.is_done = False
        self.ident = 0


class Scheduler:
    """Whose turn it is, and what time it is."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(f"strands {seed}")
        self.switchiness = self.rng.choice((0.01, 0.05, 0.2, 0.6))
        self.now = 1000.0
        self.points = 0
        self.stuck = ""  # why
        self.order = hashlib.blake2b(digest_size=8)  # of the turns
        self.strands: list[Strand] = []
        self._timers: list[tuple[float, int, Callable[[], object]]] = []
        self._steps: list[tuple[int, int, Callable[[], object]]] = []
        self._numbers = itertools.count()
        self.main = Strand("main")
        self.main.ident = threading.get_ident()
        self.strands.append(self.main)
        self.current = self.main

    # -- what a strand calls

    def point(self) -> None:
        """Another strand may have the turn here."""
        self._count()
        if self.rng.random() < self.switchiness:
            self._turn_to(self._next())

    def _count(self) -> None:
        self.points += 1
        while self._steps and self._steps[0][0] <= self.points:
            heapq.heappop(self._steps)[2]()
        if self.points > POINTS_MAX:
            self._give_up(f"more than {POINTS_MAX} points: a livelock")

    def block(self, ready: Callable[[], bool], until: float = math.inf) -> bool:
        """Wait; whether it is ready. False: the deadline has come."""
        self._count()
        me = self.current
        me.ready, me.deadline = ready, until
        try:
            self._turn_to(self._next())
            return ready()
        finally:
            me.ready, me.deadline = None, math.inf

    def sleep(self, seconds: float) -> None:
        self.block(lambda: False, self.now + seconds)

    def start(self, function: Callable[[], object], name: str) -> Strand:
        """A new strand; it has no turn yet."""
        strand, context = Strand(name), copy_context()

        def body() -> None:
            strand.gate.acquire()
            strand.ident = threading.get_ident()
            try:
                if trace := getattr(threading, "_trace_hook", None):
                    sys.settrace(trace)
                if not self.stuck:
                    function()
            except Stuck:
                pass
            except BaseException:
                self.stuck = self.stuck or f"{name} has died: {traceback.format_exc()}"
            # a later thread with this number is another one
            vars(threading)["_active"].pop(strand.ident, None)
            strand.is_done = True
            self.strands.remove(strand)
            try:
                following = self._next()
            except BaseException:
                self.stuck = f"the harness fails: {traceback.format_exc()}"
                following = self.main
            self._pass_to(following)

        self.strands.append(strand)
        _thread.start_new_thread(context.run, (body,))
        return strand

    def at(self, when: float, function: Callable[[], object]) -> None:
        """Call it at that time, in any strand."""
        heapq.heappush(self._timers, (when, next(self._numbers), function))

    def after_points(self, points: int, function: Callable[[], object]) -> None:
        """Call it after so many points, in any strand."""
        heapq.heappush(self._steps, (self.points + points, next(self._numbers), function))

    # -- turns

    def _next(self) -> Strand:
        """A strand that can go on, drawn by the seed; time passes until there is one."""
        while True:
            if self.stuck:
                return self.main
            while self._timers and self._timers[0][0] <= self.now:
                heapq.heappop(self._timers)[2]()
            waiting = self.strands.copy()
            while waiting:
                strand = waiting.pop(int(self.rng.random() * len(waiting)))
                if strand.ready is None or strand.deadline <= self.now or strand.ready():
                    return strand
            due = min(strand.deadline for strand in self.strands)
            if self._timers:
                due = min(due, self._timers[0][0])
            if due == math.inf:
                self.stuck = f"a deadlock: every thread waits\n{self.stacks()}"
            else:
                self.now = max(self.now, due)

    def _turn_to(self, strand: Strand) -> None:
        me = self.current
        if strand is not me:
            self._pass_to(strand)
            me.gate.acquire()
        if self.stuck:
            raise Stuck(self.stuck)

    def _pass_to(self, strand: Strand) -> None:
        self.order.update(f"{strand.name}{self.points} ".encode())
        self.current = strand
        strand.gate.release()

    def _give_up(self, why: str) -> None:
        self.stuck = self.stuck or f"{why}\n{self.stacks()}"
        self._turn_to(self.main)

    def stacks(self) -> str:
        """Where each strand is."""
        frames = sys._current_frames()
        found = []
        for strand in self.strands:
            frame = frames.get(strand.ident)
            lines = traceback.format_stack(frame)[-9:] if frame is not None else ["  not begun\n"]
            found.append(f"-- {strand.name}\n{''.join(lines)}")
        return "".join(found)


class Lock:
    """`threading.Lock` for strands; outside a run it never has to wait."""

    __slots__ = ("__weakref__", "_is_held", "_scheduler")

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self._is_held = False

    def acquire(self, blocking: bool = True, timeout: float = -1) -> bool:
        scheduler = self._scheduler
        scheduler.point()
        if self._is_held and blocking:
            until = math.inf if timeout < 0 else scheduler.now + timeout
            scheduler.block(lambda: not self._is_held, until)
        if self._is_held:
            return False
        self._is_held = True
        return True

    def release(self) -> None:
        if not self._is_held:
            raise RuntimeError("release unlocked lock")
        self._is_held = False

    def locked(self) -> bool:
        return self._is_held

    def _at_fork_reinit(self) -> None:
        self._is_held = False

    def __enter__(self) -> bool:
        return self.acquire()

    def __exit__(self, *_: object) -> None:
        self.release()


class Clock(trio.abc.Clock):
    """Virtual time for a loop, and the place where a loop waits: it is asked only if no task of the
    loop is runnable.
    """

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler

    def start_clock(self) -> None:
        trio.lowlevel.add_instrument(_BetweenBatches(self._scheduler))

    def current_time(self) -> float:
        return self._scheduler.now

    def deadline_to_sleep_time(self, deadline: float) -> float:
        waits: Any = _run.GLOBAL_RUN_CONTEXT.runner.io_manager
        poll = select.poll()
        poll.register(waits._epoll.fileno(), select.POLLIN)
        self._scheduler.block(lambda: bool(poll.poll(0)), deadline)
        return 0.0


class _BetweenBatches(trio.abc.Instrument):
    """Another strand may go on between two batches of tasks of a loop."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler

    def before_io_wait(self, timeout: float) -> None:
        self._scheduler.point()


def _module_locks(make: Callable[[], Any]) -> Iterator[Any]:
    """Put a strands' lock in the place of each lock that a module of the library has made."""
    kinds = {_thread.LockType: make, type(_thread.RLock()): threading.RLock}
    for name, module in list(sys.modules.items()):
        if name.startswith("tensorhub."):
            for attribute, value in list(vars(module).items()):
                if type(value) in kinds:
                    yield mock.patch.object(module, attribute, kinds[type(value)]())


@contextmanager
def strands(seed: int) -> Iterator[Scheduler]:
    """This thread is the first strand of the block, and every thread that begins there is one."""
    scheduler, chance = Scheduler(seed), random.Random(f"chance {seed}")

    def thread_starts(thread: Any) -> None:
        # what current_thread() says there is of no use to the library
        thread._strand = scheduler.start(thread.run, thread.name)
        scheduler.point()

    def thread_joined(thread: Any, timeout: float | None = None) -> None:
        until = math.inf if timeout is None else scheduler.now + timeout
        scheduler.block(lambda: thread._strand.is_done, until)

    def start_thread_soon(
        function: Callable[[], Any], deliver: Callable[[Any], object], name: str | None = None
    ) -> None:
        scheduler.start(lambda: deliver(outcome.capture(function)), name or "worker")

    def reading() -> float:
        scheduler.now += READING_S
        return scheduler.now

    make = partial(Lock, scheduler)
    with ExitStack() as stack:

        def put(module: Any, name: str, value: object) -> None:
            stack.enter_context(mock.patch.object(module, name, value))

        put(threading, "Lock", make)
        put(threading, "_allocate_lock", make)
        put(threading, "RLock", vars(threading)["_RLock"])
        for each in _module_locks(make):
            stack.enter_context(each)
        put(threading.Thread, "start", thread_starts)
        put(threading.Thread, "join", thread_joined)
        put(threading.Thread, "is_alive", lambda thread: not thread._strand.is_done)
        put(_threads, "start_thread_soon", start_thread_soon)
        put(_run, "SystemClock", lambda: Clock(scheduler))
        put(_run, "_ALLOW_DETERMINISTIC_SCHEDULING", True)
        put(_run, "_r", random.Random(f"trio {seed}"))
        put(sys.modules[__name__], "_reading", reading)
        put(time, "sleep", scheduler.sleep)
        put(os, "urandom", chance.randbytes)
        put(secrets, "token_bytes", lambda nbytes=32: chance.randbytes(nbytes))
        put(secrets, "token_hex", lambda nbytes=32: chance.randbytes(nbytes).hex())
        put(secrets, "randbits", chance.getrandbits)
        put(secrets, "randbelow", chance.randrange)
        random.seed(seed)
        yield scheduler
