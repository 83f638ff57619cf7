"""What the public classes need of the library's other side: host copies, and a thread to call.

`runtime.worker.host_copies` and `runtime.loop_thread` implement these protocols. So does a simulation, on which the same
`Hub` and `Weights` stand. The public classes use nothing that is not in a protocol here, in
`runtime.worker.calling.CallersHandle`, or in `runtime.worker.registering.CallersWorker`.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any, Protocol, TypeVar

from tensorhub.runtime.ending import Parting
from tensorhub.runtime.loop_thread import CallerMode, Job, Watching
from tensorhub.runtime.worker.calling import CallersHandle
from tensorhub.types import FetchReport, Selector, VersionInfo

T = TypeVar("T")


class HostCopiesPort(Protocol):
    """A worker's copies in host memory, as its callers use them."""

    async def prefetch(self, handle: CallersHandle, selector: Selector, timeout_s: float) -> FetchReport: ...

    async def close(self, handle: CallersHandle, timeout_s: float, *, abandon: bool) -> None:
        """Close a handle with the host copies that end with it."""

    async def seed(self, info: VersionInfo, shard: int, timeout_s: float) -> FetchReport: ...


class ThreadPort(Protocol):
    """Where calls run. See `loop_thread.LoopThread`."""

    @property
    def mode(self) -> CallerMode: ...

    def check_usable(self) -> None: ...

    async def call(
        self, function: Callable[..., Awaitable[T]], *arguments: Any, undo: Callable[[T], object] | None = None
    ) -> T: ...

    def job(self, function: Callable[..., Awaitable[T]], *arguments: Any) -> Job[T]: ...

    async def run_job(self, job: Job[T]) -> T: ...

    def post(self, callback: Callable[[], None]) -> bool: ...

    def tell_end(self, watching: Watching) -> None: ...

    def end_soon(self, parting: Parting) -> None: ...

    def dropped(self) -> None: ...

    async def ended(self) -> None: ...
