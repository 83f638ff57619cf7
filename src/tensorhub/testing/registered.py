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
from tensorhub.testing.handle import Asked, Handle
from tensorhub.testing.memory import written
from tensorhub.testing.pulling import Lane
from tensorhub.testing.tensors import TensorCells
from tensorhub.types import FetchReport, SourceReport, VersionInfo
from tensorhub.worker.calls import (
    Action,
    Call,
    CopyLocally,
    Finish,
    OpenMemory,
    Registered,
    RegistrationFailed,
    Say,
    StartPull,
)
from tensorhub.worker.enrolment import Shard

if TYPE_CHECKING:
    from tensorhub.testing.embedded import EmbeddedCluster, EmbeddedWorker


class EmbeddedHandle(Handle):
    """`memory` None: it is host memory, of which nobody sees the bytes."""

    def __init__(self, cluster: EmbeddedCluster, worker: EmbeddedWorker, shard: Shard, memory: Memory | None) -> None:
        super().__init__(cluster, worker, shard)
        self.embedded = cluster
        self.memory = memory
        self.answered = anyio.Event()  # the coordinator has taken it, or refused it
        self.call_ended: Callable[[], None] = lambda: None
        self.hook: Callable[[VersionInfo], None] | None = None
        self.lanes: list[tuple[Lane, float]] = []  # of the last fill, and when each began
        self.lane_ends: dict[Lane, float] = {}
        self.pulled_from: float | None = None
        self._ended: dict[Asked, anyio.Event] = {}
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
            case OpenMemory(complete=False) | Finish(changed=True) if self.memory is not None:
                self.memory.count_write()
            case StartPull() | CopyLocally():
                self.pulled_from = self.embedded.now
                if not action.staged and not self._could_lay_out(action.manifest):
                    return
                if isinstance(action, StartPull) and self.unwanted:
                    action = replace(action, copied=action.copied | self.unwanted)
            case _:
                pass
        super()._do(action)
        if isinstance(action, Registered | RegistrationFailed):
            self.answered.set()

    def _could_lay_out(self, manifest: Manifest) -> bool:
        try:
            self._lay_out(manifest)
        except TensorHubError as error:
            self.apply(self.member.pull_failed(error, self.embedded.now))
            return False
        return True

    def before_write_returned(self, problem: Exception | None) -> None:
        """The caller's own code is over."""
        if self.hooks and self.worker.alive:
            if problem is not None:
                self.embedded.expect_error(problem)
            self.embedded.sync()
            self.hook_error = problem
            self.hook_returns()
            self.hook_error = None

    def lane_begins(self, lane: Lane) -> None:
        """For the report."""
        self.lanes.append((lane, self.embedded.now))

    def ends(self, asked: Asked) -> None:
        """A call has returned, or raised."""
        event = self._ended.pop(asked, None)
        if event is not None:
            event.set()
        self.call_ended()

    # -- its caller waits

    async def run(self, call: Call, timeout_s: float) -> Asked:
        """Begin a call and wait for its end; cancelling ends it as soon as may be, and leaves nothing running."""
        return await self.end_of(self.call(call, timeout_s))

    def call(self, call: Call, timeout_s: float = 60.0) -> Asked:
        asked = super().call(call, timeout_s)
        self.lanes, self.lane_ends, self.pulled_from = [], {}, None
        return asked

    async def end_of(self, asked: Asked) -> Asked:
        """Wait for the end of a call, as `run`; raises what it raised."""
        try:
            await self._wait(asked)
        except anyio.get_cancelled_exc_class():
            with anyio.CancelScope(shield=True):
                await self._end(asked, self.interpreter.cancelled)
            raise
        if asked.error is not None:
            raise asked.error
        return asked

    async def _wait(self, asked: Asked) -> None:
        while not asked.done:
            self.embedded.check_running(self.worker)
            event = self._ended.setdefault(asked, anyio.Event())
            await event.wait()

    async def end_call(self, error: Exception) -> None:
        """End the running call, if there is one, with `error`."""
        if self.asked is not None:
            await self._end(self.asked, partial(self.member.cancel, error))

    async def _end(self, asked: Asked, cancel: Callable[[float], list[Action]]) -> None:
        if not asked.done and self.worker.alive and not self.embedded.is_over:
            self.embedded.sync()
            self.apply(cancel(self.embedded.now))
            with contextlib.suppress(StateError):  # it has crashed meanwhile
                await self._wait(asked)

    def let_callers_go(self) -> None:
        """No call will end any more."""
        for event in self._ended.values():
            event.set()
        self._ended.clear()
        self.answered.set()

    def report_of(self, asked: Asked) -> FetchReport:
        """What a fill took. Copies and digests take no virtual time."""
        assert asked.version is not None
        now, number = self.embedded.now, asked.version.version
        seconds = now - asked.began
        if self.pulled_from is None:
            return FetchReport(number, asked.changed, seconds=seconds, phases={"resolve": seconds})
        pulled = max((self.lane_ends.get(lane, now) for lane, _ in self.lanes), default=self.pulled_from)
        phases = dict.fromkeys(("resolve", "wait", "transfer", "verify", "unpack", "commit"), 0.0)
        phases["resolve"] = self.pulled_from - asked.began
        phases["transfer"] = pulled - self.pulled_from
        phases["commit"] = now - pulled
        if self.pull is None:
            return FetchReport(number, asked.changed, seconds=seconds, phases=phases)
        books = self.pull.books
        return FetchReport(
            number,
            asked.changed,
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
