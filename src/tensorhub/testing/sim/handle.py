"""One registration's shell, as `runtime.worker.handle` is: the real member, cells for tensors, and
the actions still to be done.

Responsible for carrying out the member's actions in order, and for the verbs with which a test
calls it. A new action of `worker.calls` gets its case in `HandleShell._do`. Not responsible for
what a fill writes (`filler`), nor for reports of digests (`digests`), nor for when anything
happens.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Container, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Protocol, assert_never

from tensorhub.errors import StateError, TensorHubError
from tensorhub.layouts.reading import Selection
from tensorhub.memory.on_demand import Loader
from tensorhub.messages import Held, Prepared, Publish, Register
from tensorhub.model.accesses import Access
from tensorhub.model.manifest import Manifest
from tensorhub.testing.sim.digests import SimDigests
from tensorhub.testing.sim.filler import SimFiller
from tensorhub.testing.sim.host_copies import CopyRequest, SimHostCopies
from tensorhub.testing.sim.judges.ports import JudgedCall
from tensorhub.testing.sim.layouts import cell_of, is_laid_out_anew, is_of_other_layout
from tensorhub.testing.sim.memory import CHUNK_BYTES, Cells
from tensorhub.testing.sim.ports import SimWorkerPort
from tensorhub.testing.sim.pulling import LaneWorld, Reading, SimLane
from tensorhub.testing.sim.rendering import show
from tensorhub.types import ContentId, FetchReport, HandleState, Medium, Purpose, RegistrationId
from tensorhub.worker import calls
from tensorhub.worker.coverage import check
from tensorhub.worker.fencing import look
from tensorhub.worker.interpreter import Interpreter
from tensorhub.worker.member import Member
from tensorhub.worker.member_memory import Content
from tensorhub.worker.planning import plan
from tensorhub.worker.registration_session import Shard


class BrokenHook(Exception):
    """What a test's before_write raises."""


@dataclass(eq=False)
class CallRecord(JudgedCall):
    """One call of a handle, and how it ended."""

    handle: HandleShell = field(kw_only=True)
    deadline: float = field(kw_only=True)  # by its worker's clock
    # called when it has ended, or never will
    on_end: list[Callable[[], None]] = field(default_factory=list)

    def has_ended(self) -> bool:
        return self.done

    @property
    def number(self) -> int:
        """The version that the call ended with; raises what the call raised."""
        assert self.done, f"{self.what} has not ended"
        if self.error is not None:
            raise self.error
        assert self.version is not None
        return self.version.version


class HandleWorker(SimWorkerPort, Protocol):
    """The worker that has it."""

    copies: SimHostCopies


class Callers:
    """The callers of a world's handles. These look for themselves, and hear nothing."""

    def hook_called(self, handle: HandleShell) -> None:
        """Its before_write runs."""

    def ended(self, handle: HandleShell, record: CallRecord) -> None:
        """A call has returned, or raised."""


class HandleWorld(LaneWorld, Protocol):
    """What it needs of its world."""

    @property
    def users(self) -> Callers: ...

    def call_ended(self, handle: HandleShell, record: CallRecord) -> None:
        """A call has returned, or raised."""


class HandleShell:
    """One registration of a simulated worker."""

    # chunks that its fetch leaves out, or that are not loaded
    unwanted: frozenset[int] = frozenset()
    loader: Loader | None = None  # of an archived version
    digests_known: Sequence[int] | None = None  # the publisher's, of an archived version

    def __init__(self, cluster: HandleWorld, worker: HandleWorker, shard: Shard) -> None:
        self.cluster = cluster
        self.worker = worker
        self.shard = shard
        self.name = (
            f"{worker.name}:{shard.group}[{shard.rank}]"
            if shard.serves
            else f"{worker.name}:{shard.group}"
        )
        self.id = RegistrationId(shard.registration)
        self.layout_id = shard.layout_id or f"world/{shard.world_size}"  # its group's
        self.part = ""  # what its twins, which publish the same, have in common; "": it has none
        self.grid = shard.manifest
        self.cells: Cells = ["unset"] * (
            shard.manifest.chunk_count if shard.manifest is not None else cluster.chunks
        )
        self.hooks: deque[calls.CallHook] = deque()
        self.pull: Reading | None = None  # the last fill's
        self.serving: dict[SimLane, None] = {}  # of others, which read this memory
        # one that no fence can end, and what it read in the cell at first
        self.access: tuple[Access, str] | None = None
        self.fencing_since: float | None = None  # its next action is a fence, which was begun
        self.freed_at = 0.0  # when its own access ended that a fence has waited for, last
        self.last_call: CallRecord | None = None
        self.last_held = ""  # the content id that it held last
        self.generation = 0  # under which its memory is open, or was last
        self.lied = ""  # the content id that it vouches for with bytes of its own
        # what its user does once all is there
        self.before_vote: Callable[[HandleShell], object] | None = None
        # the content id whose bytes here have changed, as it has found out itself
        self.changed = ""
        self.hook_error: Exception | None = None
        self.hook_calls = 0
        self.reads_backwards = False  # the last chunk of a request first
        # see `pulling.LaneEnd`
        self.base: tuple[ContentId, dict[int, str]] | None = None
        self.shadow: tuple[ContentId, Sequence[str]] | None = None
        self.registration_error: Exception | None = None
        self.room: CopyRequest | None = None  # that was asked for, for what is about to be staged
        self.registered = False
        self.member = Member(
            shard,
            requests=partial(worker.router.new_request, shard),
            generations=lambda: next(cluster.numbers),
            manifests=worker.manifests,
            copies=worker.found_copies,
        )
        self.interpreter = Interpreter(self.member, self.written_tensors)
        self.todo = self.interpreter.todo
        self.staging_id = RegistrationId(calls.staging_of(shard.registration))
        self.staging: list[str] | None = None  # the cells of what is staged
        self.filler = SimFiller(cluster, self, lambda: cluster.data.chunks_offered(self))
        self.digests = SimDigests(cluster, self)

    def __repr__(self) -> str:
        return f"<SimHandle {self.name} {self.member.state} v={self.member.version}>"

    @property
    def idle(self) -> bool:
        """Whether no call runs on it, and nothing is left to be done."""
        return self.member.running is None and not self.interpreter.has_more

    def check_invariants(self) -> None:
        """Those of its own machines."""
        self.member.check_invariants()
        if self.pull is not None and not self.pull.is_checked:
            self.pull.books.check_invariants()
            self.pull.is_checked = self.pull.ended

    def shut_readers(self, accesses: Container[int]) -> None:
        """Shut out the lanes of these accesses."""
        for lane in list(self.serving):
            if lane.access is not None and lane.access.number in accesses:
                self.cluster.data.lane_shut(lane)

    @property
    def is_answered(self) -> bool:
        """Whether the coordinator has taken it, or refused it."""
        closed = self.member.state is HandleState.CLOSED
        return (
            self.registered
            or self.registration_error is not None
            or closed
            or not self.shard.serves
        )

    def adopt(self, content: Content, digests: Sequence[int], loader: Loader) -> None:
        """It has this archived content from the beginning, once that is loaded."""
        self.digests_known, self.loader = digests, loader
        self.unwanted = frozenset(range(len(digests)))
        self.apply(self.member.adopt(content, self.worker.now))

    # -- what a user does

    def call(self, call: calls.Call, timeout_s: float = 60.0) -> CallRecord:
        """Begin a call; raises StateError where the handle's state forbids it."""
        cluster = self.cluster
        actions = self.interpreter.begin(call, timeout_s, self.worker.now)
        cluster.note(f"{self.name} calls {show(call)}")
        judged, online = cluster.guarantees.history.begins(self, call), self.worker.link is not None
        deadline = self.worker.now + timeout_s
        times = cluster.now, self.worker.when(deadline), timeout_s
        self.last_call = CallRecord(call, judged, *times, online, handle=self, deadline=deadline)
        self.apply(actions)
        return self.last_call

    def cancel(self, why: str = "cancelled") -> None:
        """The caller does not want its running call any more."""
        self.cluster.note(f"{self.name} cancels")
        self.apply(self.member.cancel(StateError(why), self.worker.now))

    # -- accesses of its own

    def hold_access(self) -> None:
        """One of its own lanes begins to digest (or copy) a chunk; only that lane can end the
        access.
        """
        content = self.member.content
        if self.access is None and content is not None:
            content_id = ContentId(content.version.content_id)
            access = self.worker.owner.begin(
                self.id, content.generation, content_id, [0], CHUNK_BYTES
            )
            if isinstance(access, Access):
                self.cluster.note(f"{self.name} begins an access")
                self.access = access, self.cells[0]

    def end_access(self) -> None:
        """That lane is done."""
        if self.access is not None:
            self.cluster.note(f"{self.name} ends an access")
            (access, was), self.access = self.access, None
            self.worker.owner.end(access)
            if self.fencing_since is not None:
                self.freed_at = self.cluster.now
            self.cluster.guarantees.was_read(self, was)
            self.cluster.access_ended(self)

    def fence_waits_until(self) -> float | None:
        """Until when its next action, a fence, has to wait for an access; None: there is no such
        wait.
        """
        fence = self.todo[0] if self.todo else None
        if (
            not isinstance(fence, calls.Fence)
            or self.fencing_since is None
            or self.worker.owner.is_quiet(self.id)
        ):
            return None
        if self.access is None or self.is_read:
            return None  # readers are cut off
        return self.interpreter.fence_until(fence)

    @property
    def is_read(self) -> bool:
        """Whether an access of a reader's lane runs."""
        return any(lane.access is not None for lane in self.serving)

    def can_do_next(self) -> bool:
        """Whether its next action can be carried out, or gone on with, now."""
        if self.todo and isinstance(self.todo[0], calls.CompareDigests) and self.access is not None:
            return False  # what is wrong may be what is accessed
        until = self.fence_waits_until()
        return self.interpreter.has_more and (until is None or until <= self.worker.now)

    # -- what its shell does

    def apply(self, actions: list[calls.Action]) -> None:
        """Queue what the member wants done. What it has decided is judged now, however late it is
        carried out.
        """
        running, guarantees = self.member.running, self.cluster.guarantees
        if running is not None and self.last_call is not None and running.key is not None:
            self.last_call.key = running.key
        for action in actions:
            match action:
                case calls.Fence():
                    guarantees.fencing(self, action.generation)
                case calls.Say(Register(held=Held(voted=False, content_id=content_id))):
                    guarantees.announced(self, content_id)
                case _:
                    pass
        self.interpreter.add(actions)
        self.cluster.handle_moved(self)

    def do_next(self) -> None:
        """Carry out the next action, or a part of it."""
        action = self.interpreter.next(self.worker.now)
        if isinstance(action, calls.Fence):
            self._fence(action)
        elif isinstance(action, calls.StopPull):
            self._stop_pull(action)
        elif action is not None:
            self._do(action)
        if self.interpreter.is_gone:
            self.worker.drop(self)

    def _stop_pull(self, action: calls.StopPull) -> None:
        if self.pull is not None:
            self.pull.stop()
        if self.pull is not None and not self.pull.ended:
            self.todo.appendleft(action)  # its lanes' ends are waited for
        else:
            self.apply(self.member.pull_stopped(self.worker.now))

    def _make_room(self, nbytes: int) -> None:
        self.room = room = self.worker.copies.make_room(self.staging_id, Purpose.USE, nbytes)

        def ended() -> None:
            if room.done and not self.interpreter.is_given_up:
                assert room.error is None or isinstance(room.error, TensorHubError)
                self.apply(self.member.room_ended(room.error, self.worker.now))

        room.on_end.append(ended)
        ended()

    def give_up(self) -> None:
        """This registration is given up; see `Interpreter.give_up`."""
        self.cluster.note(f"{self.name} is given up")
        self.cluster.guarantees.retained.lost(self)
        self.worker.router.leave(self.shard)
        self.hooks.clear()
        self.fencing_since = None
        for said in self.interpreter.give_up(self.worker.now):
            self.worker.say(said.message)
        self.cluster.handle_moved(self)

    def report_of(self, record: JudgedCall) -> FetchReport:
        """What a fill took."""
        assert record.version is not None
        return FetchReport(record.version.version, record.changed)

    def _do(self, action: calls.Action) -> None:
        owner = self.worker.owner
        match action:
            case calls.Say():
                if isinstance(action.message, Publish):
                    self.cluster.guarantees.contents.promise(
                        action.message.key, self.shard, self.cells
                    )
                record = self.last_call
                if (
                    isinstance(action.message, Prepared)
                    and record is not None
                    and record.key == action.message.key
                ):
                    record.votes = (*record.votes, action.message.key)
                self.worker.say(action.message)
            case calls.OpenGeneration():
                try:
                    self._take_memory(action.manifest)
                    if action.complete and is_of_other_layout(self.grid):
                        self.lay_out(action.manifest)
                except TensorHubError as error:
                    self.interpreter.not_opened(error)
                    return
                content, sizes = (
                    ContentId(action.content_id),
                    [CHUNK_BYTES] * action.manifest.chunk_count,
                )
                tells, grid = (
                    action.complete and action.manifest.digest != "none",
                    action.manifest.grid_id,
                )
                what = self.id, action.generation, content, sizes
                self._keep_base(action, grid)
                owner.open(
                    *what,
                    complete=action.complete,
                    digests=self.digests_known,
                    tells=tells,
                    grid=grid,
                )
                self.interpreter.guard.made()
                self.cluster.verified.holds(self.id, action.content_id)
                self.generation, self.changed = action.generation, ""
            case calls.ReopenGeneration():
                owner.reopen(self.id, action.generation)
                self.generation = action.generation
            case calls.CallHook():
                self.hooks.append(action)
                self.cluster.users.hook_called(self)
            case calls.PlanReading():
                self.apply(self.member.planned(action.number, plan(action), self.worker.now))
            case calls.CheckRanks():
                found = check(action, lambda shares: [b"equal"] * len(shares))
                self.apply(self.member.ranks_checked(action.number, found, self.worker.now))
            case calls.StartPull():
                self.pull = Reading(self, self.filler.begin_pull(action))
                if self.pull.over:
                    self.pull_done(action)
            case calls.CompareDigests():
                self.filler.compare(action)
            case calls.CopyLocally():
                copied = self.filler.copy(action)
                self.apply(self.member.copied(copied, self.worker.now))
            case calls.AddPullSource():
                if self.pull is not None:
                    self.pull.add(action.grant)
            case calls.DropPullSource():
                if self.pull is not None and not self.pull.ended:
                    self.pull.drop(action.lease)
                    self.apply(
                        self.member.source_failed(action.lease, "dropped", "", self.worker.now)
                    )
            case calls.RegistrationConfirmed():
                self.registered = True
            case calls.RegistrationFailed():
                self.registration_error = action.error
            case calls.Finish():
                self._finish(action)
            case calls.EndPrefetch():
                self.worker.copies.end_prefetch(self, frees=action.frees)
            case calls.MakeRoom():
                self._make_room(action.nbytes)
            case calls.CancelRoom():
                if self.room is not None:
                    self.worker.copies.cancel(self.room)
            case calls.FreeStaging():
                owner.close(self.staging_id)
                owner.forget(self.staging_id)
                self.staging = None
                self.worker.copies.free(self.staging_id)
            case calls.FreeMemory():
                owner.forget(self.id)
                self.cluster.verified.forget(self.id)
                self.worker.copies.free(self.id)
            case calls.Fence() | calls.StopPull():
                raise AssertionError("these take time: see do_next")
            case _:
                assert_never(action)

    def _take_memory(self, manifest: Manifest) -> None:
        """Of a host copy. TensorHubError: there is none."""
        if self.shard.medium is Medium.HOST and self.loader is None:
            self.worker.copies.take(self.id, manifest.nbytes, self.shard.purpose)

    def take_staging(self, nbytes: int) -> None:
        """Take memory for a staged fill, which has room."""
        self.worker.copies.take(self.staging_id, nbytes)

    def pull_done(self, start: calls.StartPull) -> None:
        """All that was wanted is there."""
        before_vote, self.before_vote = self.before_vote, None
        if before_vote is not None:
            before_vote(self)
        self.apply(self.member.pull_done(self.worker.now, *self.filler.roots(start)))

    def lay_out(self, manifest: Manifest) -> None:
        """From now on its cells are that manifest's chunks: none of what it has is one of those of
        another grid.
        """
        before, self.grid = self.grid, manifest
        is_anew = (
            is_of_other_layout(manifest) if before is None else is_laid_out_anew(before, manifest)
        )
        if is_anew or len(self.cells) != manifest.chunk_count:
            self.cells = ["half-filled"] * manifest.chunk_count

    def select(self, generation: int, selection: Selection) -> None:
        """A reader says of which of its bytes the next chunks are."""
        chunks = selection.chunks
        self.worker.selections[selection.selection_id] = selection
        sizes = [CHUNK_BYTES] * len(chunks)
        self.worker.owner.select(self.id, generation, selection.selection_id, sizes)

    def cell_in(self, selection: str, chunk: int) -> str:
        """What that chunk of a selection holds, or ("") of its own grid."""
        if not selection:
            return self.cells[chunk]
        return cell_of(
            self.layout_of_cells, self.worker.selections[selection].chunks[chunk], self.cells
        )

    @property
    def layout_of_cells(self) -> Manifest:
        """Of which its cells are the chunks."""
        grid = self.grid if is_of_other_layout(self.grid) else None
        held = self.member.content
        found = grid or (held.manifest if held is not None else self.grid)
        assert found is not None
        return found

    def _keep_base(self, action: calls.OpenGeneration, grid: str) -> None:
        """As `runtime.data.serving` does: what is still here of the content that was fenced."""
        former = self.worker.owner.former(self.id, ContentId(action.content_id), grid)
        is_base = action.keeps_base and former is not None and action.manifest.digest != "none"
        self.base = None
        if is_base and former is not None:
            content_id, _, intact = former
            held = {chunk: cell for chunk, cell in enumerate(self.cells) if intact[chunk]}
            self.base = content_id, held

    def half_fill(self, kept: Collection[int]) -> None:
        """From now on its memory is no version's any more, but for chunks that were copied, or are
        left of a broken fill.
        """
        self.cells = [
            cell if chunk in kept else "half-filled" for chunk, cell in enumerate(self.cells)
        ]

    def was_written(self, chunk: int) -> bool:
        """Whether its own user has written the present cell."""
        return False

    def written_tensors(self) -> list[str]:
        """Names of tensors that their owner has written since they were published, or filled."""
        return []

    def _fence(self, action: calls.Fence) -> None:
        """Let no reader in; shut out readers that do not leave by themselves; then say that the
        fence stands, or cannot.
        """
        now, owner = self.worker.now, self.worker.owner
        owner.close(self.id)
        if self.fencing_since is None:
            content = self.member.content
            if content is not None and content.published:
                self.shadow = ContentId(content.version.content_id), list(self.cells)
            self.fencing_since = now
            self.cluster.data.chunks_offered(self)  # or rather, never will be
            self.cluster.fence_begun(self, action)
        grace_until = self.fencing_since + self.cluster.fence_grace_s
        until = self.interpreter.fence_until(action)
        step = look(owner, self.id, now, grace_until, until)
        if step.stands:
            self.fencing_since = None
            self.cluster.guarantees.fenced(self, action.generation)
            self.interpreter.fenced(action, owner, now)
            return
        self.shut_readers(step.overdue)
        if step.is_late and not owner.is_quiet(self.id):
            self.fencing_since = None
            self.interpreter.fence_failed(action, now)
        else:
            self.todo.appendleft(action)

    def _finish(self, action: calls.Finish) -> None:
        record = self.last_call
        assert record is not None
        assert not record.done, f"{self.name}: {action} without a call"
        self.interpreter.finished(action)
        record.done, record.version, record.changed, record.error = (
            True,
            action.version,
            action.changed,
            action.error,
        )
        self.cluster.call_ended(self, record)
        for tell in record.on_end:
            tell()
        self.worker.copies.call_ended(self, record)

    def hook_returns(self) -> None:
        """Its before_write is over."""
        self.hooks.popleft()
        self.hook_calls += 1
        self.apply(self.member.hook_returned(self.hook_error, self.worker.now))

    def source_ended(self, lease: str, reason: str) -> None:
        """Have a source of the running fill fail."""
        lane = self.pull.lanes.get(lease) if self.pull is not None else None
        if lane is not None:
            lane.end(reason)
