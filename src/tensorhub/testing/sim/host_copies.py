"""The shell of a simulated worker's host copies: carries out what the real machine wants, on
simulated handles.

As `runtime.worker.host_copies`, without tasks: a call's end is told when its handle comes to it.
Decides nothing.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, assert_never

from tensorhub.errors import StateError, TensorHubError
from tensorhub.messages import CopyRefused, DropCopy, GetManifest, MakeCopy, ManifestReply, Refused
from tensorhub.runtime.worker.coordinator_client import Answer
from tensorhub.testing.sim.judges.ports import JudgedCall
from tensorhub.testing.sim.judges.rooms import Rooms
from tensorhub.testing.sim.ports import HandlePort, SimWorkerPort
from tensorhub.types import LATEST, FetchReport, Purpose, Selector, VersionInfo
from tensorhub.worker.calls import FillCall, Finish, Say
from tensorhub.worker.host_copies import HostCopies
from tensorhub.worker.host_copy_actions import (
    AskManifest,
    BeginCall,
    CancelCall,
    CopyAction,
    DropHandle,
    FinishRequest,
    LogEvent,
    StartHandle,
    Unload,
)
from tensorhub.worker.procedures import Steps
from tensorhub.worker.registration_session import Shard


@dataclass(eq=False)
class CopyRequest:
    """A request to a worker's host copies, and how it ended."""

    request: int
    of: HandlePort | None = None  # the handle that it is about
    room: tuple[str, Purpose, int] | None = None  # that it is about
    done: bool = False
    report: FetchReport | None = None
    error: Exception | None = None
    # called when it has ended, or never will
    on_end: list[Callable[[], None]] = field(default_factory=list)

    def has_ended(self) -> bool:
        return self.done

    @property
    def handle(self) -> HandlePort:
        assert self.of is not None
        return self.of

    @property
    def changed(self) -> bool:
        return self.report is not None and self.report.changed

    @property
    def number(self) -> int:
        """The version that a prefetch ended with; raises what it raised."""
        assert self.done, "it has not ended"
        if self.error is not None:
            raise self.error
        assert self.report is not None
        return self.report.version


class SimHostCopies:
    """Those of one worker."""

    def __init__(self, worker: SimWorkerPort, op_timeout_s: float) -> None:
        self.worker = worker
        self._cluster = cluster = worker.cluster
        self.machine = HostCopies(
            worker.host_bytes, op_timeout_s, lambda: f"r{next(cluster.registrations)}h"
        )
        self._calls: dict[JudgedCall, int] = {}  # that run, and their numbers
        self._coordinator: dict[int, AskManifest] = {}  # by request
        self.wanted: dict[int, CopyRequest] = {}  # that has not ended, by request
        self._todo: deque[CopyAction] = deque()
        self._is_busy = False
        # that copies, and staged updates, have in truth, by their id
        self.memory: dict[str, int] = {}
        self._rooms = Rooms(worker.name, worker.host_bytes)
        self.on_unload: Callable[[Unload], None]
        self.cannot_allocate: Callable[[], bool] = lambda: False  # just now

    # -- what is asked for

    def prefetch(self, handle: HandlePort, selector: Selector, timeout_s: float) -> CopyRequest:
        return self.want(self.machine.prefetch(handle.member, selector, timeout_s), handle)

    def seed(
        self, info: VersionInfo, shard: int, timeout_s: float, selector: Selector = LATEST
    ) -> CopyRequest:
        return self.want(self.machine.seed(info, shard, timeout_s, selector))

    def close(self, handle: HandlePort, timeout_s: float, *, abandon: bool) -> CopyRequest:
        return self.want(self.machine.close(handle.member, timeout_s, abandon=abandon), handle)

    def make_room(self, ident: str, purpose: Purpose, nbytes: int) -> CopyRequest:
        wanted = self.want(self.machine.make_room(ident, purpose, nbytes))
        wanted.room = ident, purpose, nbytes
        if wanted.done and wanted.error is None:
            self._rooms.given(*wanted.room)
        return wanted

    def want(self, steps: Steps[Any], handle: HandlePort | None = None) -> CopyRequest:
        wanted = CopyRequest(next(self._cluster.numbers), handle)
        self.wanted[wanted.request] = wanted
        self._apply(self.machine.begin(steps, self.worker.now, wanted.request))
        return wanted

    def cancel(self, wanted: CopyRequest) -> None:
        """The caller has given the request up."""
        self._apply(self.machine.cancel(wanted.request, self.worker.now))

    # -- what is heard of

    def ended(self, handle: HandlePort) -> None:
        """It is no more, and nor is its memory."""
        for ident in (handle.id, handle.staging_id):
            self.free(ident)
        self._apply(self.machine.ended(handle.shard.registration, self.worker.now))

    def call_ended(self, handle: HandlePort, record: JudgedCall) -> None:
        number = self._calls.pop(record, None)
        if number is not None:
            report, error = None, record.error
            try:
                handle.interpreter.raise_for(
                    record.what, Finish(record.version, record.changed, error)
                )
            except Exception as raised:
                error = raised
            if error is None and record.version is not None:
                report = handle.report_of(record)
            self._call_ended(number, handle.id, report, error)

    def _call_ended(
        self, number: int, ident: str, report: FetchReport | None, error: Exception | None
    ) -> None:
        """A fill that has taken no memory leaves its room."""
        if not self.memory.get(ident):
            self._rooms.given_back(ident)
        self._apply(self.machine.call_ended(number, self.worker.now, result=report, error=error))

    def end_prefetch(self, handle: HandlePort, *, frees: bool) -> None:
        self._apply(
            self.machine.end_prefetch(handle.shard.registration, self.worker.now, frees=frees)
        )

    def take(self, ident: str, nbytes: int, purpose: Purpose | None = None) -> None:
        """Memory is taken; StateError: there is no room. `purpose`: of one that was not reserved,
        or is of another size.
        """
        if purpose is not None and self.memory.get(ident) != nbytes:
            self.memory.pop(ident, None)
            self.machine.take(ident, purpose, nbytes)
            self._rooms.given(ident, purpose, nbytes)
            if self.cannot_allocate():
                raise StateError(f"{nbytes} bytes of host memory cannot be allocated: free some")
        self.memory[ident] = nbytes
        is_reserved = self.machine.budget.reservation(ident) is not None
        self._rooms.taken(ident, self.memory, is_reserved=is_reserved)

    def free(self, ident: str) -> None:
        """Memory is given back."""
        self.memory.pop(ident, None)
        self._rooms.given_back(ident)
        self._apply(self.machine.freed(ident, self.worker.now))

    def unloaded(self, ident: str) -> None:
        """What was loaded of an archived version was given back."""
        self.memory.pop(ident, None)
        self._rooms.given_back(ident)
        self._apply(self.machine.unloaded(ident, self.worker.now))

    def ordered(self, order: MakeCopy) -> None:
        self._rooms.ordered(order.copy)
        self._apply(self.machine.ordered(order, self.worker.now))

    def dropped(self, order: DropCopy) -> None:
        self._apply(self.machine.dropped(order, self.worker.now))

    def heard(self, message: Answer) -> None:
        """An answer of the coordinator, perhaps to a question of these copies."""
        question = self._coordinator.pop(message.request, None)
        encoded = message.manifest if isinstance(message, ManifestReply) else None
        error = message.error.error() if isinstance(message, Refused) else None
        if question is not None:
            self._apply(
                self.machine.call_ended(
                    question.number, self.worker.now, result=encoded, error=error
                )
            )

    def connected(self) -> None:
        """What the last session has not answered is asked again."""
        questions = list(self._coordinator.values())
        self._coordinator.clear()
        for question in questions:
            self._ask(question)

    def tick(self) -> None:
        """Time has passed."""
        due = self.machine.next_deadline()
        if due is not None and due <= self.worker.now:
            self._apply(self.machine.tick(self.worker.now))

    # -- what is to be done

    def _apply(self, actions: list[CopyAction]) -> None:
        self._todo.extend(actions)
        if self._is_busy:
            return
        self._is_busy = True
        try:
            while self._todo and self.worker.alive:
                self._do(self._todo.popleft())
        finally:
            self._is_busy = False
        if self.worker.alive:
            self.machine.check_invariants()
            self._cluster.wake_at(self.machine.next_deadline(), self, self.worker, self.tick)

    def _do(self, action: CopyAction) -> None:
        worker, now = self.worker, self.worker.now
        match action:
            case Say():
                if isinstance(action.message, CopyRefused):
                    self._rooms.refused(action.message.copy)
                worker.say(action.message)
            case StartHandle():
                if action.shard.purpose is Purpose.RETENTION:
                    self._has_room(action.shard)
                worker.take(action.shard)
            case DropHandle():
                handle = self._handle(action.registration)
                if handle is not None:
                    handle.give_up()
            case BeginCall():
                self._begin(action)
            case CancelCall():
                if action.number in self._calls.values():
                    handle = self._handle(action.registration)
                    assert handle is not None
                    handle.apply(handle.member.cancel(action.error, now))
            case AskManifest():
                self._ask(action)
            case Unload():
                self.on_unload(action)
            case LogEvent():
                if action.event == "copy_evicted":
                    purpose = next(p for p in Purpose if action.reason.endswith(f" {p.value}"))
                    self._rooms.evicted(action.registration, purpose, int(action.reason.split()[0]))
                self._cluster.note(
                    f"{worker.name}: {action.event} {action.registration}: {action.reason}"
                )
                self._cluster.took(action.event.replace("_", " "))
            case FinishRequest():
                wanted = self.wanted.pop(action.request)
                wanted.done, wanted.report, wanted.error = True, action.report, action.error
                if wanted.room is not None and action.error is None:
                    self._rooms.given(*wanted.room)
                for tell in wanted.on_end:
                    tell()
            case _:
                assert_never(action)

    def _handle(self, registration: str) -> HandlePort | None:
        return self.worker.router.handles.get(registration)

    def _begin(self, action: BeginCall) -> None:
        handle = self._handle(action.registration)
        error: TensorHubError = StateError("it was given up; register again")
        if handle is not None:
            if isinstance(action.call, FillCall) and handle.shard.purpose is not Purpose.USE:
                self._has_room(handle.shard)
            try:
                handle.interpreter.check(action.call)
                record = handle.call(action.call, action.timeout_s)
            except TensorHubError as raised:
                error = raised
            else:
                self._calls[record] = action.number
                if record.done:
                    self.call_ended(handle, record)
                return
        self._call_ended(action.number, action.registration, None, error)

    def _has_room(self, shard: Shard) -> None:
        if shard.manifest is not None:
            self._rooms.given(shard.registration, shard.purpose, shard.manifest.nbytes)

    def _ask(self, question: AskManifest) -> None:
        request = next(self._cluster.numbers)
        self._coordinator[request] = question
        version = question.version
        self.worker.say(GetManifest(request, version.model, version.content_id, question.shard))
