"""A process of a visit: `python -m benches.comparison.party WAY SETTING`. It obeys its stdin, and answers on stdout.

Both are lines of JSON. Whatever else is printed goes to stderr. It ends with its stdin, so that none outlives the suite.
"""

from __future__ import annotations

import importlib
import json
import os
import queue
import resource
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from . import family
from .ways import WAYS, Way


class Wire:
    """The two pipes to the suite."""

    def __init__(self) -> None:
        """Takes stdout for answers alone."""
        self._out = os.dup(1)
        os.dup2(2, 1)
        self._orders: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()
        threading.Thread(target=self._listen, daemon=True).start()

    def _listen(self) -> None:
        with open(0, "rb", buffering=0, closefd=False) as stdin:
            for line in stdin:
                self._orders.put(json.loads(line))
        os._exit(1)

    def order(self) -> dict[str, Any]:
        return self._orders.get()

    def say(self, **fields: object) -> None:
        line = memoryview(json.dumps(fields).encode() + b"\n")
        while line:
            line = line[os.write(self._out, line) :]


def way_of(name: str) -> tuple[Way, Any]:
    """The way, and its module: one of this package, or (tests have such) `module:case` of anybody's, who has `way(case)`."""
    module, _, case = name.partition(":")
    if case:
        imported = importlib.import_module(module)
        return imported.way(case), imported
    way = next(way for way in WAYS if way.name == name)
    return way, importlib.import_module(f"{__package__}.ways.{way.module}")


def cpu_s() -> float:
    """CPU seconds so far: of this process, of what it has waited for, and of what has come of it and runs."""
    both = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(use.ru_utime + use.ru_stime for use in both) + family.cpu_s(family.family([os.getpid()]) - {os.getpid()})


def work(wire: Wire, way: Way, module: Any, setting: dict[str, Any]) -> None:
    """Make the tensors and this side of the way; then obey."""
    import torch

    from .memory import Memory
    from .ways.base import Setting

    torch.set_num_threads(1)
    given = Setting(scratch=Path(setting.pop("scratch")), options=way.options, **setting)
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
    wire.say(value=side.hello(), versions={"torch": torch.__version__, **module.versions()})
    while True:
        order = wire.order()
        start = time.monotonic()
        value = commands[order["do"]](*order["with"])
        wire.say(start=start, end=time.monotonic(), value=value)
        if order["do"] == "close":
            os._exit(0)  # a peer's own threads and exit handlers may take for ever


def main() -> None:
    wire = Wire()
    try:
        way, module = way_of(sys.argv[1])
        work(wire, way, module, json.loads(sys.argv[2]))
    except BaseException as error:
        wire.say(failed=f"{type(error).__name__}: {error}")
        raise


if __name__ == "__main__":
    main()
