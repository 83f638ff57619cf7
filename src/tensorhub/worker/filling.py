"""A rank's fill (R7): replicate, update, fetch.

The order: Fill is said; all ranks are bound to one version; its manifest is compared, or (for a
version of another layout) a transfer plan is made; `before_write` runs; all ranks are ready. Only
then is the old version fenced and the new version pulled. Chunks that host copies of this worker
have are copied first, and only the rest is read. When all chunks are verified, the rank votes.

A staged fill pulls the new version into staging memory. `before_write` runs when all of it is
verified. The old version is fenced and overwritten only when the vote has led to a commit.

Responsible for this order, and for the memory that a broken fill leaves behind. Not responsible for
the manifest or plan (`binding`), for the leases that it reads under (`leases`), for whether the
group reads everything (`coverage`), for comparing its vote with the publisher's digests (`vote`),
nor for reading bytes (`scheduler.pull`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import assert_never

from tensorhub import messages
from tensorhub.errors import (
    IntegrityError,
    OperationTimeout,
    ProtocolError,
    StateError,
    TensorHubError,
)
from tensorhub.machine import InvariantBroken
from tensorhub.model.manifest import Manifest
from tensorhub.types import HandleState, OpKind, VersionInfo
from tensorhub.worker import calls
from tensorhub.worker.active_call import GroupCall, set_memory
from tensorhub.worker.binding import Binding
from tensorhub.worker.coverage import Coverage
from tensorhub.worker.leases import Leases
from tensorhub.worker.member_context import MemberContext
from tensorhub.worker.member_memory import MemberMemory
from tensorhub.worker.planning import Planned
from tensorhub.worker.states import FILL_TABLE, UNVOTED, Phase
from tensorhub.worker.vote import Vote, Wrong

Instruction = (
    messages.Start
    | messages.ReadyAgain
    | messages.CheckCoverage
    | messages.Write
    | messages.AddSource
    | messages.DropSource
    | messages.Compare
)


class Filling(GroupCall[calls.FillCall]):
    """The calls replicate, update, prefetch and fetch."""

    machine, table = "fill", FILL_TABLE
    unbound = Phase.ASKED

    def __init__(
        self, call: calls.FillCall, context: MemberContext, memory: MemberMemory, timeout_s: float
    ) -> None:
        super().__init__(call, context, memory, timeout_s)
        self.what = call.kind.value
        self._begin_attempt()
        self._bound_before = ""  # the content of the attempt before, if the call was repeated
        self._hooked = False  # before_write has returned
        # this rank may have held the bound content when Fill was said
        self._may_hold = call.kind is OpKind.PREFETCH

    def _begin_attempt(self) -> None:
        """Nothing is bound, and nothing begun."""
        context = self._context
        self.binding: Binding | None = None  # by the coordinator
        self.coverage = Coverage(context, self)
        self._leases = Leases(context, lambda: self.operation)
        self._write_said = False  # the coordinator has told every rank to overwrite
        self._may_have_missed_write = False  # a connection was lost meanwhile, and perhaps a Write
        self._tried: set[calls.LocalCopy] = set()  # host copies that were copied from
        self._copied: frozenset[int] = frozenset()  # chunks that came from host copies
        self.stages = False  # the memory holds a version that stays unchanged until the commit
        self._has_staging = False  # staging memory may be in use, and this call has to free it
        self._is_staged = False  # all chunks are in staging memory
        self._vote = Vote(context, lambda: self.operation)
        self._is_anew = False  # Fill was repeated to a new coordinator, which has not bound it yet
        # of this attempt; then the call is repeated under the key that was taken
        self._lets_go = False

    def check_allowed(self) -> None:
        super().check_allowed()
        if self._call.kind is OpKind.REPLICATE and self._memory.version is not None:
            raise StateError(
                f"{self._context.title} holds version {self._memory.version}: update() replaces it"
            )

    # ----------------------------------------------------------------------------------------------
    # what it says

    def start(self) -> None:
        self._take_key()
        self.enter(Phase.ASKED)
        self._say_call()

    def _say_call(self) -> None:
        call, shard, begun = self._call, self._context.shard, self._begun()
        if begun is not None and shard.serves:
            self._context.say(messages.BegunWith(shard.registration, self._bound.base.encode()))
        self._may_hold = self._may_hold or self._memory.state is HandleState.READY
        self._context.say(
            messages.Fill(
                key=self.operation,
                rank=shard.rank,
                registration=shard.registration,
                kind=call.kind,
                selector=call.selector,
                at_least=call.at_least,
                generation=self.generation,
                hold=call.hold and not call.staged,
                staged=call.staged,
                timeout_s=max(0.0, self.deadline - self._context.now),
                former=self.former,
                resume=begun,
            )
        )

    def _begun(self) -> messages.Begun | None:
        """How far the fill is, for a coordinator that has not bound it."""
        if self.binding is None or not self.binding.is_known:
            return None
        return self.binding.begun(written=self._has_staging or self._has_begun)

    @property
    def manifest(self) -> Manifest | None:
        """The manifest of the bound version in this rank's layout, once known."""
        return self.binding.manifest if self.binding is not None and self.binding.is_known else None

    @property
    def _bound(self) -> Binding:
        """The binding, once there is one."""
        assert self.binding is not None
        return self.binding

    def unheard_of(self, error: Exception) -> None:
        """Repeat the call under a new key, and go on with the fill: the pull does not stop for that
        (G8).

        An operation that this rank has voted for was not committed; if all ranks vote again, it is
        committed now (R6).
        """
        if self.phase in (Phase.ABANDONING, Phase.STOPPING, Phase.APPLYING):
            self.aborted(error)
            return
        if self.phase is Phase.MANIFEST:  # nothing depends on the binding
            self.enter(Phase.ASKED)
            self.binding = None
        self._take_key()
        self._is_anew = self.phase is not Phase.ASKED
        self._say_call()

    def again(self, error: Exception) -> None:
        """The sources are gone, and the selector names another version: let go of this attempt, and
        repeat the call (G7, R12). If the caller has cancelled meanwhile, the next operation is
        abandoned for all ranks.
        """
        if self.phase is Phase.APPLYING:
            return  # its commit was heard
        self._take_key()
        if self.error is not None:
            self._abandon(self.error)
            self.aborted(self.error)
            return
        if self.binding is not None:
            self._bound_before = self.binding.version.content_id
        self._lets_go = True
        match self.phase:
            case Phase.ROOM | Phase.COPYING | Phase.PULLING:
                self._stop_pull(None)
            case Phase.HOOK | Phase.FENCING:
                pass  # once it has returned, or stands
            case _:
                self._call_again()

    def _call_again(self) -> None:
        """Nothing of the attempt runs any more: reset it, and repeat the call."""
        if self.phase is Phase.VOTED and self.stages:
            self._has_staging = False
            self._memory.drop_staged()
        elif self._memory.state is HandleState.FILLING:
            self._memory.tear()
        elif self._write_said or self._may_have_missed_write:  # the held content may count no more
            self._memory.restate()
        if self._has_staging:
            self._context.act(calls.FreeStaging())
        self._begin_attempt()
        self.generation = self._context.new_generation()
        if self.phase is not Phase.ASKED:
            self.enter(Phase.ASKED)
        self._say_call()

    def say_again(self) -> None:
        if not self._lets_go:  # else nothing was said under this key
            super().say_again()

    def _is_unbound(self) -> bool:
        return self._is_anew or super()._is_unbound()

    def _say_phase_again(self) -> None:
        """Questions about the version are repeated later, once the coordinator says that it knows
        this operation: a restarted coordinator may know the version, and not yet its parts.
        """
        self._may_have_missed_write = True
        if self._is_anew:
            self._say_call()
            return
        match self.phase:
            case Phase.ASKED:
                self._say_call()
            case Phase.HELD:
                self._say_ready()
            case Phase.PULLING if self._vote.is_void:
                self._vote.say_void()
            case Phase.VOTED:
                self._vote.say()
            case _:
                pass

    # -------------------------------------------------------------------------------------------
    # until it may write

    def instructed(self, message: Instruction) -> None:
        """The coordinator says something about this operation."""
        match message:
            case messages.Start() if self.phase is Phase.ASKED:
                self._bind(message)
            case messages.Start() if self.phase is Phase.MANIFEST:
                self._bound.ask_again()
            case messages.Start(write=True) | messages.Write():
                if self._is_anew and isinstance(message, messages.Start) and message.publication:
                    self._say_ready()  # else the coordinator does not know what this rank reads
                self._is_anew = False
                self._may_write(message)
            case messages.Start():
                if self._is_anew and (
                    self.phase is Phase.HELD or (message.publication and self._has_begun)
                ):
                    self._say_ready()
                self._is_anew = False
                if self.phase is Phase.HELD:
                    self.coverage.ask_again()
            case messages.ReadyAgain():
                if self.phase is Phase.HELD or self._has_begun:
                    self._say_ready(message.part_ids)
            case messages.CheckCoverage():
                if self.may_check and self._bound.publication_id:
                    self.coverage.asked(self._bound.publication_id, message.readers)
            case messages.AddSource():
                if self.phase in UNVOTED:
                    self._leases.add(message.grant)
            case messages.DropSource():
                self._leases.drop(message.lease)
            case messages.Compare():
                if self.phase is Phase.VOTED:
                    self._vote.compare(
                        message, self._bound.manifest, self.generation, staged=self.stages
                    )
            case _:
                assert_never(message)

    def _may_write(self, said: messages.Start | messages.Write) -> None:
        """Every rank may write. This rank may write already, and may have missed further
        sources.
        """
        grants = said.grants
        match self.phase:
            case Phase.HELD:
                self._leases.granted(grants)
                self._write()
            case Phase.FENCING | Phase.ROOM | Phase.COPYING:
                self._leases.granted(grants)
            case Phase.PULLING:
                self._leases.reconcile(grants)
            case Phase.VOTED:
                self._vote.say()
            case Phase.ABANDONING:
                self._write_said = True  # it crossed our Abandon: nothing was written here
            case _:
                pass

    def _bind(self, start: messages.Start) -> None:
        self._write_said = start.write
        self._leases.granted(start.grants)
        self.binding = binding = Binding(self._context, start)
        self.rebinds += self._bound_before not in ("", binding.version.content_id)
        if not binding.is_known:
            self.enter(Phase.MANIFEST)
        self._go_on_binding(binding.begin)

    def _go_on_binding(self, step: Callable[[], None]) -> None:
        """After this step the manifest or plan is known, or the binding has asked for more."""
        try:
            step()
            if not self._bound.is_known:
                return
            self._context.manifests.check_fits(self._bound.base)
        except TensorHubError as error:
            self.give_up(error)
        else:
            self._fits()

    def manifest_came(self, reply: messages.ManifestReply) -> None:
        if self.phase is Phase.MANIFEST and self._bound.waits_for(reply.request):
            self._go_on_binding(lambda: self._bound.came(reply))

    def planned(self, number: int, made: Planned | TensorHubError) -> None:
        """The result of PlanReading."""
        if self.phase is Phase.MANIFEST and self._bound.is_of(number):
            self._go_on_binding(lambda: self._bound.planned(made))

    def waits_for(self, request: int) -> bool:
        return any(
            each is not None and each.waits_for(request) for each in (self.coverage, self.binding)
        )

    def _fits(self) -> None:
        """The manifest or plan is known, and this memory can take it."""
        self.stages = self._call.staged and self._memory.state is HandleState.READY
        if self._call.hold and not self.stages and not self._hooked:
            self._run_hook()
        else:
            self._ready_to_write()

    def _run_hook(self) -> None:
        self.enter(Phase.HOOK)
        self._context.act(calls.CallHook(self._bound.version))

    def hook_returned(self, error: Exception | None) -> None:
        if self.phase is not Phase.HOOK:
            return
        self._hooked = True
        if error is not None:
            self.give_up(error)
        elif self._lets_go:
            self._call_again()
        elif self._is_staged:
            self._cast_vote()
        else:
            self._ready_to_write()

    def _ready_to_write(self) -> None:
        if self._write_said:
            self._write()
        else:
            self.enter(Phase.HELD)
            self._say_ready()

    def _say_ready(self, asked: Sequence[str] = ()) -> None:
        self._context.say(self._bound.ready_to_write(self.operation, asked))

    @property
    def may_check(self) -> bool:
        """Nothing is overwritten before the result of the check is known."""
        return self.phase is Phase.HELD

    @property
    def _has_begun(self) -> bool:
        """Whether this rank may write, by the word of its previous coordinator."""
        return self.phase in (Phase.FENCING, Phase.ROOM, Phase.COPYING, Phase.PULLING, Phase.VOTED)

    def _write(self) -> None:
        """Every rank is ready: fence this rank's old version, then fill; or, for a staged fill,
        make room.
        """
        self._write_said = True
        if self.stages:
            self._has_staging = True
            self.enter(Phase.ROOM)
            self._context.act(calls.MakeRoom(self._bound.manifest.region_bytes))
        elif self._memory.state is HandleState.READY:
            self._fence()
        else:
            self._begin_fill()

    def fenced(self) -> None:
        """FENCING: no reader is left of the old version."""
        if self._lets_go and self.error is None:
            self._memory.reopen()
            self._call_again()
        elif self.error is None:
            self._begin_fill()
        else:
            self._old_one_stays()  # given up between the fence and the first byte

    def fence_failed(self) -> None:
        """FENCING: accesses still run at the deadline."""
        error = self._still_read()
        if self.error is None:
            self._abandon(error)
        if self.error is None or isinstance(self.error, OperationTimeout):
            self.error = error
        self._old_one_stays()

    def _old_one_stays(self) -> None:
        """Nothing was written: let readers in again (R7)."""
        self._memory.reopen()
        self.finish(error=self.error)

    def room_ended(self, error: TensorHubError | None) -> None:
        """ROOM: there is room for staging memory, or `error` says why not. STOPPING: the wait for
        room has ended.
        """
        if self.phase is Phase.ROOM and error is None:
            self._begin_copying()
            return
        if self.phase is Phase.ROOM and error is not None:
            self._abandon(error)
            self.error = error
            self.enter(Phase.STOPPING)
        self.pull_stopped()

    def _begin_fill(self) -> None:
        self._memory.fill(self._bound.content(self.generation))
        self._begin_copying()

    # ------------------------------------------------------------------------------------- what
    # needs no network

    def _begin_copying(self) -> None:
        """Copy from host copies of this worker, even from one that is being filled; then pull the
        rest.
        """
        if not self._copy_on():
            self._start_pull()

    def _copy_on(self) -> bool:
        """Copy from host copies that were not tried yet, if there are any."""
        version, manifest = self._bound.version, self._bound.manifest
        shard = self._context.shard
        if not shard.serves or len(self._copied) == manifest.chunk_count:
            return False
        found = [
            c
            for c in self._context.copies.find(shard, version.content_id, manifest.grid_id)
            if c not in self._tried
        ]
        if not found:
            return False
        self.enter(Phase.COPYING)
        self._tried.update(found)
        sources = tuple(found)
        self._context.act(
            calls.CopyLocally(
                version, manifest, self.generation, sources, self._copied, staged=self.stages
            )
        )
        return True

    def copied(self, chunks: frozenset[int]) -> None:
        """COPYING: these chunks are present now. A copy may have another generation by now, so look
        again.
        """
        if self.phase is Phase.COPYING:
            self._copied = chunks
            if not self._copy_on():
                self._start_pull()

    # ----------------------------------------------------------------------------------------------
    # the pull

    def _start_pull(self) -> None:
        # its chunks of this content are copied; both would read the rest
        self._context.act(calls.EndPrefetch())
        self.enter(Phase.PULLING)
        grants = self._leases.begin_reading()
        what = (
            self._bound.version,
            self._bound.manifest,
            self.generation,
            grants,
            self._copied,
            self.stages,
        )
        self._context.act(calls.StartPull(*what))

    def source_failed(self, lane: str, reason: str, detail: str, chunk: int | None) -> None:
        """`lane`: the lease under which the pull began to read there."""
        self._leases.failed(lane, reason, detail, chunk)

    def pull_done(self, root: bytes, roots: tuple[messages.SelectionRoot, ...] = ()) -> None:
        if self.phase is not Phase.PULLING:
            return
        self._leases.end_reading()
        self._is_staged = self.stages
        self._vote.made(root, roots)
        if self._call.hold and self._is_staged and not self._hooked:
            self._run_hook()
        else:
            self._cast_vote()

    def _cast_vote(self) -> None:
        self.enter(Phase.VOTED)
        bound, vote = self._bound, self._vote
        if self.stages:
            self._memory.stage(
                replace(bound.content(self.generation), root=vote.root, roots=vote.roots)
            )
        else:
            self._memory.verified(vote.root, vote.roots)
        vote.say()
        # No other memory depends on a fetch. A fetch that can check the published digests by itself
        # need not wait.
        if not self._context.shard.serves and (
            bound.manifest.digest == "none" or vote.root == bound.root != b""
        ):
            self._memory.fetched()
            self.finish(version=bound.version, changed=True)

    def compared(self, following: int, wrong: Sequence[Wrong]) -> None:
        """The wrong chunks of that part, with published digests and origins: read them again after
        the last part.
        """
        if self.phase is Phase.VOTED and self._vote.compared(following, wrong):
            self._reread()

    def _reread(self) -> None:
        """The vote is void: read the wrong chunks once more, from any source."""
        version, manifest = self._bound.version, self._bound.manifest
        self._memory.unvote()
        self.enter(Phase.PULLING)
        self._vote.say_void()
        self._leases.granted(())
        self._leases.begin_reading()
        wrong = self._vote.take_wrong()
        there = frozenset(range(manifest.chunk_count)) - wrong.keys()
        self._context.act(
            calls.StartPull(
                version, manifest, self.generation, (), there, self.stages, wrong, again=True
            )
        )

    def pull_failed(self, error: TensorHubError) -> None:
        """The pull or the copying cannot go on."""
        if self.phase in (Phase.COPYING, Phase.PULLING):
            self.give_up(error)

    def _stop_pull(self, error: Exception | None) -> None:
        self.error = error
        ends = calls.CancelRoom() if self.phase is Phase.ROOM else calls.StopPull()
        self.enter(Phase.STOPPING)
        self._leases.end_reading()
        self._context.act(ends)

    def pull_stopped(self) -> None:
        if self.phase is not Phase.STOPPING:
            return
        if self._lets_go and self.error is None:
            self._call_again()
        elif self.stages:
            self._memory.restate()
            self.finish(error=self.error)
        else:
            self._torn(self.error)

    # ----------------------------------------------------------------------------------------------
    # its end

    def _may_be_committed(self) -> bool:
        # a barrier is not told before its end
        return self.phase is Phase.VOTED or self.binding is None

    def committed(self, version: VersionInfo) -> None:
        content, changed = self._memory.content, True
        held = self._memory.state is not HandleState.FILLING
        if self.phase is Phase.APPLYING:
            return  # it is known
        if self.phase is Phase.VOTED and self.stages:
            self._has_staging = False  # the memory's now
            self.enter(Phase.APPLYING)
            self._memory.apply()
            return
        if self.phase is Phase.VOTED and not self._context.shard.serves:
            self._memory.fetched()
            self.finish(version=version, changed=True)
            return
        if self.phase is Phase.VOTED:
            self._memory.filled()
        elif content is not None and content.version.content_id == version.content_id and held:
            changed = False  # a barrier: this content was held already
        elif self.phase in (Phase.ASKED, Phase.ABANDONING) and (
            content is None or self._call.kind is OpKind.PREFETCH
        ):
            # as above, but rolled back since; or the content is in use, so there is nothing to
            # prefetch
            changed = False
        else:
            raise ProtocolError(
                f"{self}: the coordinator has committed it before this "
                "rank voted: its mistake, not ours"
            )
        self._finish_committed(version, changed=changed)

    def applied(self, *, whole: bool) -> None:
        """APPLYING: the staged content is in place, or some bytes did not arrive."""
        if self.phase is not Phase.APPLYING:
            return
        if whole:
            self._finish_committed(self._bound.version)
            return
        text = (
            f"{self._context.title}: what was staged did not arrive as it was verified: this "
            f"machine's memory is at fault"
        )
        error = IntegrityError(text)
        set_memory(error, "torn")
        self.finish(error=error)

    def finish(
        self,
        *,
        version: VersionInfo | None = None,
        changed: bool = False,
        error: Exception | None = None,
    ) -> None:
        if self._has_staging:
            self._has_staging = False
            self._context.act(calls.FreeStaging())
        content = self._memory.content
        manifest = self.manifest or (content.manifest if content is not None else None)
        self.by_source = self.by_source or (manifest is not None and manifest.digest == "none")
        if changed:
            self._context.act(calls.EndPrefetch(frees=True))
        super().finish(version=version, changed=changed, error=error)

    def aborted(self, error: Exception) -> None:
        match self.phase:
            case Phase.ROOM | Phase.COPYING | Phase.PULLING:
                self._stop_pull(error)
            case Phase.STOPPING | Phase.FENCING:
                self.error = error
            case Phase.APPLYING:
                pass  # its commit was heard
            case Phase.VOTED if self.stages:
                self._has_staging = False
                self._memory.drop_staged()
                self.finish(error=error)
            case Phase.VOTED:
                self._torn(error)
            case _:
                # a fill that was never begun may be counted on
                if self._write_said or self._may_have_missed_write:
                    self._memory.restate()
                self.finish(error=error)

    def _give_up(self, error: Exception) -> None:
        match self.phase:
            case Phase.ASKED | Phase.MANIFEST | Phase.HOOK | Phase.HELD:
                self.error = error
                self.enter(Phase.ABANDONING)
                self._abandon(error)
            case Phase.FENCING:
                self.error = error
                self._abandon(error)
            case Phase.ROOM | Phase.COPYING | Phase.PULLING:
                self._abandon(error)
                self._stop_pull(error)
            # no other memory depends on a fetch
            case Phase.VOTED if not self._context.shard.serves:
                self._abandon(error)
                self._torn(error)
            case Phase.VOTED:
                self._has_staging = False
                self._doubt(error)
            case Phase.APPLYING:
                pass  # it is committed, and ends by itself
            case Phase.ABANDONING:
                self._leave_unheard()
            case Phase.STOPPING:
                if self._lets_go and self.error is None:
                    self.error = error
                    self._abandon(error)
            case _:
                raise InvariantBroken(
                    f"{self} is in no phase of a fill. Story:\n{self._memory.story}"
                )

    def _leave_unheard(self) -> None:
        """The outcome does not come, and nothing was written here."""
        if self._may_hold and self.binding is None and self.error is not None:
            # The held content may have been its vote, even if it was given up since: its group may
            # have ended well.
            set_memory(self.error, "in_doubt")
        self.finish(error=self.error)

    def _torn(self, error: Exception | None) -> None:
        self._memory.tear()
        if error is not None:
            set_memory(error, "torn")
        self.finish(error=error)
