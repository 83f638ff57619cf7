"""What the public classes need of the library's other side: a worker, its host copies, and a thread to call.

`runtime.worker.worker`, `runtime.worker.host_copies` and `runtime.loop_thread` implement these protocols. So does a
simulation, on which the same `Hub` and `Weights` stand. The public classes use nothing that is not in a protocol here, or
in `runtime.worker.calling.CallersHandle`.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any, Protocol, TypeVar

from tensorhub.memory.tensors import Memory
from tensorhub.runtime.ending import Parting
from tensorhub.runtime.loop_thread import CallerMode, Job, Watching
from tensorhub.runtime.worker.calling import CallersHandle
from tensorhub.runtime.worker.coordinator_client import CoordinatorClient
from tensorhub.runtime.worker.fill import ProgressListener
from tensorhub.runtime.worker.pins import Pins
from tensorhub.runtime.worker.version_watches import VersionWatches
from tensorhub.types import FetchReport, Options, Selector, VersionInfo

T = TypeVar("T")


class HostCopiesPort(Protocol):
    """A worker's copies in host memory, as its callers use them."""

    async def prefetch(self, handle: CallersHandle, selector: Selector, timeout_s: float) -> FetchReport: ...

    async def close(self, handle: CallersHandle, timeout_s: float, *, abandon: bool) -> None:
        """Close a handle with the host copies that end with it."""

    async def seed(self, info: VersionInfo, shard: int, timeout_s: float) -> FetchReport: ...


class WorkerPort(Protocol):
    """One worker of one cluster."""

    @property
    def name(self) -> str: ...

    @property
    def options(self) -> Options: ...

    @property
    def read_only(self) -> bool: ...

    @property
    def version_watches(self) -> VersionWatches: ...

    @property
    def coordinator(self) -> CoordinatorClient: ...

    @property
    def pins(self) -> Pins: ...

    @property
    def copies(self) -> HostCopiesPort: ...

    def timeout_s(self, timeout: float | None) -> float:
        """The seconds that a call has: those given, or the default. Raises StateError."""

    async def register(
        self, model: str, memory: Memory, *, group: str | None, rank: int, world_size: int, spot: bool, timeout_s: float
    ) -> CallersHandle: ...

    def drop_handle(self, handle: CallersHandle) -> None:
        """Its caller has not got it."""

    async def fetch(
        self,
        model: str,
        selector: Selector,
        memory: Memory,
        *,
        rank: int,
        timeout_s: float,
        progress: ProgressListener | None,
    ) -> tuple[VersionInfo, FetchReport]: ...


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
