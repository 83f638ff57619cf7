"""Child processes that exchange lines of JSON with their parent: `ChildProcess` is the parent's
side, `Parent` the child's.

A child reads commands from its standard input and answers on its standard output; anything else
that it prints goes to its standard error. It ends when its standard input does, so no child
outlives its parent, however that ends. Ctrl-C reaches the parent alone, because a child is in a
process group of its own.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import tempfile
import threading
from collections import deque
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from typing import IO, Any

import anyio
import anyio.to_thread

from tensorhub.runtime.wakeup import Wakeup

Line = dict[str, Any]

LINE_BYTES_MAX = 64 * 2**20
LAST_BYTES = 4096  # of standard error, in which the last line is looked for
LAST_CHARACTERS_MAX = 500
COLLECT_S = 10.0  # for a process that was killed or has closed its standard output


def _write(descriptor: int, line: Mapping[str, object]) -> None:
    rest = memoryview(json.dumps(line).encode() + b"\n")
    while rest:
        rest = rest[os.write(descriptor, rest) :]


class Inbox:
    """Lines that any thread puts in and one task of the loop takes out. None: no more will come."""

    def __init__(self) -> None:
        """To be made in a task of the loop that will wait."""
        self._lines = deque[Line | None]()
        self._wakeup = Wakeup()

    def put(self, line: Line | None) -> None:
        self._lines.append(line)
        self._wakeup.set()

    async def get(self) -> Line | None:
        while not self._lines:
            await self._wakeup.wait()
        return self._lines.popleft()


# --------------------------------------------------------------------------------------------------
# the parent's side


class ChildEnded(Exception):
    """A child has ended. The text has its name, its exit code, and the last line of its standard
    error if that was kept.
    """

    def __init__(self, name: str, code: int, last: str | None) -> None:
        super().__init__(
            f"{name} ended with exit code {code}"
            + ("" if last is None else f": {last or 'it left no message'}")
        )
        self.code = code


class ChildProcess:
    """A running child. A thread reads its lines and passes each to `heard`, and None after the
    last.
    """

    def __init__(
        self,
        name: str,
        command: Sequence[str],
        heard: Callable[[Line | None], object],
        *,
        environment: Mapping[str, str],
        errors: IO[bytes] | None = None,
    ) -> None:
        """`errors`: the file for its standard error, which `close` closes; None: the parent's
        own.
        """
        self.name = name
        self._heard = heard
        self._errors = errors
        self._popen = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors,
            env=environment,
            start_new_session=True,
        )
        self._writing = threading.Lock()
        self._reader = threading.Thread(target=self._read, name=f"hears-{name}", daemon=True)
        self._reader.start()

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.name} {self.pid}, exit code {self.returncode}>"

    @property
    def pid(self) -> int:
        return self._popen.pid

    @property
    def returncode(self) -> int | None:
        """The exit status; None until a caller has waited for the process' end."""
        return self._popen.returncode

    def _read(self) -> None:
        assert self._popen.stdout is not None
        try:
            while (line := self._popen.stdout.readline(LINE_BYTES_MAX)).endswith(b"\n"):
                self._heard(json.loads(line))
        except ValueError:  # no JSON
            line = b"?"
        if line:  # it died in the midst of a line, or writes no lines: it is of no use any more
            self._popen.kill()
        self._heard(None)

    def write(self, line: Mapping[str, object]) -> None:
        """Send a line; blocks while the child does not read. Raises OSError or ValueError if the
        child has ended.
        """
        assert self._popen.stdin is not None
        with self._writing:
            _write(self._popen.stdin.fileno(), line)

    def end_input(self) -> None:
        """The child ends by itself, as its input does."""
        assert self._popen.stdin is not None
        with self._writing, contextlib.suppress(OSError):
            self._popen.stdin.close()

    def wait(self, timeout_s: float) -> int | None:
        """The exit code; None if the child has not ended in time."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._popen.wait(timeout_s)
        return self._popen.returncode

    def kill(self) -> None:
        """Kill the child, as a machine's failure does. `wait` collects it."""
        self._popen.kill()

    def close(self) -> None:
        """Kill the child if it still runs, collect it, and close the pipes."""
        self.kill()
        self.wait(COLLECT_S)
        self.end_input()
        self._reader.join(COLLECT_S)
        # else a process of the child's has the pipe
        if not self._reader.is_alive() and self._popen.stdout is not None:
            self._popen.stdout.close()
        if self._errors is not None:
            self._errors.close()

    def _collect(self) -> int:
        """The exit code. A child that says nothing more and does not end is killed."""
        if self.wait(COLLECT_S) is None:
            self.kill()
        return self._popen.wait(COLLECT_S)

    def _last_words(self) -> str | None:
        """The last line of its standard error, "" if there is none; None if it was not kept."""
        if self._errors is None:
            return None
        start = max(0, os.fstat(self._errors.fileno()).st_size - LAST_BYTES)
        text = os.pread(self._errors.fileno(), LAST_BYTES, start).decode(errors="replace").strip()
        return text.rpartition("\n")[2].strip()[:LAST_CHARACTERS_MAX]


class AsyncChildProcess(ChildProcess):
    """A child that one task of an event loop talks to. Deadlines are the caller's."""

    def __init__(
        self,
        name: str,
        command: Sequence[str],
        *,
        environment: Mapping[str, str],
        keeps_errors: bool = True,
    ) -> None:
        """`keeps_errors`: whether its standard error is kept for the text of ChildEnded; else it
        goes to the parent's.
        """
        self._inbox = Inbox()
        errors = tempfile.TemporaryFile() if keeps_errors else None  # noqa: SIM115 - `close` closes it
        super().__init__(name, command, self._inbox.put, environment=environment, errors=errors)

    async def tell(self, **line: object) -> None:
        """Send a line. A child that has ended gets nothing; the next `hear` says so."""
        with contextlib.suppress(OSError, ValueError):
            await anyio.to_thread.run_sync(self.write, line, abandon_on_cancel=True)

    async def hear(self) -> Line:
        """The child's next line. Raises ChildEnded if there will be none."""
        line = await self._inbox.get()
        if line is None:
            self._inbox.put(None)  # for the next call
            code = await anyio.to_thread.run_sync(self._collect, abandon_on_cancel=True)
            raise ChildEnded(self.name, code, self._last_words())
        return line

    async def ask(self, **line: object) -> Line:
        """Send a line, and wait for the next one of the child."""
        await self.tell(**line)
        return await self.hear()


@contextlib.asynccontextmanager
async def closing_all() -> AsyncIterator[list[AsyncChildProcess]]:
    """A list to which the block adds children. None of them is left after it, however it ends."""
    children: list[AsyncChildProcess] = []
    try:
        yield children
    finally:
        for child in children:
            child.kill()
        with anyio.CancelScope(shield=True):
            for child in children:
                await anyio.to_thread.run_sync(child.close)


# --------------------------------------------------------------------------------------------------
# the child's side


class Parent:
    """The parent, as its child sees it: each command is passed to `heard`, by a thread; `say`
    answers.
    """

    def __init__(
        self, heard: Callable[[Line], object], at_end: Callable[[], object] = lambda: os._exit(1)
    ) -> None:
        """Takes standard output for lines alone: whatever else is printed goes to standard error
        from now on.

        `at_end`: called by the thread when the input has ended. By default the process ends at
        once, whatever it is doing.
        """
        self._out = os.dup(1)
        os.dup2(2, 1)
        self._saying = threading.Lock()
        threading.Thread(
            target=self._listen, args=(heard, at_end), name="commands", daemon=True
        ).start()

    def _listen(self, heard: Callable[[Line], object], at_end: Callable[[], object]) -> None:
        rest = b""
        # not by sys.stdin: this thread would hold its lock at exit
        while part := os.read(0, 2**16):
            *lines, rest = (rest + part).split(b"\n")
            for line in lines:
                heard(json.loads(line))
        at_end()

    def say(self, **line: object) -> None:
        """Send a line to the parent; whole, also from several threads."""
        with self._saying:
            _write(self._out, line)
