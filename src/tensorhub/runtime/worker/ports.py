"""What the public classes need of the library's other side: host copies, and a thread to call.

`runtime.worker.host_copies` and `runtime.loop_thread` implement these. So does a simulation, which
runs the public `Hub` and `Weights`. The public classes use only the classes here, in
`runtime.worker.calling.CallersHandle` and `runtime.worker.registering.CallersWorker`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

from tensorhub.archives.catalogue import Version
from tensorhub.archives.retention import Keep
from tensorhub.errors import TensorHubError
from tensorhub.messages import ErrorInfo
from tensorhub.runtime.ending import Parting
from tensorhub.runtime.loop_thread import CallerMode, Job, Watching
from tensorhub.runtime.worker.calling import CallersHandle
from tensorhub.types import LATEST, FetchReport, Selector, VersionInfo
from tensorhub.worker.host_copies import HostCopies
from tensorhub.worker.procedures import Steps

T = TypeVar("T")


class CallersCopies(ABC):
    """A worker's copies in host memory, as its callers use them."""

    machine: HostCopies
    # told of seeds that are being filled: model, shard, bytes verified, bytes wanted; it must
    # return at once
    on_seeding: Callable[[str, int, int, int], None] | None = None

    @abstractmethod
    async def _ask(self, steps: Steps[Any]) -> FetchReport | None:
        """Wait for the answer to a request; cancelling ends the request as soon as may be, and
        leaves nothing running.
        """

    async def prefetch(
        self, handle: CallersHandle, selector: Selector, timeout_s: float
    ) -> FetchReport:
        return await self._fill(self.machine.prefetch(handle.member, selector, timeout_s))

    async def refuse(self, handle: CallersHandle, error: TensorHubError, timeout_s: float) -> None:
        """This rank will not make its next prefetch, because of that."""
        info = ErrorInfo.of(error)
        await self._ask(self.machine.refuse(handle.member, info, timeout_s))

    async def seed(
        self, info: VersionInfo, shard: int, timeout_s: float, selector: Selector = LATEST
    ) -> FetchReport:
        return await self._fill(self.machine.seed(info, shard, timeout_s, selector))

    async def close(self, handle: CallersHandle, timeout_s: float, *, abandon: bool) -> None:
        """Close a handle with the host copies that end with it."""
        await self._ask(self.machine.close(handle.member, timeout_s, abandon=abandon))

    async def _fill(self, steps: Steps[FetchReport | None]) -> FetchReport:
        report = await self._ask(steps)
        assert report is not None
        return report


@dataclass(frozen=True, slots=True)
class ArchiveSettings:
    """`every`: versions with numbers that it divides are archived. `keep` None: all stay.
    `restores`: versions of a former cluster become this one's. `takes_over`: also from an archiver
    that is connected.
    """

    model: str
    url: str
    every: int = 1
    keep: Keep | None = None
    restores: bool = False
    takes_over: bool = False


class CallersArchiver(ABC):
    """The archive of a model, as its callers use it."""

    # told of a version that is being written: its number, bytes done, bytes in all; by the thread
    # that writes
    on_writing: Callable[[int, int, int], None] | None = None

    @property
    @abstractmethod
    def versions(self) -> list[Version]:
        """What the archive has, ascending. For any thread."""

    @abstractmethod
    async def wait_for(self, at_least: int, timeout_s: float) -> None:
        """Return once a version from `at_least` on is archived. OperationTimeout; raises what has
        ended the archiver.
        """

    @abstractmethod
    def end(self) -> None:
        """End soon: the version that is being written is given up, the archive is left to the next
        archiver, and its copies leave.
        """

    @abstractmethod
    async def close(self, timeout_s: float) -> None:
        """End. Raises what ended the archiver before."""


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
