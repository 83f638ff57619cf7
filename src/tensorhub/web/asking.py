"""Questions to the loop that an endpoint shows.

However many clients ask, each kind of question takes at most `SHARE` of that loop's time, and an
answer is given again for `FRESH_S`, or until the next question may be asked. Responsible for the
crossing between the loops and for these bounds. Lives in the endpoint's loop.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import Counter, deque
from collections.abc import AsyncIterator, Awaitable, Callable
from functools import partial
from typing import Any, TypeVar

T = TypeVar("T")
Post = Callable[[Callable[[], None]], bool]  # see `LoopThread.post`

FRESH_S = 1.0  # an answer is given again for so long
SHARE = 0.005  # snapshots have one, and all other questions
ANSWER_S = 3.0  # a loop that has not answered by then is behind
WAITING_MAX = 32  # questions
WAITING_OF_CLIENT_MAX = 8  # of these
ANSWERS_MAX = 64  # that are kept


class Unanswered(Exception):
    """The loop has not answered in time, has ended, or is asked too much. Says which."""


class OtherLoop:
    """The loop that is asked."""

    def __init__(self, post: Post) -> None:
        """`post`: has a function called there."""
        self._post = post
        self.used_s = 0.0  # of its thread's processor time, by questions

    async def ask(self, function: Callable[[], T]) -> T:
        """`function()`, called there. Raises what that raises, and Unanswered."""
        loop = asyncio.get_running_loop()
        answer: asyncio.Future[T] = loop.create_future()

        def settle(setter: Callable[[Any], None], value: object, used_s: float) -> None:
            self.used_s += used_s
            if not answer.done():
                setter(value)

        def call() -> None:
            began = time.thread_time()
            try:
                told = partial(settle, answer.set_result, function())
            except Exception as error:
                told = partial(settle, answer.set_exception, error)
            with contextlib.suppress(RuntimeError):  # the endpoint has ended
                loop.call_soon_threadsafe(told, time.thread_time() - began)

        if not self._post(call):
            raise Unanswered("it is ending")
        try:
            async with asyncio.timeout(ANSWER_S):
                return await answer
        except TimeoutError:
            raise Unanswered(f"it is behind: it has not answered for {ANSWER_S:g} s") from None


class Turns:
    """One question at a time. Clients take turns, however many questions each of them has."""

    def __init__(self) -> None:
        self._is_taken = False
        self._waiting: dict[str, deque[asyncio.Future[None]]] = {}  # by client; the next one first

    @contextlib.asynccontextmanager
    async def turn(self, client: str) -> AsyncIterator[None]:
        if self._is_taken:
            mine: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._waiting.setdefault(client, deque()).append(mine)
            await mine
        self._is_taken = True
        try:
            yield
        finally:
            self._is_taken = bool(self._waiting)
            for first in list(self._waiting)[:1]:
                others = self._waiting.pop(first)
                others.popleft().set_result(None)
                if others:
                    self._waiting[first] = others


class Questions:
    """Of clients, which choose what they ask. Equal questions are asked once."""

    def __init__(self, asked: OtherLoop) -> None:
        self._asked = asked
        self._answers: dict[object, asyncio.Task[Any]] = {}  # oldest first
        self._waiting: Counter[str] = Counter()  # by client
        self._turns = Turns()
        self._not_before = 0.0

    async def ask(self, key: object, question: Callable[[], Awaitable[T]], client: str = "") -> T:
        """The answer to the question that `key` names: a fresh one, or that of a moment ago. Raises
        what the question raises, and Unanswered. `client`: its address.
        """
        task = self._answers.get(key)
        if task is None:
            of_client = self._waiting[client]
            if self._waiting.total() >= WAITING_MAX or of_client >= WAITING_OF_CLIENT_MAX:
                raise Unanswered("too many questions wait: try again soon")
            task = self._answers[key] = asyncio.create_task(self._ask(question, client))
            task.add_done_callback(partial(self._done, key, client))
            self._waiting[client] += 1
        answer: T = await asyncio.shield(task)
        return answer

    async def _ask(self, question: Callable[[], Awaitable[T]], client: str) -> T:
        loop = asyncio.get_running_loop()
        async with self._turns.turn(client):
            await asyncio.sleep(max(0.0, self._not_before - loop.time()))
            before_s = self._asked.used_s
            try:
                return await question()
            finally:
                used_s = self._asked.used_s - before_s
                self._not_before = loop.time() + used_s / SHARE

    def _done(self, key: object, client: str, task: asyncio.Task[Any]) -> None:
        self._waiting -= Counter({client: 1})
        if not task.cancelled():
            task.exception()  # was told, unless every client has gone
        self._answers = dict(list(self._answers.items())[-ANSWERS_MAX:])
        loop = asyncio.get_running_loop()
        fresh_s = max(FRESH_S, self._not_before - loop.time())
        loop.call_later(fresh_s, self._forget, key, task)

    def _forget(self, key: object, task: asyncio.Task[Any]) -> None:
        if self._answers.get(key) is task:
            del self._answers[key]
