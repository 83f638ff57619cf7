"""The processes of the run: started, killed, stopped and asked; who is dead or stopped, since when,
and for how long.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, Protocol

from benches.child_processes import Failed, Gone, Pending, Process

MARGIN_S: Final = 15.0  # what a call may take beyond its own timeout, on a busy machine
SLICE_S: Final = 0.5


class Place(Protocol):
    """Where a process runs (see `network`)."""

    def prefix(self, name: str) -> list[str]: ...


class Host:
    """One process of the run, over its lives. Faults come from the run's thread, questions from its
    driver's.
    """

    def __init__(
        self,
        name: str,
        program: Sequence[str],
        place: Place,
        environment: Mapping[str, str],
        folder: Path,
        note: Callable[..., None],
    ) -> None:
        self.name = name
        self._program = program  # a module, and its arguments
        self._place = place
        self._environment = environment
        self._errors = folder / f"{name}.err"
        self._note = note
        self._lock = threading.Lock()
        self._process: Process | None = None
        self._dead = list[Process]()
        self._is_over = False
        self._stops = list[list[float]]()  # [from, to], the last one open while it is stopped
        self._stopped_by = 0  # faults that hold it now
        self.may_run = threading.Event()
        self.may_run.set()
        self.lives = 0
        self.deaths = list[float]()

    def __repr__(self) -> str:
        return f"<Host {self.name}, life {self.lives}, {'up' if self.is_up else 'down'}>"

    @property
    def is_up(self) -> bool:
        return self._process is not None

    def start(self) -> None:
        """A new process, once it may run; it runs, whoever had stopped the one before. After the
        end there is none.
        """
        self.may_run.wait()
        with self._lock:
            if self._is_over:
                return
            self._process = Process(
                self.name,
                *self._program,
                environment=self._environment,
                prefix=self._place.prefix(self.name),
                errors=self._errors,
            )
            self.lives += 1
        self._note(self.name, "up", f"life {self.lives}")

    def kill(self) -> bool:
        """SIGKILL. False if there was nobody to kill."""
        with self._lock:
            self.may_run.clear()
            return self._kill()

    def _kill(self) -> bool:
        process = self._process
        if process is None:
            return False
        self._process = None
        self._dead.append(process)
        self.deaths.append(time.monotonic())
        process.kill()
        return True

    def stop(self) -> bool:
        """SIGSTOP. Stops count: each is taken back by one `go_on`."""
        with self._lock:
            self._stopped_by += 1
            if self._stopped_by == 1:
                self._stops.append([time.monotonic(), float("inf")])
                if self._process is not None:
                    self._process.stop()
            return self._process is not None

    def go_on(self) -> None:
        with self._lock:
            self._go_on()

    def _go_on(self) -> None:
        self._stopped_by -= 1
        if not self._stopped_by:
            if self._process is not None:
                self._process.go_on()
            self._stops[-1][1] = time.monotonic()

    def go_on_for_good(self) -> None:
        """Whatever has stopped it is over."""
        with self._lock:
            while self._stopped_by:
                self._go_on()

    def stopped_s(self, since: float) -> float:
        """For how long it was stopped since then."""
        now = time.monotonic()
        with self._lock:
            return sum(max(0.0, min(end, now) - max(begin, since)) for begin, end in self._stops)

    def ask(self, what: str, bound_s: float, **arguments: Any) -> Asked:
        """Begin a command that has `bound_s`."""
        with self._lock:
            process = self._process
        pending = None
        if process is not None:
            with contextlib.suppress(OSError, ValueError):  # it has just died
                pending = process.begin(what, **arguments)
        return Asked(self, process, pending, what, bound_s)

    def lost(self, process: Process | None) -> str | None:
        """It does not answer any more; why that is not our doing, if it is not."""
        with self._lock:
            if process is None or process is not self._process:
                return None
            code = process.leave(1.0)
            self._kill()
            tail = (
                self._errors.read_bytes()[-2000:].decode(errors="replace")
                if self._errors.exists()
                else ""
            )
            return f"{self.name} ended by itself with exit code {code}: ...{tail}"

    def dismiss(self, timeout_s: float) -> int | None:
        """Let it end by itself; its exit code, None if there is nobody or it does not end."""
        with self._lock:
            process = self._process
        return None if process is None else process.leave(timeout_s)

    def end(self) -> None:
        """Nothing of it is left, also if somebody waits to start it again."""
        with self._lock:
            self._is_over = True
            self._kill()
        for process in self._dead:
            process.end()


class Asked:
    """A question to a process."""

    def __init__(
        self,
        host: Host,
        process: Process | None,
        pending: Pending | None,
        what: str,
        bound_s: float,
    ) -> None:
        self.host = host
        self.what = what
        self.begun_at = time.monotonic()
        self.bound_s = bound_s
        self._process = process
        self._pending = pending
        self.problem: str | None = None  # a guarantee that was broken
        self.ended_at = self.begun_at

    def answer(self) -> dict[str, Any] | None:
        """What it says; None if it dies. Waits for no longer than it may take."""
        answer = self._wait()
        self.ended_at = time.monotonic()
        return answer

    def _wait(self) -> dict[str, Any] | None:
        if self._pending is None:
            return None
        while True:
            try:
                value = self._pending.result(SLICE_S)
                return (
                    value
                    if isinstance(value, dict) and "outcome" in value
                    else {"outcome": "ok", "value": value}
                )
            except Failed as error:
                return {
                    "outcome": error.kind,
                    "text": str(error),
                    "memory": error.memory,
                    "retryable": error.retryable,
                }
            except Gone as gone:
                if gone.in_time:
                    self.problem = self.host.lost(self._process)
                    return None
            taken_s = time.monotonic() - self.begun_at - self.host.stopped_s(self.begun_at)
            if taken_s > self.bound_s + MARGIN_S:
                self.problem = (
                    f"bounds: {self.host.name} does not answer {self.what} for "
                    f"{taken_s:.1f} s of {self.bound_s:g} s"
                )
                self.host.kill()
                self.host.may_run.set()
                return None
