"""The end of a process: all its open library threads are ended in time, also if the program still
holds them.

Library threads are daemons. A daemon stands still once the interpreter is being taken apart, and a
wait for it then never ends. So `atexit` ends each thread that is open. Threads that are not daemons
have ended by then, and so has their use of a hub. Responsible for knowing which threads are open,
and for ending them. Not responsible for how one ends.
"""

from __future__ import annotations

import atexit
import importlib
import os
import sys
import threading
import time
from dataclasses import dataclass
from typing import Protocol

CLOSE_S = 5.0  # for the last words of a hub that closes


@dataclass(frozen=True, slots=True)
class Parting:
    """How a library thread is to end."""

    within_s: float
    reason: str = "the hub was closed"  # what calls hear that run then
    # what is retained is handed over, and readers are waited for, as far as the time goes
    hand_over: bool = False


class Ending(Protocol):
    """A library thread, as its process ends."""

    exit_s: float  # that the process' end waits for it
    ends_last: bool  # other threads may need it for their last messages
    ends_until: float  # once it is ending: the time by which it should have

    def end_soon(self, parting: Parting) -> None:
        """Begin to end; the first parting counts. Returns at once."""

    def join(self, timeout_s: float) -> bool:
        """Wait for its end; True if it came."""

    def give_up(self) -> None:
        """Wake the callers that wait for its end, which has not come in time."""


_open: list[Ending] = []
_lock = threading.RLock()
_is_armed = False


def opened(thread: Ending) -> None:
    """It is to be ended with the process."""
    global _is_armed  # noqa: PLW0603 - a process ends once
    with _lock:
        _open.append(thread)
        if not _is_armed:
            _is_armed = True
            atexit.unregister(_at_exit)
            atexit.register(_at_exit)
            process = sys.modules.get("multiprocessing.process")
            # such a child may end without `atexit`
            if process is not None and process.parent_process() is not None:
                util = importlib.import_module("multiprocessing.util")
                util.Finalize(None, _at_exit, exitpriority=0)


def ended(thread: Ending) -> None:
    """It has ended by itself."""
    with _lock:
        if thread in _open:
            _open.remove(thread)


def hubs_leave(parting: Parting) -> None:
    """Let every hub of this process leave; returns when they have, in that time at most."""
    with _lock:
        threads = [thread for thread in _open if not thread.ends_last]
    for thread in threads:
        thread.end_soon(parting)
    _join(threads, time.monotonic() + parting.within_s)


def _at_exit() -> None:
    with _lock:
        threads = list(_open)
    first = [thread for thread in threads if not thread.ends_last]
    last = [thread for thread in threads if thread.ends_last]
    until = time.monotonic() + max((thread.exit_s for thread in threads), default=0.0)
    for some in (first, last):
        for thread in some:
            thread.end_soon(Parting(thread.exit_s, "the interpreter is ending"))
        _join(some, until)


def _join(threads: list[Ending], until: float) -> None:
    for thread in threads:
        if not thread.join(
            max(0.0, until - time.monotonic(), thread.ends_until - time.monotonic())
        ):
            thread.give_up()


def _forget() -> None:
    """In a forked child: forget the threads and the lock's holder, which are the parent's."""
    global _lock, _is_armed
    _lock, _is_armed = threading.RLock(), False
    _open.clear()


os.register_at_fork(after_in_child=_forget)
