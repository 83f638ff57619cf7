"""A registration of somebody's own tensors in a simulated cluster.

The simulated handle, with three things added: its cells are real bytes (`tensors`), its calls can be awaited, and their
reports are made. What the calls of `tensorhub.Weights` do with it is in `callers`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

import anyio

from tensorhub.errors import StateError, TensorHubError
from tensorhub.manifest import Manifest
from tensorhub.memory.tensors import Memory
from tensorhub.messages import Publish
from tensorhub.testing.drivers.tensors import TensorCells
from tensorhub.testing.sim.handle import CallRecord
from tensorhub.testing.sim.judges.ports import JudgedCall
from tensorhub.testing.sim.memory import written
from tensorhub.testing.sim.pulling import SimLane
from tensorhub.testing.sim.worker import SimHandle
from tensorhub.types import FetchReport, SourceReport, VersionInfo
from tensorhub.worker.calls import (
    Action,
    Call,
    CopyLocally,
    Finish,
    OpenGeneration,
    RegistrationConfirmed,
    RegistrationFailed,
    Say,
    StartPull,
)
from tensorhub.worker.registration_session import Shard

if TYPE_CHECKING:
    from tensorhub.testing.drivers.hosted import HostedCluster, HostedWorker


class TensorHandle(SimHandle):
    """`memory` None: it is host memory, of which nobody sees the bytes."""

    def __init__(self, cluster: HostedCluster, worker: HostedWorker, shard: Shard, memory: Memory | None) -> None:
        super().__init__(cluster, worker, shard)
        self.hosted = cluster
        self.memory = memory
        self.answered = anyio.Event()  # the coordinator has taken it, or refused it
        self.call_ended: Callable[[], None] = lambda: None
        self.hook: Callable[[VersionInfo], None] | None = None
        self.lanes: list[tuple[SimLane, float]] = []  # of the last fill, and when each began
        self.lane_ends: dict[SimLane, float] = {}
        self.pulled_from: float | None = None
        self._ended: dict[CallRecord, anyio.Event] = {}
        self._cells_of_tensors: TensorCells | None = None
        if shard.manifest is not None:
            self._lay_out(shard.manifest)

    # -- memory

    def _lay_out(self, manifest: Manifest) -> None:
        if self.memory is None:
            if len(self.cells) != manifest.chunk_count:
                self.cells = written("host", manifest.chunk_count)
        elif self._cells_of_tensors is None or self._cells_of_tensors.manifest.manifest_id != manifest.manifest_id:
            self.cells = self._cells_of_tensors = TensorCells(self.memory, manifest)
            self.unwanted = self._cells_of_tensors.unwanted

    def half_fill(self, kept: Collection[int]) -> None:
        """The bytes stay as they are until others arrive."""
        if self._cells_of_tensors is None:
            super().half_fill(kept)

    def was_written(self, chunk: int) -> bool:
        return self._cells_of_tensors is not None and self._cells_of_tensors.was_written(chunk)

    def written_tensors(self) -> list[str]:
        cells = self._cells_of_tensors
        if cells is None:
            return []
        chunks = [chunk for chunk in range(len(cells)) if cells.was_written(chunk)]
        return list(dict.fromkeys(name for chunk in chunks for name in cells.manifest.tensors_in(chunk)))

    # -- what its shell does

    def _do(self, action: Action) -> None:
        match action:
            case Say() if isinstance(action.message, Publish) and self._cells_of_tensors is not None:
                self._cells_of_tensors.look()
            case OpenGeneration(complete=False) | Finish(changed=True) if self.memory is not None:
                self.memory.count_write()
            case StartPull() | CopyLocally():
                self.pulled_from = self.hosted.now
                if not action.staged and not self._could_lay_out(action.manifest):
                    return
                if isinstance(action, StartPull) and self.unwanted:
                    action = replace(action, copied=action.copied | self.unwanted)
            case _:
                pass
        super()._do(action)
        if isinstance(action, RegistrationConfirmed | RegistrationFailed):
            self.answered.set()

    def _could_lay_out(self, manifest: Manifest) -> bool:
        try:
            self._lay_out(manifest)
        except TensorHubError as error:
            self.apply(self.member.pull_failed(error, self.hosted.now))
            return False
        return True

    def before_write_returned(self, problem: Exception | None) -> None:
        """The caller's own code is over."""
        if self.hooks and self.worker.alive:
            if problem is not None:
                self.hosted.expect_error(problem)
            self.hosted.sync()
            self.hook_error = problem
            self.hook_returns()
            self.hook_error = None

    def lane_begins(self, lane: SimLane) -> None:
        """For the report."""
        self.lanes.append((lane, self.hosted.now))

    def ends(self, record: CallRecord) -> None:
        """A call has returned, or raised."""
        event = self._ended.pop(record, None)
        if event is not None:
            event.set()
        self.call_ended()

    # -- its caller waits

    async def run(self, call: Call, timeout_s: float) -> CallRecord:
        """Begin a call and wait for its end; cancelling ends it as soon as may be, and leaves nothing running."""
        return await self.end_of(self.call(call, timeout_s))

    def call(self, call: Call, timeout_s: float = 60.0) -> CallRecord:
        record = super().call(call, timeout_s)
        self.lanes, self.lane_ends, self.pulled_from = [], {}, None
        return record

    async def end_of(self, record: CallRecord) -> CallRecord:
        """Wait for the end of a call, as `run`; raises what it raised."""
        try:
            await self._wait(record)
        except anyio.get_cancelled_exc_class():
            with anyio.CancelScope(shield=True):
                await self._end(record, self.interpreter.cancelled)
            raise
        if record.error is not None:
            raise record.error
        return record

    async def _wait(self, record: CallRecord) -> None:
        while not record.done:
            self.hosted.check_running(self.worker)
            event = self._ended.setdefault(record, anyio.Event())
            await event.wait()

    async def end_call(self, error: Exception) -> None:
        """End the running call, if there is one, with `error`."""
        if self.last_call is not None:
            await self._end(self.last_call, partial(self.member.cancel, error))

    async def _end(self, record: CallRecord, cancel: Callable[[float], list[Action]]) -> None:
        if not record.done and self.worker.alive and not self.hosted.is_over:
            self.hosted.sync()
            self.apply(cancel(self.hosted.now))
            with contextlib.suppress(StateError):  # it has crashed meanwhile
                await self._wait(record)

    def let_callers_go(self) -> None:
        """No call will end any more."""
        for event in self._ended.values():
            event.set()
        self._ended.clear()
        self.answered.set()

    def report_of(self, record: JudgedCall) -> FetchReport:
        """What a fill took. Copies and digests take no virtual time."""
        assert record.version is not None
        now, number = self.hosted.now, record.version.version
        seconds = now - record.began
        if self.pulled_from is None:
            return FetchReport(number, record.changed, seconds=seconds, phases={"resolve": seconds})
        pulled = max((self.lane_ends.get(lane, now) for lane, _ in self.lanes), default=self.pulled_from)
        phases = dict.fromkeys(("resolve", "wait", "transfer", "verify", "unpack", "commit"), 0.0)
        phases["resolve"] = self.pulled_from - record.began
        phases["transfer"] = pulled - self.pulled_from
        phases["commit"] = now - pulled
        if self.pull is None:
            return FetchReport(number, record.changed, seconds=seconds, phases=phases)
        books = self.pull.books
        return FetchReport(
            number,
            record.changed,
            books.bytes_read,
            seconds,
            phases,
            tuple(
                SourceReport(
                    lane.grant.source,
                    "tcp",
                    books.source_bytes(lane.lease),
                    self.lane_ends.get(lane, now) - began,
                    lane.failure if lane.failure and not lane.is_cut else "used",
                )
                for lane, began in self.lanes
                if lane.reading is self.pull
            ),
            books.retries,
            books.reread_bytes,
        )
