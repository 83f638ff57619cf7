"""A registered memory, as callers use it: the calls that follow from each method, and what a method
raises.

`Weights` and the prefetcher stand on `CallersHandle`. Not responsible for carrying a call out:
`runtime.worker.handle` does that, and a simulated handle in a simulation. Lives in the worker
runtime's loop.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any

import anyio

from tensorhub.errors import TensorHubError
from tensorhub.messages import ErrorInfo
from tensorhub.runtime.worker.stream_sync import StreamSync
from tensorhub.types import FetchReport, HandleState, VersionInfo
from tensorhub.worker.calls import (
    Call,
    CloseCall,
    FillCall,
    Finish,
    PublishCall,
    RefuseCall,
    UnpublishCall,
)
from tensorhub.worker.interpreter import Interpreter
from tensorhub.worker.member import Member

HookRequest = Callable[[VersionInfo], None]  # has the caller run before_write
ProgressListener = Callable[[int, int], None]  # (bytes verified so far, bytes wanted)
Report = Callable[[], FetchReport]  # of a fill that has ended well, asked for at once


class CallersHandle(ABC):
    """One registered memory and its calls."""

    def __init__(self, interpreter: Interpreter, stream_sync: StreamSync) -> None:
        self.interpreter = interpreter
        self.stream_sync = stream_sync
        self.call_ended: Callable[[], None] = lambda: None
        self.registered = anyio.Event()  # the coordinator has taken it, or refused it
        self.registration_error: Exception | None = None

    @property
    def member(self) -> Member:
        return self.interpreter.member

    @property
    def was_filled(self) -> bool:
        return self.interpreter.was_filled

    @abstractmethod
    async def _carry_out(
        self, call: Call, timeout_s: float, hook: HookRequest | None
    ) -> tuple[Finish, Report]:
        """Begin a call and wait for its end; cancelling ends it as soon as may be, and leaves
        nothing running.
        """

    @abstractmethod
    async def end_call(self, error: Exception) -> None:
        """End the running call, if there is one, with `error`; returns when nothing of it runs any
        more.
        """

    @abstractmethod
    def follow(self, task: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """Run something beside this handle, as long as it runs."""

    def show_progress(self, listener: ProgressListener | None) -> None:
        """Call it as the next fill gets on, if that can be told."""
        return

    async def changed_tensors(self) -> tuple[str, ...]:
        """Names of the tensors that no longer have the digests of their version, if the digests can
        tell.

        StateError: the memory holds no version, or its version has no digests.
        """
        return ()

    @abstractmethod
    def hook_returned(self, error: Exception | None) -> None:
        """The caller's before_write is over."""

    @abstractmethod
    async def _before_publish(self, timeout_s: float) -> None:
        """What has to be done with the memory first."""

    async def _run(
        self, call: Call, timeout_s: float, hook: HookRequest | None = None
    ) -> tuple[Finish, Report]:
        self.interpreter.check(call)
        finish, report = await self._carry_out(call, timeout_s, hook)
        self.interpreter.raise_for(call, finish)
        return finish, report

    async def publish(self, version: int, timeout_s: float) -> VersionInfo:
        """`timeout_s` does not count the digests that this memory needs beforehand: their time
        grows with its bytes.
        """
        call = PublishCall(version)
        self.interpreter.check(call)
        await self._before_publish(timeout_s)
        finish, _ = await self._run(call, timeout_s)
        assert finish.version is not None
        return finish.version

    async def unpublish(self, timeout_s: float) -> None:
        await self._run(UnpublishCall(), timeout_s)

    async def check_mutate(self, check_number: Callable[[], Awaitable[None]]) -> None:
        """Raise what a `mutate` is told with the memory as it was."""
        self.interpreter.check_idle()
        await check_number()
        self.interpreter.check_idle()
        self.member.report_loss()

    async def begin_mutate(self, timeout_s: float) -> None:
        """Take the memory back for the body of a `mutate`."""
        call = self.interpreter.call_before_body()
        if call is not None:
            await self._run(call, timeout_s)

    async def refuse(self, error: TensorHubError, timeout_s: float) -> None:
        """This rank will not make its next group call, because of that."""
        await self._run(RefuseCall(ErrorInfo.of(error)), timeout_s)

    async def close(self, timeout_s: float, *, abandon: bool = False) -> None:
        if self.member.state is not HandleState.CLOSED:
            await self._run(CloseCall(abandon), timeout_s)

    async def fill(
        self, call: FillCall, timeout_s: float, hook: HookRequest | None = None
    ) -> FetchReport:
        _, report = await self.fetch(call, timeout_s, hook)
        return report

    async def fetch(
        self, call: FillCall, timeout_s: float, hook: HookRequest | None = None
    ) -> tuple[VersionInfo, FetchReport]:
        """As `fill`; says which version it was, too."""
        finish, report = await self._run(call, timeout_s, hook)
        assert finish.version is not None
        return finish.version, report()
