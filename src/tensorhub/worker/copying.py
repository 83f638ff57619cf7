"""A host copy that is made from another registration of the same worker (R5). No other worker takes part in it."""

from __future__ import annotations

from tensorhub.errors import StateError, TensorHubError
from tensorhub.machine import InvariantBroken
from tensorhub.types import HandleState
from tensorhub.worker.active_call import ActiveCall
from tensorhub.worker.calls import CopyCall, CopyLocally, StopPull
from tensorhub.worker.member_context import MemberContext
from tensorhub.worker.member_memory import Content, MemberMemory
from tensorhub.worker.states import COPY_TABLE, Phase


class Copying(ActiveCall[CopyCall]):
    """What is held in the end is said to the coordinator, and counts."""

    machine, table, what = "copy", COPY_TABLE, "copy"
    alone = True

    def __init__(self, call: CopyCall, context: MemberContext, memory: MemberMemory, timeout_s: float) -> None:
        super().__init__(call, context, memory, timeout_s)
        self._generation = 0  # under which it is filled

    def check_allowed(self) -> None:
        super().check_allowed()
        if self._memory.state is not HandleState.EMPTY:
            raise StateError(f"{self._context.title} is {self._memory.state.value}: it is not empty")

    def start(self) -> None:
        version, manifest = self._call.version, self._call.manifest
        self._generation = self._context.new_generation()
        self._memory.fill(Content(version, manifest, self._generation))
        self.enter(Phase.COPYING)
        self._context.act(CopyLocally(version, manifest, self._generation, (self._call.source,), last=True))

    def copied(self, chunks: frozenset[int], root: bytes) -> None:
        if self.phase is not Phase.COPYING:
            return
        if len(chunks) == self._call.manifest.chunk_count:
            assert self._memory.content is not None
            self._memory.content.root = root  # the coordinator compares it, as with a vote
            self._memory.filled()
            self._memory.restate()
            self.finish(version=self._call.version, changed=True)
        else:
            text = f"{self._context.title}: version {self._call.version.version} was given up here while it was copied"
            self._torn(StateError(text, retryable=True))

    def pull_failed(self, error: TensorHubError) -> None:
        if self.phase is Phase.COPYING:
            self._torn(error)

    def pull_stopped(self) -> None:
        if self.phase is Phase.STOPPING:
            self._torn(self.error)

    def _torn(self, error: Exception | None) -> None:
        self._memory.tear()
        self.finish(error=error)

    def _give_up(self, error: Exception) -> None:
        match self.phase:
            case Phase.COPYING:
                self.error = error
                self.enter(Phase.STOPPING)
                self._context.act(StopPull())
            case Phase.STOPPING:
                pass
            case _:
                raise InvariantBroken(f"{self} is in no phase of a copy. Story:\n{self._memory.story}")
