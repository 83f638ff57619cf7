"""Commands on a real pseudo-terminal."""

import contextlib
import fcntl
import os
import pty
import re
import signal
import struct
import subprocess
import termios
import threading
from collections.abc import Iterator, Sequence

from tests.cli.processes import PROGRAM, WAIT_S, environment

COLOURS = re.compile(rb"\x1b\[[0-9;:]*m")
ESCAPES = re.compile(
    rb"\x1b(\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]*(\x07|\x1b\\)|[PX^_].*?\x1b\\|[ -~])"
)


class Terminal:
    """The running command, and all that it has written to its terminal so far."""

    def __init__(self, process: subprocess.Popen[bytes], ours: int) -> None:
        self.process, self._ours = process, ours
        self._more = threading.Condition()
        self._written = b""
        self._is_over = False
        self._reader = threading.Thread(target=self._read)
        self._reader.start()

    def _read(self) -> None:
        with contextlib.suppress(OSError):  # the other end is closed
            while part := os.read(self._ours, 65_536):
                with self._more:
                    self._written += part
                    self._more.notify_all()
        with self._more:
            self._is_over = True
            self._more.notify_all()

    @property
    def written(self) -> bytes:
        with self._more:
            return self._written

    @property
    def text(self) -> str:
        """Without colours; another escape sequence, which may move the cursor, is a space."""
        return ESCAPES.sub(b" ", COLOURS.sub(b"", self.written)).decode(errors="replace")

    def until(self, text: str, after: int = 0) -> int:
        """Wait until the text has come, behind so many characters; returns where it ends."""
        with self._more:

            def came() -> bool:
                return self.text.find(text, after) >= 0 or self._is_over

            assert self._more.wait_for(came, WAIT_S), self.text[-2000:]
        at = self.text.find(text, after)
        assert at >= 0, f"no {text!r} in {self.text[-2000:]!r}"
        return at + len(text)

    def press(self, keys: str) -> None:
        os.write(self._ours, keys.encode())

    def resize(self, columns: int, lines: int) -> None:
        fcntl.ioctl(self._ours, termios.TIOCSWINSZ, struct.pack("HHHH", lines, columns, 0, 0))

    def wait(self) -> int:
        """Its exit code, with all that it wrote read."""
        code = self.process.wait(WAIT_S)
        self._reader.join(WAIT_S)
        return code

    def modes(self) -> list[object]:
        """As `termios.tcgetattr`."""
        return list(termios.tcgetattr(self._ours))

    def end(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.communicate()
        self._reader.join(WAIT_S)
        os.close(self._ours)


@contextlib.contextmanager
def on_terminal(
    *arguments: str, streams: Sequence[str] = ("stdin", "stdout", "stderr"), **environ: str
) -> Iterator[Terminal]:
    """The running command, with these streams on a terminal of 80 columns and 24 lines; the others
    are pipes. It is killed at the end.
    """
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 80, 0, 0))
    try:
        process = subprocess.Popen(
            [*PROGRAM, *arguments],
            stdin=theirs if "stdin" in streams else subprocess.DEVNULL,
            stdout=theirs if "stdout" in streams else subprocess.PIPE,
            stderr=theirs if "stderr" in streams else subprocess.PIPE,
            env=without_size(environment()) | {"TERM": "xterm-256color"} | environ,
            start_new_session=True,
        )
    finally:
        os.close(theirs)
    terminal = Terminal(process, ours)
    try:
        yield terminal
    finally:
        terminal.end()


def without_size(environ: dict[str, str]) -> dict[str, str]:
    """A terminal's own size counts."""
    return {name: value for name, value in environ.items() if name not in ("COLUMNS", "LINES")}
