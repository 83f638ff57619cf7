"""A child process' side of `processes`: commands in JSON lines on standard input, answers on standard output.

`{"id": 1, "do": "replicate", ...}` is answered by `{"id": 1, "value": ...}` or `{"id": 1, "error": ...}`; commands run
at the same time. The end of standard input ends the process.
"""

from __future__ import annotations

import json
import os
import sys
import threading
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from typing import Any

import anyio

from tensorhub.runtime.wakeup import Wakeup


def say(line: dict[str, Any]) -> None:
    """One line for the parent; whole, also from several threads (up to a pipe's 4096 bytes)."""
    os.write(1, json.dumps(line).encode() + b"\n")


async def obey(make: Callable[[AsyncExitStack], object]) -> None:
    """Do what comes: each command is a coroutine method of the object made. What is on the stack ends with the input."""
    wakeup, lines = Wakeup(), list[str]()

    def listen() -> None:
        for line in sys.stdin:
            lines.append(line)
            wakeup.set()
        lines.append("")
        wakeup.set()

    threading.Thread(target=listen, daemon=True).start()
    async with AsyncExitStack() as stack, anyio.create_task_group() as tasks:
        actor = make(stack)
        while True:
            await wakeup.wait()
            while lines:
                line = lines.pop(0)
                if not line:
                    tasks.cancel_scope.cancel()
                    return
                tasks.start_soon(_do, actor, json.loads(line))


async def _do(actor: object, command: dict[str, Any]) -> None:
    number, what = command.pop("id"), command.pop("do")
    work: Callable[..., Awaitable[Any]] = getattr(actor, what)
    answer: dict[str, Any] = {"id": number}
    try:
        answer["value"] = await work(**command)
    except Exception as error:
        answer["error"] = {
            "kind": type(error).__name__,
            "text": str(error),
            "retryable": getattr(error, "retryable", None),
            "memory": getattr(error, "memory", None),
        }
    say(answer)
