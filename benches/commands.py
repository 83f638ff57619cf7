"""A child process' side of `child_processes`: commands from its parent, each answered when it is
done.

`{"id": 1, "do": "replicate", ...}` is answered by `{"id": 1, "value": ...}` or `{"id": 1, "error":
...}`. Commands run at the same time. The end of standard input ends the process.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from functools import partial
from typing import Any

import anyio

from tensorhub.cli.child_processes import Inbox, Line, Parent


async def obey(make: Callable[[AsyncExitStack], object]) -> None:
    """Do what comes: each command is a coroutine method of the object made. What is on the stack
    ends with the input.
    """
    inbox = Inbox()
    parent = Parent(inbox.put, at_end=partial(inbox.put, None))
    async with AsyncExitStack() as stack, anyio.create_task_group() as tasks:
        actor = make(stack)
        while (command := await inbox.get()) is not None:
            tasks.start_soon(_do, parent, actor, command)
        tasks.cancel_scope.cancel()


async def _do(parent: Parent, actor: object, command: Line) -> None:
    number, what = command.pop("id"), command.pop("do")
    work: Callable[..., Awaitable[Any]] = getattr(actor, what)
    try:
        parent.say(id=number, value=await work(**command))
    except Exception as error:
        told = {
            "kind": type(error).__name__,
            "text": str(error),
            "retryable": getattr(error, "retryable", None),
            "memory": getattr(error, "memory", None),
        }
        parent.say(id=number, error=told)
