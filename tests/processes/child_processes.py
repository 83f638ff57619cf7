"""The processes of a test, started and ended together; none of them outlives the test."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from benches.child_processes import WAIT_S, Aborted, Failed, Pending, Process, children

__all__ = ["WAIT_S", "Aborted", "ChildProcesses", "Failed", "Pending", "Process", "child_processes"]


class ChildProcesses:
    """The processes of one test."""

    def __init__(self, backend: str) -> None:
        self._backend = backend
        self._processes: list[Process] = []

    def process(
        self,
        name: str,
        prefix: Sequence[str] = (),
        errors: Path | None = None,
        module: str = "tests.processes.actor",
    ) -> Process:
        """`prefix`: a command that runs it; `errors`: a file for what it logs; `module`: whose
        commands it knows.
        """
        made = Process(name, module, self._backend, prefix=prefix, errors=errors)
        self._processes.append(made)
        return made

    def worker(
        self,
        address: str,
        name: str,
        nbytes: int,
        *,
        gate: int | Mapping[str, Any] | None = None,
        prefix: Sequence[str] = (),
        **settings: Any,
    ) -> Process:
        """A process that is connected, with memory registered; `gate`: it reads so many chunks,
        then waits.
        """
        process = self.process(name, prefix)
        options = settings.pop("options", {})
        if gate is not None:
            process.do("gate", **(gate if isinstance(gate, Mapping) else {"arrivals": gate}))
        process.do("connect", address=address, name=name, **options)
        process.do("register", nbytes=nbytes, **settings)
        return process

    def end(self) -> list[int]:
        """End all; returns the process ids of those that are left."""
        ended = [process.returncode for process in self._processes]
        for process in reversed(self._processes):  # workers before their coordinator
            process.end()
        for process, before in zip(self._processes, ended, strict=True):
            assert before is not None or process.returncode == 0, (
                f"{process.name}: {process.returncode}"
            )
        return children(os.getpid())


@contextlib.contextmanager
def child_processes(backend: str) -> Iterator[ChildProcesses]:
    """Processes for a test; at its end none is left."""
    before = set(children(os.getpid()))
    made = ChildProcesses(backend)
    left: list[int] = []
    try:
        yield made
    finally:
        left = made.end()
    assert set(left) <= before
