"""A worker's own questions to its coordinator. A question is asked again after a lost connection."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterator
from functools import partial
from typing import Protocol, overload

import anyio

from tensorhub import messages
from tensorhub.errors import CoordinatorUnavailable, OperationTimeout, VersionConflict
from tensorhub.model_summary import ModelSummary
from tensorhub.runtime.control.link import RECONNECT_S_FIRST
from tensorhub.types import ModelInfo, VersionInfo

Answer = messages.Done | messages.Refused | messages.Description | messages.Summary | messages.ManifestReply


class MessageSink(Protocol):
    """A worker's connection to its coordinator. `say` drops what is said without a session."""

    @property
    def online(self) -> bool: ...

    def say(self, message: messages.FromWorker) -> None: ...


def _random_id() -> str:
    return secrets.token_hex(12)


class CoordinatorClient:
    """Each question has a number of its own, and ends with its answer or at its deadline."""

    def __init__(self, link: MessageSink, numbers: Iterator[int], new_id: Callable[[], str] = _random_id) -> None:
        """`new_id` makes ids that nobody ever made before, for what is asked again and must be done once."""
        self.new_id = new_id
        self._link = link
        self._numbers = numbers
        self._waiting: dict[int, tuple[anyio.Event, list[Answer]]] = {}
        self._rolling_back = anyio.Lock()

    def __repr__(self) -> str:
        return f"<CoordinatorClient: {len(self._waiting)} without an answer>"

    def answered(self, message: Answer) -> None:
        waiting = self._waiting.get(message.request)
        if waiting is not None:
            waiting[1].append(message)
            waiting[0].set()

    def lost(self) -> None:
        """The session is over: no answer will come over it."""
        for event, _ in self._waiting.values():
            event.set()

    async def ask(self, make: Callable[[int], messages.FromWorker], what: str, timeout_s: float) -> Answer:
        """Raises what the coordinator refuses with, CoordinatorUnavailable, OperationTimeout."""
        return await self._ask(make, what, timeout_s, anyio.current_time() + timeout_s)

    async def _ask(self, make: Callable[[int], messages.FromWorker], what: str, timeout_s: float, deadline: float) -> Answer:
        """The same, of `timeout_s` seconds for several questions, which end at `deadline`."""
        with anyio.CancelScope(deadline=deadline):
            while True:
                request = next(self._numbers)
                event, answers = anyio.Event(), list[Answer]()
                self._waiting[request] = (event, answers)
                try:
                    if self._link.online:
                        self._link.say(make(request))
                        await event.wait()
                    else:
                        await anyio.sleep(RECONNECT_S_FIRST)
                finally:
                    del self._waiting[request]
                if answers:
                    if isinstance(answers[0], messages.Refused):
                        raise answers[0].error.error()
                    return answers[0]
        if not self._link.online:
            raise CoordinatorUnavailable(f"{what}: the coordinator could not be reached within {timeout_s:g} s")
        raise OperationTimeout(f"{what}: the coordinator did not answer within {timeout_s:g} s")

    async def describe(
        self, model: str | None, timeout_s: float, version: int | None = None, after: str | None = None, workers_max: int = 0
    ) -> tuple[ModelInfo, ...]:
        """What the coordinator knows of one model, or a part of that (see `messages.Describe`), or of all."""
        if model is None:
            return await self._pages(messages.Describe, "describe", timeout_s)
        make = partial(messages.Describe, model=model, after=after, version=version, workers_max=workers_max)
        answer = await self.ask(make, "describe", timeout_s)
        assert isinstance(answer, messages.Description)
        return answer.models

    async def summarize(self, model: str | None, timeout_s: float) -> tuple[ModelSummary, ...]:
        """One model in counts, or all."""
        if model is None:
            return await self._pages(messages.Summarize, "summarize", timeout_s)
        answer = await self.ask(partial(messages.Summarize, model=model), "summarize", timeout_s)
        assert isinstance(answer, messages.Summary)
        return answer.models

    @overload
    async def _pages(self, question: type[messages.Describe], what: str, timeout_s: float) -> tuple[ModelInfo, ...]: ...
    @overload
    async def _pages(self, question: type[messages.Summarize], what: str, timeout_s: float) -> tuple[ModelSummary, ...]: ...
    async def _pages(
        self, question: type[messages.Describe | messages.Summarize], what: str, timeout_s: float
    ) -> tuple[ModelInfo | ModelSummary, ...]:
        """All models, a page at a time: each as it is at some time during this call."""
        deadline = anyio.current_time() + timeout_s
        found: list[ModelInfo | ModelSummary] = []
        is_last = False
        while not is_last:
            after = found[-1].model if found else None
            answer = await self._ask(partial(question, model=None, after=after), what, timeout_s, deadline)
            assert isinstance(answer, messages.Description | messages.Summary)
            found += answer.models
            is_last = not (answer.more and answer.models)
        return tuple(found)

    async def manifest(self, info: VersionInfo, shard: int, timeout_s: float) -> bytes:
        """The encoded manifest of one shard of a version. VersionUnavailable if it has no such shard, or is no more."""
        what = f"manifest of shard {shard} of version {info.version} of {info.model!r}"
        answer = await self.ask(
            lambda request: messages.GetManifest(request, info.model, info.content_id, shard), what, timeout_s
        )
        assert isinstance(answer, messages.ManifestReply)
        return answer.manifest

    async def check_number(self, model: str, version: int, timeout_s: float) -> None:
        """Raise VersionConflict if `version` could not be published now."""
        await self.ask(lambda request: messages.Check(request, model, version), f"version {version} of {model!r}", timeout_s)

    async def nothing_published(self, model: str, timeout_s: float) -> bool:
        """Whether no version of `model` was ever published. Raises as `ask`."""
        try:
            await self.check_number(model, 0, timeout_s)
        except VersionConflict:
            return False
        return True

    async def rollback(self, model: str, to: int, timeout_s: float) -> None:
        """Begin a new lineage after version `to`; durable on return."""
        what = f"rollback of {model!r} to {to}"
        with anyio.move_on_after(timeout_s) as turn:  # one at a time: the coordinator cannot remember any number of them
            await self._rolling_back.acquire()
        if turn.cancelled_caught:
            raise OperationTimeout(f"{what}: an earlier rollback of this worker was not over within {timeout_s:g} s")
        try:
            ident = self.new_id()  # the same on each retry: a second one would retire what was published since
            left_s = max(0.0, turn.deadline - anyio.current_time())
            await self.ask(lambda request: messages.Rollback(request, ident, model, to), what, left_s)
        finally:
            self._rolling_back.release()

    async def retain(self, model: str, latest: int, timeout_s: float) -> None:
        """Keep the newest `latest` versions; durable, and known to every live holder, on return."""
        await self.ask(lambda request: messages.Retain(request, model, latest), f"retain of {model!r}", timeout_s)
