"""One child process of `tensorhub simulate`: runs the seeds that its parent names, in turn."""

from __future__ import annotations

import gc
import importlib
import queue
import sys
import traceback
from types import ModuleType
from typing import Any

from tensorhub.cli.child_processes import Line, Parent

REPORTED = (
    "seed",
    "events",
    "groups",
    "versions",
    "faults",
    "transitions",
    "paths",
    "demands",
    "end_hash",
)
FRAMES_MAX = 12  # of the traceback of an error that is no broken guarantee


def main(module: str) -> None:
    """Say that the imports are done; then run what the parent says with `module.run_seed`."""
    commands: queue.SimpleQueue[Line] = queue.SimpleQueue()
    parent = Parent(commands.put)
    search = importlib.import_module(module)
    gc.freeze()  # no collection looks at the imported modules again
    parent.say()
    while True:
        parent.say(**run(search, **commands.get()))


def run(
    search: ModuleType,
    seed: int,
    events: int,
    faults: list[str] | None,
    shrink_s: float | None,
    only: list[str] | None,
    until: int | None,
) -> dict[str, Any]:
    """The seed's report, or `failure`: the broken guarantee, and the end of the trace.

    `shrink_s`: it has failed; `failure` explains it by the shortest history found in that time.
    `only` and `until`: which part of it to run.
    """
    kinds = None if faults is None else [search.Fault(fault) for fault in faults]
    try:
        if shrink_s is not None:
            return {"failure": search.explain(seed, faults=kinds, events=events, seconds=shrink_s)}
        if only is not None:
            report = search.run_part(seed, only, until, faults=kinds, events=events)
        else:
            report = search.run_seed(seed, faults=kinds, events=events)
    except Exception as error:
        lines = [f"{type(error).__name__}: {error}", *getattr(error, "__notes__", ())]
        # a defect that shows as an error of some machine: say where
        if not isinstance(error, AssertionError):
            lines += traceback.format_tb(error.__traceback__)[-FRAMES_MAX:]
        return {"failure": "\n".join(line.rstrip("\n") for line in lines)}
    return {"report": {name: getattr(report, name) for name in REPORTED}}


if __name__ == "__main__":
    main(sys.argv[1])
