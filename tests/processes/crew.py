"""Starting, asking and killing the processes of a test; each wait has a deadline, and none of them outlives the test."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

WAIT_S = 40.0
ROOT = Path(__file__).parents[2]


class Failed(Exception):
    """A command raised over there."""

    def __init__(self, kind: str, text: str, retryable: bool | None, memory: str | None) -> None:
        super().__init__(f"{kind}: {text}")
        self.kind, self.text, self.retryable, self.memory = kind, text, retryable, memory


class Aborted(Failed):
    """GroupAborted, and retryable."""


class Pending:
    """A command that is under way."""

    def __init__(self, process: Process, number: int, what: str) -> None:
        self._process, self._number, self._what = process, number, what

    def result(self, timeout_s: float = WAIT_S) -> Any:
        return self._process.answer(self._number, self._what, timeout_s)

    @property
    def is_over(self) -> bool:
        return self._process.has_answered(self._number)


class Process:
    """One actor, as its parent sees it."""

    def __init__(self, name: str, backend: str) -> None:
        self.name = name
        environment = {key: value for key, value in os.environ.items() if not key.startswith("TENSORHUB_")}
        environment["PYTHONPATH"] = os.pathsep.join([str(ROOT), *filter(None, sys.path)])
        self._popen = subprocess.Popen(
            [sys.executable, "-m", "tests.processes.actor", backend],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=ROOT,
            env=environment,
        )
        self._changed = threading.Condition()
        self._answers: dict[int, dict[str, Any]] = {}
        self._is_over = False
        self._asked = 0
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self._popen.stdout is not None
        for line in self._popen.stdout:
            answer = json.loads(line)
            with self._changed:
                self._answers[answer["id"]] = answer
                self._changed.notify_all()
        with self._changed:
            self._is_over = True
            self._changed.notify_all()

    def begin(self, what: str, **arguments: Any) -> Pending:
        """Give a command, and do not wait for it."""
        assert self._popen.stdin is not None
        self._asked += 1
        self._popen.stdin.write(json.dumps({"id": self._asked, "do": what, **arguments}) + "\n")
        self._popen.stdin.flush()
        return Pending(self, self._asked, what)

    def do(self, what: str, **arguments: Any) -> Any:
        """Give a command, and wait for its answer."""
        return self.begin(what, **arguments).result()

    def has_answered(self, number: int) -> bool:
        with self._changed:
            return number in self._answers

    def answer(self, number: int, what: str, timeout_s: float) -> Any:
        with self._changed:
            came = self._changed.wait_for(lambda: number in self._answers or self._is_over, timeout_s)
            answer = self._answers.get(number)
        if answer is None:
            raise AssertionError(f"{self.name} did not answer {what!r} {'before its end' if came else f'in {timeout_s} s'}")
        if "error" in answer:
            error = answer["error"]
            raise (Aborted if error["kind"] == "GroupAborted" and error["retryable"] else Failed)(**error)
        return answer["value"]

    def kill(self) -> None:
        """As a machine's failure does."""
        self._popen.kill()
        self._popen.wait(WAIT_S)

    def stop(self) -> None:
        """Stop it where it is (SIGSTOP); returns once it has stopped."""
        self._popen.send_signal(signal.SIGSTOP)
        os.waitid(os.P_PID, self._popen.pid, os.WSTOPPED | os.WNOWAIT)

    def go_on(self) -> None:
        self._popen.send_signal(signal.SIGCONT)

    def end(self) -> None:
        """Let it leave; kill it if it does not."""
        with contextlib.suppress(OSError):
            self.go_on()
        try:
            assert self._popen.stdin is not None
            with contextlib.suppress(OSError):
                self._popen.stdin.close()
            self._popen.wait(WAIT_S)
        finally:
            self.kill()
            self._reader.join(WAIT_S)
            assert self._popen.stdout is not None
            self._popen.stdout.close()


class Crew:
    """The processes of one test."""

    def __init__(self, backend: str) -> None:
        self._backend = backend
        self._processes: list[Process] = []

    def process(self, name: str) -> Process:
        made = Process(name, self._backend)
        self._processes.append(made)
        return made

    def worker(self, address: str, name: str, nbytes: int, *, gate: int | None = None, **settings: Any) -> Process:
        """A process that is connected, with memory registered; `gate`: it reads so many chunks, then waits."""
        process = self.process(name)
        options = settings.pop("options", {})
        if gate is not None:
            process.do("gate", arrivals=gate)
        process.do("connect", address=address, name=name, **options)
        process.do("register", nbytes=nbytes, **settings)
        return process

    def end(self) -> list[int]:
        """End all; returns the process ids of those that are left."""
        ended = [process._popen.returncode for process in self._processes]
        for process in reversed(self._processes):  # workers before their coordinator
            process.end()
        for process, before in zip(self._processes, ended, strict=True):
            assert before is not None or process._popen.returncode == 0, f"{process.name}: {process._popen.returncode}"
        return children(os.getpid())


def children(pid: int) -> list[int]:
    tasks = Path(f"/proc/{pid}/task").iterdir()
    return [int(child) for task in tasks for child in (task / "children").read_text().split()]


@contextlib.contextmanager
def crew(backend: str) -> Iterator[Crew]:
    """Processes for a test; at its end none is left."""
    before = set(children(os.getpid()))
    made = Crew(backend)
    left: list[int] = []
    try:
        yield made
    finally:
        left = made.end()
    assert set(left) <= before
