"""What a process holds, counted from within: memory, descriptors, threads, tasks, objects by type,
every book by name.
"""

import asyncio
import atexit
import ctypes
import gc
import heapq
import logging
import os
import re
import sys
import threading
import weakref
from collections import Counter, deque
from pathlib import Path
from typing import Any, cast

import anyio

from tensorhub.runtime.loop_thread import LoopThread

KINDS = (
    "memory",
    "descriptors",
    "threads",
    "tasks",
    "objects",
    "books",
    "other objects",
    "process",
)
Sample = dict[str, dict[str, int]]  # by kind, then by what is counted

_CONTAINERS = (dict, list, set, deque, weakref.WeakSet)


async def sample(*files: Path) -> Sample:
    """Everything that this process holds now. `files`: whose bytes count, too."""
    gc.collect()
    loops = await _tasks()
    gc.collect()
    trim = ctypes.CDLL(None).malloc_trim  # what the allocator keeps for later is nobody's leak
    trim(0)
    objects, others, books = _objects()
    found: Sample = {
        "memory": _memory(),
        "descriptors": _descriptors(),
        "threads": Counter(_kind_of_thread(thread.name) for thread in threading.enumerate()),
        "tasks": loops,
        "objects": objects,
        "books": books,
        "other objects": others,
        "process": {
            "finalizers": len(vars(weakref.finalize)["_registry"]),
            "at-exit callbacks": vars(atexit)["_ncallbacks"](),
            "loggers": len(logging.root.manager.loggerDict),
            "log handlers": len(logging.root.handlers),
        },
    }
    found["process"] |= {
        f"bytes of {path.name}": path.stat().st_size for path in files if path.exists()
    }
    return {kind: dict(counts) for kind, counts in found.items()}


def _memory() -> dict[str, int]:
    status = Path("/proc/self/status").read_text()
    sizes = {
        key: int(re.findall(rf"^{key}:\s+(\d+) kB", status, re.MULTILINE)[0])
        for key in ("VmRSS", "RssAnon")
    }
    return {
        "RSS KiB": sizes["VmRSS"],
        "anonymous KiB": sizes["RssAnon"],
        "Python's blocks": sys.getallocatedblocks(),
    }


def _descriptors() -> Counter[str]:
    found: Counter[str] = Counter()
    for number in os.listdir("/proc/self/fd"):
        try:
            target = os.readlink(f"/proc/self/fd/{number}")
        except FileNotFoundError:
            continue  # it was the listing's own
        found[re.sub(r"^(socket|pipe):\[\d+\]$", r"\1", target)] += 1
    return found


def _kind_of_thread(name: str) -> str:
    return (
        "pool (idle ones end after 10 s)"
        if name.startswith(("AnyIO worker", "Trio thread"))
        else name
    )


async def _tasks() -> Counter[str]:
    """Running tasks, by loop: this one's, and those of the library's own threads."""
    found: Counter[str] = Counter({"own loop": await _count_tasks()})
    for thread in [each for each in gc.get_objects() if type(each) is LoopThread]:
        if not thread._ended:
            found[thread._name] += await thread.call(_count_tasks)
    return found


async def _count_tasks() -> int:
    _forget_ended_deadlines()
    return len(anyio.get_running_tasks())


def _forget_ended_deadlines() -> None:
    """Have the loop let go of what it keeps until it cares to prune it: 1,000 ended scopes (trio),
    100 timers (asyncio).
    """
    if (loop := cast(Any, asyncio._get_running_loop())) is not None:
        loop._scheduled = [timer for timer in loop._scheduled if not timer.cancelled()]
        heapq.heapify(loop._scheduled)
        loop._timer_cancelled_count = 0
    trio: Any = sys.modules.get("trio._core._run")
    if hasattr(getattr(trio, "GLOBAL_RUN_CONTEXT", None), "runner"):
        trio.GLOBAL_RUN_CONTEXT.runner.deadlines._prune()


def _objects() -> tuple[Counter[str], Counter[str], Counter[str]]:
    """Objects of this library's classes; all others; and how much each attribute of the former that
    is a container holds.
    """
    ours: Counter[str] = Counter()
    others: Counter[str] = Counter()
    books: Counter[str] = Counter()
    for each in gc.get_objects():
        kind = type(each)
        module = getattr(kind, "__module__", "")
        if not isinstance(module, str) or not module.startswith("tensorhub"):
            others[f"{module}.{kind.__qualname__}"] += 1
            continue
        ours[kind.__qualname__] += 1
        for name, value in _attributes(each):
            # else it bounds itself
            if isinstance(value, _CONTAINERS) and getattr(value, "maxlen", None) is None:
                books[f"{kind.__qualname__}.{name}"] += _length(value)
    return ours, others, books


def _attributes(each: Any) -> list[tuple[str, Any]]:
    found = list(getattr(each, "__dict__", {}).items())
    for kind in type(each).__mro__:
        slots = kind.__dict__.get("__slots__", ())
        for slot in (slots,) if isinstance(slots, str) else slots:
            if hasattr(each, slot):
                found.append((slot, getattr(each, slot)))
    return found


def _length(book: Any) -> int:
    """How much is in it, and in the books that are in it."""
    inner = book.values() if isinstance(book, dict) else book
    return len(book) + sum(len(each) for each in list(inner) if isinstance(each, _CONTAINERS))
