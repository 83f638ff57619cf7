"""Child processes that run many commands at the same time: the parent's side (`commands` is the
child's).

On top of `tensorhub.cli.child_processes`, each command has a number, which its answer repeats. Each
wait has a deadline. A child that is stopped when its parent ends goes on then, and ends, too.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
from collections.abc import Mapping, Sequence
from itertools import count
from pathlib import Path
from typing import Any

from tensorhub.cli.child_processes import ChildProcess, Line

WAIT_S = 120.0
ROOT = Path(__file__).parents[1]
# A program that gets SIGCONT (18) when a thread of the process that started it ends, the last one
# included (PR_SET_PDEATHSIG, 1), and says that this is so. The kernel wakes by itself only orphans
# that have stopped already.
_GOES_ON = """import ctypes, os, sys
ctypes.CDLL(None).prctl(1, 18)
print('{"id": 0, "value": null}', flush=True)
os.execvp(sys.argv[1], sys.argv[1:])"""


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


class Process(ChildProcess):
    """`python -m MODULE ARGUMENTS`, with `environment` instead of TENSORHUB_*; any thread may give
    it commands.

    `prefix`: a command that runs the command behind it. `errors`: a file to which its standard
    error is appended.
    """

    def __init__(
        self,
        name: str,
        module: str,
        *arguments: str,
        environment: Mapping[str, str] | None = None,
        prefix: Sequence[str] = (),
        errors: Path | None = None,
    ) -> None:
        given = {
            key: value for key, value in os.environ.items() if not key.startswith("TENSORHUB_")
        }
        given["PYTHONPATH"] = os.pathsep.join([str(ROOT), *filter(None, sys.path)])
        self._changed = threading.Condition()
        self._answers: dict[int, Line] = {}
        self._is_over = False
        self._numbers = count(1)
        super().__init__(
            name,
            [
                sys.executable,
                "-IS",
                "-c",
                _GOES_ON,
                *prefix,
                sys.executable,
                "-m",
                module,
                *arguments,
            ],
            self._keep,
            environment=given | dict(environment or {}),
            errors=None if errors is None else errors.open("ab"),
        )
        self.answer(0, "start", WAIT_S)  # from now on it may be stopped

    def _keep(self, answer: Line | None) -> None:
        with self._changed:
            if answer is None:
                self._is_over = True
            else:
                self._answers[answer["id"]] = answer
            self._changed.notify_all()

    def begin(self, what: str, **arguments: Any) -> Pending:
        """Give a command, and do not wait for it. Raises OSError or ValueError if the process has
        ended.
        """
        number = next(self._numbers)
        self.write({"id": number, "do": what, **arguments})
        return Pending(self, number, what)

    def do(self, what: str, **arguments: Any) -> Any:
        """Give a command, and wait for its answer."""
        return self.begin(what, **arguments).result()

    def has_answered(self, number: int) -> bool:
        with self._changed:
            return number in self._answers

    def answer(self, number: int, what: str, timeout_s: float) -> Any:
        with self._changed:
            came = self._changed.wait_for(
                lambda: number in self._answers or self._is_over, timeout_s
            )
            answer = self._answers.get(number)
        if answer is None:
            when = "before its end" if came else f"in {timeout_s:g} s"
            raise Gone(f"{self.name} did not answer {what!r} {when}", in_time=came)
        if "error" in answer:
            error = answer["error"]
            raise (Aborted if error["kind"] == "GroupAborted" and error["retryable"] else Failed)(
                **error
            )
        return answer["value"]

    def kill(self) -> None:
        """As a machine's failure does; returns once it has ended."""
        super().kill()
        self.wait(WAIT_S)

    def stop(self) -> None:
        """Stop it where it is (SIGSTOP); returns once it has stopped."""
        self._popen.send_signal(signal.SIGSTOP)
        os.waitid(os.P_PID, self.pid, os.WSTOPPED | os.WEXITED | os.WNOWAIT)

    def go_on(self) -> None:
        self._popen.send_signal(signal.SIGCONT)

    def leave(self, timeout_s: float = WAIT_S) -> int | None:
        """Let it end by itself, as its input ends; its exit code, None if it has not ended in
        time.
        """
        self.end_input()
        return self.wait(timeout_s)

    def end(self) -> None:
        """Let it leave; kill it if it does not."""
        with contextlib.suppress(OSError):
            self.go_on()
        try:
            self.leave()
        finally:
            self.close()


def children(pid: int) -> list[int]:
    """The processes that this one has started, the ended ones that nobody has waited for
    included.
    """
    found: list[int] = []
    for task in Path(f"/proc/{pid}/task").iterdir():
        # a thread that has ended meanwhile: its children are another one's now
        with contextlib.suppress(FileNotFoundError):
            found += map(int, (task / "children").read_text().split())
    return found
