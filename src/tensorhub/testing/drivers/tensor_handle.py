"""A registration of a caller's own tensors in a simulated cluster: a simulated handle with real
bytes as cells.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import replace

from tensorhub.errors import TensorHubError
from tensorhub.memory.regions import Memory
from tensorhub.messages import Publish
from tensorhub.model.manifest import Manifest
from tensorhub.runtime.data.lanes import PullReport
from tensorhub.runtime.data.source_lane import KINDS
from tensorhub.runtime.reports import CallTimes
from tensorhub.scheduler.pull import Pull
from tensorhub.testing.drivers.tensors import TensorCells
from tensorhub.testing.sim.handle import CallRecord
from tensorhub.testing.sim.judges.ports import JudgedCall
from tensorhub.testing.sim.memory import written
from tensorhub.testing.sim.pulling import SimLane
from tensorhub.testing.sim.worker import SimHandle, SimWorker, WorkerWorld
from tensorhub.types import FetchReport, SourceReport, VersionInfo
from tensorhub.worker.calls import (
    Action,
    Call,
    CallHook,
    CopyLocally,
    Finish,
    OpenGeneration,
    RegistrationConfirmed,
    RegistrationFailed,
    Say,
    StartPull,
)
from tensorhub.worker.registration_session import Shard


class TensorHandle(SimHandle):
    """`memory` None: it is host memory, and no caller sees its bytes. The `on_` functions are its
    caller's.
    """

    def __init__(
        self, cluster: WorkerWorld, worker: SimWorker, shard: Shard, memory: Memory | None
    ) -> None:
        super().__init__(cluster, worker, shard)
        self.memory = memory
        # the coordinator has taken it, or refused it
        self.on_answer: Callable[[], None] = lambda: None
        # its before_write is to run
        self.on_hook: Callable[[VersionInfo], None] = lambda version: None
        self.on_end: Callable[[], None] = lambda: None  # a call has returned, or raised
        self.pulled_from: float | None = None
        self._cells_of_tensors: TensorCells | None = None
        if shard.manifest is not None:
            self._lay_out(shard.manifest)

    def _lay_out(self, manifest: Manifest) -> None:
        if self.memory is None:
            if len(self.cells) != manifest.chunk_count:
                self.cells = written("host", manifest.chunk_count)
        elif (
            self._cells_of_tensors is None
            or self._cells_of_tensors.manifest.manifest_id != manifest.manifest_id
        ):
            self.cells = self._cells_of_tensors = TensorCells(self.memory, manifest)
            self.unwanted = self._cells_of_tensors.unwanted

    def half_fill(self, kept: Collection[int]) -> None:
        """The bytes stay as they are until new bytes arrive."""
        if self._cells_of_tensors is None:
            super().half_fill(kept)

    def was_written(self, chunk: int) -> bool:
        return self._cells_of_tensors is not None and self._cells_of_tensors.was_written(chunk)

    def written_tensors(self) -> list[str]:
        cells = self._cells_of_tensors
        if cells is None:
            return []
        chunks = [chunk for chunk in range(len(cells)) if cells.was_written(chunk)]
        return list(
            dict.fromkeys(name for chunk in chunks for name in cells.manifest.tensors_in(chunk))
        )

    def _do(self, action: Action) -> None:
        match action:
            case Say() if (
                isinstance(action.message, Publish) and self._cells_of_tensors is not None
            ):
                self._cells_of_tensors.look()
            case OpenGeneration(complete=False) | Finish(changed=True) if self.memory is not None:
                self.memory.count_write()
            case StartPull() | CopyLocally():
                self.pulled_from = self.cluster.now
                if not action.staged and not self._could_lay_out(action.manifest):
                    return
                if isinstance(action, StartPull) and self.unwanted:
                    action = replace(action, copied=action.copied | self.unwanted)
            case _:
                pass
        super()._do(action)
        match action:
            case RegistrationConfirmed() | RegistrationFailed():
                self.on_answer()
            case CallHook():
                self.on_hook(action.version)
            case Finish():
                self.on_end()
            case _:
                pass

    def _could_lay_out(self, manifest: Manifest) -> bool:
        try:
            self._lay_out(manifest)
        except TensorHubError as error:
            self.apply(self.member.pull_failed(error, self.worker.now))
            return False
        return True

    def call(self, call: Call, timeout_s: float = 60.0) -> CallRecord:
        record = super().call(call, timeout_s)
        self.pulled_from = None
        return record

    def report_of(self, record: JudgedCall) -> FetchReport:
        """What a fill took. Copies and digests take no virtual time."""
        now, pull, times = self.cluster.now, self.pull, CallTimes()
        if self.pulled_from is not None:
            lanes = (
                [lane for lane in pull.all_lanes if lane.began >= record.began]
                if pull is not None
                else []
            )
            pulled = max((lane.ended_at or now for lane in lanes), default=self.pulled_from)
            times = CallTimes(
                bound=self.pulled_from, pulled_from=self.pulled_from, pulled=pulled, prepared=pulled
            )
            phases = {"wait": 0.0, "transfer": pulled - self.pulled_from, "verify": 0.0}
            sources = tuple(
                self._source(lane, (lane.ended_at or now) - lane.began) for lane in lanes
            )
            times.pull = PullReport.of(
                pull.books if pull is not None else Pull(()), phases, sources
            )
        return times.report_of(Finish(record.version, record.changed), record.began, now)

    @staticmethod
    def _source(lane: SimLane, seconds: float) -> SourceReport:
        outcome = lane.failure if lane.failure and not lane.is_cut else "used"
        shard = lane.grant.shard if lane.grant.selection else None
        return SourceReport(
            lane.grant.source,
            "tcp",
            lane.reading.books.source_bytes(lane.lease),
            seconds,
            outcome,
            shard,
            kind=KINDS[lane.grant.purpose],
        )
