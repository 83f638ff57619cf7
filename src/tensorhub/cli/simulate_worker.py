"""One process of `tensorhub simulate`: runs the seeds that it is told to, one after the other.

Orders come from stdin and answers go to stdout, a line of JSON each. The end of stdin ends the process at once, in the
midst of a seed too, so that none outlives the command.
"""

from __future__ import annotations

import importlib
import json
import os
import queue
import sys
import threading
import traceback
from types import ModuleType
from typing import Any

REPORTED = ("seed", "events", "groups", "versions", "faults", "transitions", "paths", "end_hash")
FRAMES_MAX = 12  # of an error that is no broken promise, in what is told of it


def main(module: str) -> None:
    """Run what stdin says with `module.run_seed`."""
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # whatever else is printed is no answer
    orders: queue.SimpleQueue[str] = queue.SimpleQueue()
    threading.Thread(target=_listen, args=(orders,), daemon=True).start()
    search = importlib.import_module(module)
    while True:
        answers.write(json.dumps(run(search, **json.loads(orders.get()))) + "\n")
        answers.flush()


def _listen(orders: queue.SimpleQueue[str]) -> None:
    for line in sys.stdin:
        orders.put(line)
    os._exit(0)


def run(search: ModuleType, seed: int, events: int, faults: list[str] | None) -> dict[str, Any]:
    """The seed's report, or `failure`: what was broken, and what had happened before."""
    kinds = None if faults is None else [search.Fault(fault) for fault in faults]
    try:
        report = search.run_seed(seed, faults=kinds, events=events)
    except Exception as error:
        lines = [f"{type(error).__name__}: {error}", *getattr(error, "__notes__", ())]
        if not isinstance(error, AssertionError):  # a defect that shows as an error of some machine: where?
            lines += traceback.format_tb(error.__traceback__)[-FRAMES_MAX:]
        return {"failure": "\n".join(line.rstrip("\n") for line in lines)}
    return {"report": {name: getattr(report, name) for name in REPORTED}}


if __name__ == "__main__":
    main(sys.argv[1])
