"""What the parts of one simulated handle, and its worker's host copies, need of it, of its worker
and of their world.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Container, Iterator
from typing import Any, Protocol

from tensorhub.layouts.reading import Selection
from tensorhub.messages import FromWorker
from tensorhub.model.manifest import Manifest
from tensorhub.testing.sim.judges.guarantees import Guarantees
from tensorhub.testing.sim.judges.ports import JudgedCall, JudgedHandle, JudgedWorker, JudgedWorld
from tensorhub.testing.sim.judges.verified import VerifiedChunks
from tensorhub.types import FetchReport, RegistrationId
from tensorhub.worker.calls import Action, Call, Fence
from tensorhub.worker.interpreter import Interpreter
from tensorhub.worker.local_copies import LocalCopies
from tensorhub.worker.registration_session import Shard
from tensorhub.worker.router import Router


class SimWorkerPort(JudgedWorker, Protocol):
    """A worker process."""

    host_bytes: int
    manifests: dict[str, Manifest]
    found_copies: LocalCopies
    selections: dict[str, Selection]  # that its readers have said, by their ids

    @property
    def cluster(self) -> WorldPort: ...

    @property
    def router(self) -> Router[Any]: ...

    def say(self, message: FromWorker) -> None:
        """Tell the coordinator; without a connection it is not said."""

    def take(self, shard: Shard) -> object:
        """What registers that memory, of any kind."""

    def drop(self, handle: HandlePort) -> None:
        """Forget a handle that is no more."""


class HandlePort(JudgedHandle, Protocol):
    """One registration."""

    staging_id: RegistrationId
    interpreter: Interpreter
    grid: Manifest | None  # of which its cells are the chunks, once it is known

    @property
    def worker(self) -> SimWorkerPort: ...

    def call(self, call: Call, timeout_s: float = 60.0) -> JudgedCall:
        """Begin a call; raises StateError where the handle's state forbids it."""

    def cancel(self) -> None:
        """The caller does not want its running call any more."""

    def report_of(self, record: JudgedCall) -> FetchReport:
        """What a fill took."""

    def apply(self, actions: list[Action]) -> None:
        """Queue what the member wants done."""

    def do_next(self) -> None:
        """Carry out the next action, or a part of it."""

    def cell_in(self, selection: str, chunk: int) -> str:
        """What that chunk of a selection holds, or ("") of its own grid."""

    def take_staging(self, nbytes: int) -> None:
        """Take memory for a staged fill, which has room."""

    def lay_out(self, manifest: Manifest) -> None:
        """From now on its cells are that manifest's chunks."""

    def half_fill(self, kept: Collection[int]) -> None:
        """From now on its memory is no version's any more, but for these chunks."""

    def shut_readers(self, accesses: Container[int]) -> None:
        """Shut out the lanes of these accesses."""

    def give_up(self) -> None:
        """This registration is given up: it ends once no reader reads it."""


class Driver(Protocol):
    """Decides when the shells of handles and workers go on, and hears what they have done."""

    fence_grace_s: float  # for so long a fence lets running sends go on

    def note(self, line: str) -> None:
        """Something happened that a trace shows."""

    def took(self, path: str) -> None:
        """A way of recovery was taken."""

    def handle_moved(self, handle: HandlePort) -> None:
        """Its member has had an input: there may be something to do, and another deadline."""

    def fence_begun(self, handle: HandlePort, fence: Fence) -> None:
        """It is tried from now on."""

    def access_ended(self, handle: HandlePort) -> None:
        """A fence may stand now."""

    def clock_changed(self, worker: SimWorkerPort) -> None:
        """Its clock has jumped, or stands still: what waits for it waits anew."""

    def wake_at(
        self, due: float | None, machine: object, worker: SimWorkerPort, tick: Callable[[], None]
    ) -> None:
        """Have that machine's `tick` called when it is due, unless it is due at another time by
        then.
        """


class WorldPort(JudgedWorld, Driver, Protocol):
    """Their world."""

    numbers: Iterator[int]
    registrations: Iterator[int]
    chunks: int
    manifest: Manifest
    guarantees: Guarantees
    verified: VerifiedChunks

    def kind_of(self, registration: str) -> str:
        """The kind of memory a worker copies from: of its own registrations, or staged for one."""
