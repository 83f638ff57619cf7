"""What the public classes need of the library's other side: host copies, and a thread to call.

`runtime.worker.host_copies` and `runtime.loop_thread` implement these. So does a simulation, which
runs the public `Hub` and `Weights`. The public classes use only the classes here, in
`runtime.worker.calling.CallersHandle` and `runtime.worker.registering.CallersWorker`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable
from typing import Any, Protocol, TypeVar

from tensorhub.runtime.ending import Parting
from tensorhub.runtime.loop_thread import CallerMode, Job, Watching
from tensorhub.runtime.worker.calling import CallersHandle
from tensorhub.types import FetchReport, Selector, VersionInfo
from tensorhub.worker.host_copies import HostCopies
from tensorhub.worker.procedures import Steps

T = TypeVar("T")


class CallersCopies(ABC):
    """A worker's copies in host memory, as its callers use them."""

    machine: HostCopies

    @abstractmethod
    async def _ask(self, steps: Steps[Any]) -> FetchReport | None:
        """Wait for the answer to a request; cancelling ends the request as soon as may be, and
        leaves nothing running.
        """

    async def prefetch(
        self, handle: CallersHandle, selector: Selector, timeout_s: float
    ) -> FetchReport:
        return await self._fill(self.machine.prefetch(handle.member, selector, timeout_s))

    async def seed(self, info: VersionInfo, shard: int, timeout_s: float) -> FetchReport:
        return await self._fill(self.machine.seed(info, shard, timeout_s))

    async def close(self, handle: CallersHandle, timeout_s: float, *, abandon: bool) -> None:
        """Close a handle with the host copies that end with it."""
        await self._ask(self.machine.close(handle.member, timeout_s, abandon=abandon))

    async def _fill(self, steps: Steps[FetchReport | None]) -> FetchReport:
        report = await self._ask(steps)
        assert report is not None
        return report


class ThreadPort(Protocol):
    """Where calls run. See `loop_thread.LoopThread`."""

    @property
    def mode(self) -> CallerMode: ...

    def check_usable(self) -> None: ...

    async def call(
        self,
        function: Callable[..., Awaitable[T]],
        *arguments: Any,
        undo: Callable[[T], object] | None = None,
    ) -> T: ...

    def job(self, function: Callable[..., Awaitable[T]], *arguments: Any) -> Job[T]: ...

    async def run_job(self, job: Job[T]) -> T: ...

    def post(self, callback: Callable[[], None]) -> bool: ...

    def tell_end(self, watching: Watching) -> None: ...

    def end_soon(self, parting: Parting) -> None: ...

    def dropped(self) -> None: ...

    async def ended(self) -> None: ...
