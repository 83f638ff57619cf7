"""SIGTERM: a process leaves its clusters before it ends, which is what a preempted machine has time
for.

Python runs the handler in the midst of whatever the main thread does, so the handler only passes
the signal on. A thread of its own waits for the hubs, and then lets SIGTERM do what it did before.
"""

from __future__ import annotations

import os
import queue
import signal
import threading
import time
from typing import Any

from tensorhub.errors import InvalidValue, StateError, shown
from tensorhub.runtime import ending
from tensorhub.runtime.ending import Parting
from tensorhub.types import as_seconds

LEAVE_S = 25.0
AGAIN_S = 0.2


def leave_on_sigterm(within_s: float = LEAVE_S) -> None:
    """From now on SIGTERM lets every hub of this process leave its cluster, and then does what it
    did before.

    Call it once, in the main thread, before or after `connect`, in programs with and without an
    event loop; after other handlers of SIGTERM are set. When the signal comes, each hub ends its
    running calls, takes no new ones (StateError), moves its readers to other sources, hands over
    what is retained, as `Weights.close` does, and says goodbye: at once where nothing is read or
    retained, and in `within_s` seconds at most; retained versions that could not be handed over by
    then are given up. The process goes on meanwhile. Then SIGTERM acts: by default it ends the
    process (exit status 143 in a shell), and a handler that was set before, as `lambda *_:
    sys.exit(143)`, is called. A second SIGTERM in between changes nothing. A forked child that
    connects calls it again.

    Give less than the platform does that preempts the process: Kubernetes waits 30 s, and so does
    Google's preemption, before SIGKILL. Python calls handlers in the main thread: if that is in the
    midst of a long call of C code, the leave begins after it. Raises StateError (not the main
    thread; a handler of SIGTERM that was not set by Python; `within_s` is no time).
    """
    seconds = as_seconds(within_s)
    if seconds is None:
        raise InvalidValue(
            f"within_s={shown(within_s)}: give the seconds that leaving may take, 0 or more"
        )
    if threading.current_thread() is not threading.main_thread():
        raise StateError(
            "leave_on_sigterm() is to be called in the main thread: only that one can set a "
            "handler of a signal"
        )
    before = signal.getsignal(signal.SIGTERM)
    if isinstance(before, _Leave) and not before.is_over and before.pid == os.getpid():
        before.within_s = seconds
    elif before is None:
        raise StateError(
            "SIGTERM has a handler that was not set by Python, which could not be called "
            "afterwards: remove it"
        )
    else:
        signal.signal(
            signal.SIGTERM, _Leave(seconds, before.before if isinstance(before, _Leave) else before)
        )


def leave_now(within_s: float = LEAVE_S) -> None:
    """Let every hub of this process leave, as `leave_on_sigterm` says. Blocks."""
    ending.hubs_leave(Parting(within_s, "the process was told to end (SIGTERM)", hand_over=True))


class _Leave:
    """The handler, and the thread that waits."""

    def __init__(self, within_s: float, before: Any) -> None:
        self.within_s = within_s
        self.before = before
        self.is_over = False  # what comes now is for the handler that was there before
        self._deaf_until = 0.0  # its own signals may come late
        self.pid = os.getpid()
        self._has_left = False
        # of the kind that a handler may put something into
        self._wanted: queue.SimpleQueue[None] = queue.SimpleQueue()
        threading.Thread(target=self._run, name="leave-on-sigterm", daemon=True).start()

    def __call__(self, number: int, frame: object) -> None:
        if os.getpid() == self.pid:  # else in a forked child, which has wired nothing itself
            if not self._has_left:
                self._wanted.put(None)
                return
            if not self.is_over:
                self.is_over, self._deaf_until = True, time.monotonic() + 2 * AGAIN_S
            elif time.monotonic() < self._deaf_until:
                return
        if callable(self.before):
            self.before(number, frame)
        else:
            signal.signal(number, self.before)
            signal.raise_signal(number)

    def _run(self) -> None:
        self._wanted.get()
        leave_now(self.within_s)
        self._has_left = True
        main = threading.main_thread().ident
        assert main is not None
        # again, since a signal just before the main thread begins to wait in the system wakes
        # nobody
        while not self.is_over:
            signal.pthread_kill(main, signal.SIGTERM)
            time.sleep(AGAIN_S)
