"""Questions to the loop that an endpoint shows.

However many clients ask, that loop answers at most one question per `PACE_S`, and a question that
was answered less than `FRESH_S` ago not again. Responsible for the crossing between the loops and
for these bounds. Lives in the endpoint's loop.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any, TypeVar

T = TypeVar("T")
Post = Callable[[Callable[[], None]], bool]  # see `LoopThread.post`

FRESH_S = 1.0  # an answer is given again for so long
PACE_S = 0.1  # between two questions that clients choose
ANSWER_S = 3.0  # a loop that has not answered by then is behind
WAITING_MAX = 32  # questions
ANSWERS_MAX = 64  # that are kept


class Unanswered(Exception):
    """The loop has not answered in time, has ended, or is asked too much. Says which."""


async def ask(post: Post, function: Callable[[], T]) -> T:
    """`function()`, called in the other loop. Raises what that raises, and Unanswered."""
    loop = asyncio.get_running_loop()
    answer: asyncio.Future[T] = loop.create_future()

    def settle(setter: Callable[[Any], None], value: object) -> None:
        if not answer.done():
            setter(value)

    def call() -> None:
        try:
            told = partial(settle, answer.set_result, function())
        except Exception as error:
            told = partial(settle, answer.set_exception, error)
        with contextlib.suppress(RuntimeError):  # the endpoint has ended
            loop.call_soon_threadsafe(told)

    if not post(call):
        raise Unanswered("it is ending")
    try:
        async with asyncio.timeout(ANSWER_S):
            return await answer
    except TimeoutError:
        raise Unanswered(f"it is behind: it has not answered for {ANSWER_S:g} s") from None


class Questions:
    """Of clients, which choose what they ask. Equal questions are asked once."""

    def __init__(self) -> None:
        self._answers: dict[object, asyncio.Task[Any]] = {}  # oldest first
        self._waiting = 0
        self._turn = asyncio.Lock()
        self._not_before = 0.0

    async def ask(self, key: object, question: Callable[[], Awaitable[T]]) -> T:
        """The answer to the question that `key` names, at most `FRESH_S` old. Raises what the
        question raises, and Unanswered.
        """
        task = self._answers.get(key)
        if task is None:
            if self._waiting >= WAITING_MAX:
                raise Unanswered("too many questions wait: try again soon")
            task = self._answers[key] = asyncio.create_task(self._ask(question))
            task.add_done_callback(partial(self._done, key))
            self._waiting += 1
        answer: T = await asyncio.shield(task)
        return answer

    async def _ask(self, question: Callable[[], Awaitable[T]]) -> T:
        loop = asyncio.get_running_loop()
        async with self._turn:
            await asyncio.sleep(max(0.0, self._not_before - loop.time()))
            self._not_before = loop.time() + PACE_S
            return await question()

    def _done(self, key: object, task: asyncio.Task[Any]) -> None:
        self._waiting -= 1
        if not task.cancelled():
            task.exception()  # was told, unless every client has gone
        self._answers = dict(list(self._answers.items())[-ANSWERS_MAX:])
        asyncio.get_running_loop().call_later(FRESH_S, self._forget, key, task)

    def _forget(self, key: object, task: asyncio.Task[Any]) -> None:
        if self._answers.get(key) is task:
            del self._answers[key]
