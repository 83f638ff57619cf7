"""Processes of Python modules that do what their parent says, in JSON lines: the parent's side (`orders` is the child's).

Responsible for starting, asking, stopping and ending them; each wait has a deadline. A child ends when its standard input
does, so that none outlives its parent. It is a process group of its own in the parent's session, so that the kernel wakes
one that is stopped when the parent dies.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

WAIT_S = 40.0
ROOT = Path(__file__).parents[1]


class Failed(Exception):
    """A command raised over there."""

    def __init__(self, kind: str, text: str, retryable: bool | None, memory: str | None) -> None:
        super().__init__(f"{kind}: {text}")
        self.kind, self.text, self.retryable, self.memory = kind, text, retryable, memory


class Aborted(Failed):
    """GroupAborted, and retryable."""


class Gone(AssertionError):
    """The process has ended, or has not answered in time (`in_time` is False)."""

    def __init__(self, text: str, *, in_time: bool) -> None:
        super().__init__(text)
        self.in_time = in_time


class Pending:
    """A command that is under way."""

    def __init__(self, process: Process, number: int, what: str) -> None:
        self._process, self._number, self._what = process, number, what

    def result(self, timeout_s: float = WAIT_S) -> Any:
        """What it returns. Raises Failed (Aborted), Gone."""
        return self._process.answer(self._number, self._what, timeout_s)

    @property
    def is_over(self) -> bool:
        return self._process.has_answered(self._number)


class Process:
    """One child, as its parent sees it: `python -m MODULE ARGUMENTS`, with `environment` instead of TENSORHUB_*.

    `prefix`: a command that runs the command behind it. `heard`: called, in a thread of its own, with each line that is
    no answer. `errors`: a file to which its standard error is appended.
    """

    def __init__(
        self,
        name: str,
        module: str,
        *arguments: str,
        environment: Mapping[str, str] | None = None,
        prefix: Sequence[str] = (),
        heard: Callable[[dict[str, Any]], None] | None = None,
        errors: Path | None = None,
    ) -> None:
        self.name = name
        given = {key: value for key, value in os.environ.items() if not key.startswith("TENSORHUB_")}
        given["PYTHONPATH"] = os.pathsep.join([str(ROOT), *filter(None, sys.path)])
        self._heard = heard
        with contextlib.ExitStack() as opened:
            self._popen = subprocess.Popen(
                [*prefix, sys.executable, "-m", module, *arguments],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=None if errors is None else opened.enter_context(errors.open("ab")),
                text=True,
                cwd=ROOT,
                env=given | dict(environment or {}),
                process_group=0,
            )
        self._changed = threading.Condition()
        self._answers: dict[int, dict[str, Any]] = {}
        self._is_over = False
        self._asking = threading.Lock()
        self._asked = 0
        self._reader = threading.Thread(target=self._read, name=f"hears-{name}", daemon=True)
        self._reader.start()

    def __repr__(self) -> str:
        return f"<Process {self.name} {self.pid}, {self._asked} commands, exit code {self.returncode}>"

    @property
    def pid(self) -> int:
        return self._popen.pid

    @property
    def returncode(self) -> int | None:
        return self._popen.returncode

    def _read(self) -> None:
        assert self._popen.stdout is not None
        for line in self._popen.stdout:
            answer = json.loads(line)
            if "id" not in answer:
                if self._heard is not None:
                    self._heard(answer)
                continue
            with self._changed:
                self._answers[answer["id"]] = answer
                self._changed.notify_all()
        with self._changed:
            self._is_over = True
            self._changed.notify_all()

    def begin(self, what: str, **arguments: Any) -> Pending:
        """Give a command, and do not wait for it. Raises BrokenPipeError if the process has ended."""
        assert self._popen.stdin is not None
        with self._asking:
            self._asked += 1
            number = self._asked
            self._popen.stdin.write(json.dumps({"id": number, "do": what, **arguments}) + "\n")
            self._popen.stdin.flush()
        return Pending(self, number, what)

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
            when = "before its end" if came else f"in {timeout_s:g} s"
            raise Gone(f"{self.name} did not answer {what!r} {when}", in_time=came)
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
        os.waitid(os.P_PID, self._popen.pid, os.WSTOPPED | os.WEXITED | os.WNOWAIT)

    def go_on(self) -> None:
        self._popen.send_signal(signal.SIGCONT)

    def leave(self, timeout_s: float = WAIT_S) -> int | None:
        """Let it end by itself, as its input ends; its exit code, None if it has not ended in time."""
        assert self._popen.stdin is not None
        with contextlib.suppress(OSError):
            self._popen.stdin.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._popen.wait(timeout_s)
        return self._popen.returncode

    def end(self) -> None:
        """Let it leave; kill it if it does not."""
        with contextlib.suppress(OSError):
            self.go_on()
        try:
            self.leave()
        finally:
            self.kill()
            self._reader.join(WAIT_S)
            assert self._popen.stdout is not None
            self._popen.stdout.close()


def children(pid: int) -> list[int]:
    """The processes that this one has started, the ended ones that nobody has waited for included."""
    found: list[int] = []
    for task in Path(f"/proc/{pid}/task").iterdir():
        with contextlib.suppress(FileNotFoundError):  # a thread that has ended meanwhile: its children are another one's now
            found += map(int, (task / "children").read_text().split())
    return found
