"""A process of a visit: `python -m benches.comparison.bench_process BACKEND SETTING`. It does what
the suite says.
"""

from __future__ import annotations

import importlib
import json
import os
import queue
import resource
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tensorhub.cli.child_processes import Line, Parent

from . import process_tree
from .backends import BACKENDS, Backend


def backend_of(name: str) -> tuple[Backend, Any]:
    """The backend and its module. In tests, `module:case` names a module with a function
    `backend(case)`.
    """
    module, _, case = name.partition(":")
    if case:
        imported = importlib.import_module(module)
        return imported.backend(case), imported
    backend = next(backend for backend in BACKENDS if backend.name == name)
    return backend, importlib.import_module(f"{__package__}.backends.{backend.module}")


def cpu_s() -> float:
    """CPU seconds so far: of this process, of what it has waited for, and of what has come of it
    and runs.
    """
    both = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(use.ru_utime + use.ru_stime for use in both) + process_tree.cpu_s(
        process_tree.members([os.getpid()]) - {os.getpid()}
    )


def work(
    parent: Parent,
    told: queue.SimpleQueue[Line],
    backend: Backend,
    module: Any,
    setting: dict[str, Any],
) -> None:
    """Make the tensors and this side of the backend; then obey."""
    import torch

    from .backends.base import Setting
    from .memory import Memory

    torch.set_num_threads(1)
    given = Setting(scratch=Path(setting.pop("scratch")), options=backend.options, **setting)
    kind = module.Source if given.number == 0 else module.Receiver
    memory = Memory(kind.tensors(given), random=given.number == 0)
    side = kind(given, memory)
    commands: dict[str, Callable[..., object]] = {
        "meet": side.meet,
        "retire": side.retire,
        "offer": side.offer,
        "give": side.give,
        "take": side.take,
        "close": side.close,
        "change": memory.change,
        "clear": memory.clear,
        "sample": memory.sample,
        "digest": memory.digest,
        "cpu": cpu_s,
    }
    parent.say(value=side.hello(), versions={"torch": torch.__version__, **module.versions()})
    while True:
        command = told.get()
        start = time.monotonic()
        value = commands[command["do"]](*command["arguments"])
        parent.say(start=start, end=time.monotonic(), value=value)
        if command["do"] == "close":
            os._exit(0)  # a peer's own threads and exit handlers may take for ever


def main() -> None:
    told: queue.SimpleQueue[Line] = queue.SimpleQueue()
    parent = Parent(told.put)
    try:
        backend, module = backend_of(sys.argv[1])
        work(parent, told, backend, module, json.loads(sys.argv[2]))
    except BaseException as error:
        parent.say(failed=f"{type(error).__name__}: {error}")
        raise


if __name__ == "__main__":
    main()
