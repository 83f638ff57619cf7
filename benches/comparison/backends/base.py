"""One process' side of a backend: what the harness calls, in this order. All of it blocks. Imports
torch.
"""

from __future__ import annotations

import contextlib
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from ..memory import Memory, private

WAIT_S = 30.0  # for a server of the backend's own to be there
# A program that gets SIGTERM (15) when the process that started it dies (PR_SET_PDEATHSIG, 1).
_END_WITH_ME = (
    "import ctypes, os, sys; ctypes.CDLL(None).prctl(1, 15); os.execvp(sys.argv[1], sys.argv[1:])"
)


@dataclass(frozen=True, slots=True)
class Setting:
    """`number`: 0 is the source, the receivers are 1 and up. `scratch`: a directory in memory, gone
    after the visit.
    """

    number: int
    receivers: int
    sizes: Sequence[int]
    scratch: Path
    options: Mapping[str, Any]


class Side:
    """`hello`, then `meet`; then for each copy `retire`, `offer`, and `give` and `take` at once;
    then `close`.

    Timed are `retire` and `offer` of the source, and, from the first start to the last end, `give`
    and all `take`s. What the source's `offer` returns (JSON) is what `take` is called with.
    """

    def __init__(self, setting: Setting, memory: Memory) -> None:
        self.setting = setting
        self.memory = memory

    @classmethod
    def tensors(cls, setting: Setting) -> dict[str, torch.Tensor]:
        """Where the tensors of this process lie."""
        return private(setting.sizes)

    def hello(self) -> Any:
        """What all others are told (JSON)."""
        return None

    def meet(self, hellos: Sequence[Any]) -> None:
        """Make what lasts: connections, registrations. `hellos`: of all, the source's first; it is
        called in all at once.
        """

    def retire(self) -> None:
        """The source's tensors are about to change."""

    def offer(self, number: int) -> Any:
        """The source has a new content, its `number`th: whatever has to be done with each before
        anybody can take it.
        """
        return None

    def give(self) -> None:
        """The source sends it, if that takes part in it."""

    def take(self, offered: Any) -> None:
        """Return when this process' own tensors have it."""

    def close(self) -> None:
        """Give everything back."""


def start(command: Sequence[str], log: Path) -> subprocess.Popen[bytes]:
    """A server of the backend's own, which ends with this process."""
    with log.open("wb") as out:
        return subprocess.Popen(
            [sys.executable, "-c", _END_WITH_ME, *command],
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=out,
            cwd=log.parent,
        )


def stop(process: subprocess.Popen[bytes]) -> None:
    process.terminate()
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(5)
    process.kill()
    process.wait()


def free_port() -> int:
    """One that nobody has right now."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])


def connect(port: int) -> socket.socket:
    """To a server that may not be there yet."""
    for _ in patience():
        with contextlib.suppress(ConnectionRefusedError):
            return socket.create_connection(("127.0.0.1", port))
    raise TimeoutError(f"nobody listens on port {port} after {WAIT_S:g} s")


def patience() -> Iterator[None]:
    """Turns, until it is too late."""
    deadline = time.monotonic() + WAIT_S
    while time.monotonic() < deadline:
        yield
        time.sleep(0.02)


def receive_into(connection: socket.socket, view: memoryview) -> None:
    while view:
        count = connection.recv_into(view)
        if count == 0:
            raise ConnectionError("the sender ended before everything was there")
        view = view[count:]
