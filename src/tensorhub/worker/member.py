"""One registration's side of the protocol: its calls, its votes, and the content of its memory.

Theory of operation. At most one call runs at a time and is in one `Phase`; the handle's state
follows its table. Every input returns the actions that follow, in order. The machine never waits:
the shell reports each result as an input.

The parts: `RegistrationSession` (this rank's standing with the coordinator), `MemberMemory` (the
content of its memory), and the running call, which is a `Publishing`, a `Filling`, a `Leaving` or a
`Refusing`; they share a `MemberContext`. `Member` hands each input to the part that the input
concerns, and begins a queued call when session and memory allow it.

Responsible for what a rank may promise (R6: after its vote only the coordinator decides) and for
the order of fences and writes (R3, R7). Not responsible for reading bytes (`scheduler.pull`), for
access to memory (`worker.owner`), for connections, or for time, which is an argument.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from math import inf
from typing import Any, assert_never

from tensorhub import messages
from tensorhub.errors import GroupAborted, StateError, TensorHubError
from tensorhub.machine import demand
from tensorhub.model.manifest import Manifest
from tensorhub.types import HandleState, Options, Purpose
from tensorhub.worker import calls
from tensorhub.worker.active_call import ActiveCall, GroupCall, Refusing
from tensorhub.worker.coverage import Found
from tensorhub.worker.filling import Filling
from tensorhub.worker.known_parts import KnownParts
from tensorhub.worker.leaving import Closing, Leaving, Releasing, Unpublishing
from tensorhub.worker.local_copies import LocalCopies
from tensorhub.worker.manifests import KnownManifests
from tensorhub.worker.member_context import MemberContext
from tensorhub.worker.member_memory import Content, MemberMemory
from tensorhub.worker.planning import Planned
from tensorhub.worker.publishing import Publishing
from tensorhub.worker.registration_session import Shard
from tensorhub.worker.states import PULLS, Phase
from tensorhub.worker.vote import Wrong

LEASE_S = Options().lease_s  # until a Welcome says otherwise
CALLS: Mapping[type[calls.Call], type[ActiveCall[Any]]] = {
    calls.PublishCall: Publishing,
    calls.FillCall: Filling,
    calls.UnpublishCall: Unpublishing,
    calls.CloseCall: Closing,
    calls.RefuseCall: Refusing,
    calls.ReleaseCall: Releasing,
}


class Member:
    """The machine of one handle. `requests` and `generations` mint numbers that are used once.

    `copies`: the memories that this worker may copy from, shared by its handles. A handle that
    serves readers is added to them, unless its memory is `in_file`. `parts`: the layouts of
    publications that the worker knows, shared as well.
    """

    def __init__(
        self,
        shard: Shard,
        *,
        requests: Callable[[], int],
        generations: Callable[[], int],
        manifests: dict[str, Manifest],
        copies: LocalCopies | None = None,
        parts: KnownParts | None = None,
        in_file: bool = False,
    ) -> None:
        self.shard = shard
        copies = copies if copies is not None else LocalCopies()
        known = KnownManifests(manifests, shard), parts if parts is not None else KnownParts()
        self._context = MemberContext(shard, requests, generations, copies, *known)
        self._session = self._context.session
        self._memory = MemberMemory(self._context)
        self._call: ActiveCall[Any] | None = None  # the last one that was begun
        # what is loaded of an archived version may go at any time
        if shard.serves and not in_file and shard.purpose is not Purpose.ARCHIVE:
            copies.add(shard.registration, self._memory)

    def __repr__(self) -> str:
        phase = self.running.phase.value if self.running is not None else "idle"
        s = self.shard
        return f"<Member {s.model}/{s.group}[{s.rank}] {self.state.value} {phase}>"

    @property
    def state(self) -> HandleState:
        """What `weights.state` shows."""
        return self._memory.state

    @property
    def version(self) -> int | None:
        """What `weights.version` shows."""
        return self._memory.version

    @property
    def content(self) -> Content | None:
        """The content that the memory holds (READY, DRAINING), is filled with (FILLING) or was
        voted for (IN_DOUBT).
        """
        return self._memory.content

    @property
    def in_place(self) -> Content | None:
        """The content of which every byte is in the memory now. Any thread may ask, at any time."""
        return self._memory.in_place

    @property
    def staged(self) -> Content | None:
        """The content that was voted for in staging memory, and is not yet in place."""
        return self._memory.staged

    def manifest_under(self, generation: int) -> Manifest | None:
        """The manifest of the content, of the staged content, or of the running fill, under that
        generation.
        """
        for content in (self.content, self.staged):
            if content is not None and content.generation == generation:
                return content.manifest
        call = self.running
        return (
            call.manifest if isinstance(call, Filling) and call.generation == generation else None
        )

    @property
    def running(self) -> ActiveCall[Any] | None:
        """The call that runs now."""
        return None if self._call is None or self._call.over else self._call

    @property
    def is_registered(self) -> bool:
        """Whether a coordinator has confirmed the registration, and has not refused it since."""
        return self._session.was_known and self._session.refusal is None

    @property
    def group_calls(self) -> int:
        """How many group calls this rank has said, or refused; a repeated call counts again."""
        return self._session.keys_taken

    @property
    def _has_left(self) -> bool:
        """Whether the handle has deregistered: a Register that came after that would never be taken
        back.
        """
        return self.state is HandleState.CLOSED or (
            self._call is not None and self._call.phase is Phase.DEREGISTERING
        )

    def fence_until(self, fence: calls.Fence) -> float:
        """When the fence is given up: at its deadline, or at that of its call if the call was
        cancelled. Without a deadline: at that of a call that waits to begin. inf: never.
        """
        call, until = self.running, inf if fence.until is None else fence.until
        if call is None:
            return until
        waits = call.phase is Phase.FENCING
        if fence.until is None:
            waits = call.phase is Phase.QUEUED and fence.generation == self._memory.unfenced
        return min(until, call.deadline) if waits else until

    @property
    def has_pending_work(self) -> bool:
        """Whether the memory is still to be fenced or overwritten without a call: the caller may
        not write it.
        """
        return self._memory.pending_fence is not None or self._memory.applying

    @property
    def has_voted(self) -> bool:
        """Whether this rank has voted and does not know the outcome: other workers may have heard
        of a commit.
        """
        memory = self._memory
        staged = memory.staged is not None and not memory.applying
        return memory.voted is not None or memory.doubt is not None or staged

    @property
    def why(self) -> str:
        """Why its memory is in its state."""
        return self._memory.story.newest

    # -------------------------------------------------------------------------------------------
    # inputs: the caller

    def adopt(self, content: Content, now: float) -> list[calls.Action]:
        """Hold content that the memory has without a call. Its generation is made here. Call this
        before the first `connected`: so it is registered as held from the beginning.
        """
        self._context.enter(now)
        self._memory.adopt(replace(content, generation=self._context.new_generation()))
        return self._context.take_actions()

    def begin(self, call: calls.Call, timeout_s: float, now: float) -> list[calls.Action]:
        """Start a call; raises StateError, and starts nothing, where the state forbids it."""
        self._context.enter(now)
        if self.running is not None:
            text = (
                f"{self.shard.title}: {self.running.what} is running on this handle; one call "
                f"at a time"
            )
            raise StateError(text, retryable=True)
        new = CALLS[type(call)](call, self._context, self._memory, timeout_s)
        new.check_allowed()
        self._call = new
        self._go_on()
        return self._context.take_actions()

    def _go_on(self) -> None:
        """Start or end a queued call, as soon as session, memory and doubt allow it."""
        call = self.running
        if call is None or call.phase is not Phase.QUEUED:
            return
        if call.error is not None and self._memory.unfenced is None:
            call.finish(error=call.error)
        elif self.has_pending_work:
            return
        elif call.alone and self._memory.doubt is None:
            call.start()
        elif isinstance(call, GroupCall) and self._memory.is_loss_unreported:
            self._memory.is_loss_unreported = False
            call.finish(error=self._memory.loss_error())
        elif self._session.refusal is not None:
            call.finish(error=self._session.refusal.error())
        elif self._session.ready and self._memory.doubt is not None:
            self._memory.ask_outcome(vote=False)
        elif self._session.ready:
            try:
                call.check_allowed()  # once more: a doubt may have been resolved
            except StateError as error:
                call.finish(error=error)
            else:
                call.start()

    @property
    def is_loss_unreported(self) -> bool:
        """Whether the coordinator has lost its state, and no call has said so yet."""
        return self._memory.is_loss_unreported

    def report_loss(self) -> None:
        """Raise LeaseLost if the coordinator has lost its state and no call has said so yet."""
        if self._memory.is_loss_unreported:
            self._memory.is_loss_unreported = False
            raise self._memory.loss_error()

    def cancel(self, error: Exception, now: float) -> list[calls.Action]:
        """End the running call with `error`, unless this rank has to finish the call by itself."""
        self._context.enter(now)
        if self.running is not None and self.running.error is None:
            self.running.cancel(error)
        return self._context.take_actions()

    def hook_returned(self, error: Exception | None, now: float) -> list[calls.Action]:
        self._context.enter(now)
        if isinstance(self.running, Filling):
            self.running.hook_returned(error)
        return self._context.take_actions()

    def given_up(self, now: float) -> list[messages.FromWorker]:
        """The registration is given up. Returns the messages that the coordinator is to get at
        once, if any.
        """
        self._context.enter(now)
        if self.state is HandleState.CLOSED and self.shard.serves:
            return []  # it has left
        return [
            messages.Deregister(self._context.new_request(), self.shard.registration, abandon=True)
        ]

    # -------------------------------------------------------------------------------------- inputs:
    # the owner's side

    def fenced(self, generation: int, now: float) -> list[calls.Action]:
        """The fence stands: no access reads under that generation any more."""
        self._context.enter(now)
        self._context.say(messages.Fenced(self.shard.registration, generation))
        if generation == self._memory.unfenced:
            self._memory.fence_stands()
            self._go_on()
        elif (waits := self._waits_for(generation)) is not None:
            waits.fenced()
        return self._context.take_actions()

    def fence_failed(self, generation: int, now: float) -> list[calls.Action]:
        """Accesses still run when the fence is given up. The bytes are unchanged: published memory
        stays published (G2, R4). Content that was given up is fenced again, before anything else.
        """
        self._context.enter(now)
        call = self.running
        if generation == self._memory.unfenced:
            if call is not None and call.phase is Phase.QUEUED:
                call.never_began()
            self._context.act(calls.Fence(generation))
        elif (waits := self._waits_for(generation)) is not None:
            waits.fence_failed()
        return self._context.take_actions()

    def _waits_for(self, generation: int) -> Filling | Leaving[Any] | None:
        """The running call, if it waits for the fence of that generation."""
        call, content = self.running, self._memory.content
        if isinstance(call, Filling | Leaving) and call.phase is Phase.FENCING:
            return call if content is not None and content.generation == generation else None
        return None

    def source_failed(
        self, lease: str, reason: str, detail: str, now: float, *, chunk: int | None = None
    ) -> list[calls.Action]:
        """A read has ended early (reason "dropped": the pull was told to drop the source). `chunk`:
        had another digest.
        """
        self._context.enter(now)
        if isinstance(self.running, Filling):
            self.running.source_failed(lease, reason, detail, chunk)
        return self._context.take_actions()

    def digested_again(
        self,
        inquiry: str,
        generation: int,
        changed: bool | None,
        error: TensorHubError,
        now: float,
        *,
        digest: bytes = b"",
        origin: messages.Origin | None = None,
    ) -> list[calls.Action]:
        """The result of a DigestAgain, or ("" as `inquiry`) of the worker's own check. `error`: the
        error to raise for memory that has changed. `digest`: the digest that is sent with the
        chunk; `origin`: where the chunk was read.
        """
        self._context.enter(now)
        content = self._memory.content
        known = (
            content is not None
            and content.generation == generation
            and self.state is not HandleState.IN_DOUBT
        )
        registration = self.shard.registration
        found = changed if known else None
        if inquiry or found:
            self._context.say(
                messages.DigestedAgain(inquiry, registration, found, digest, origin, generation)
            )
        if known and changed:
            if isinstance(self.running, Filling):
                self.running.pull_failed(error)
            self._memory.spoil()
        return self._context.take_actions()

    def planned(
        self, number: int, made: Planned | TensorHubError, now: float
    ) -> list[calls.Action]:
        """The result of the PlanReading with that number."""
        self._context.enter(now)
        if isinstance(self.running, Filling):
            self.running.planned(number, made)
        return self._context.take_actions()

    def ranks_checked(
        self, number: int, found: Found | TensorHubError, now: float
    ) -> list[calls.Action]:
        """The result of the CheckRanks with that number."""
        self._context.enter(now)
        if isinstance(self.running, Filling | Publishing) and self.running.may_check:
            self.running.coverage.checked(number, found)
        return self._context.take_actions()

    def pull_done(
        self, now: float, root: bytes = b"", roots: tuple[messages.SelectionRoot, ...] = ()
    ) -> list[calls.Action]:
        """Every chunk is in place and verified, with digests of that root (empty: some chunk has no
        digest): vote. `roots`: the root of each selection, for memory that is filled in another
        layout.
        """
        self._context.enter(now)
        if isinstance(self.running, Filling):
            self.running.pull_done(root, roots)
        return self._context.take_actions()

    def compared(
        self, generation: int, following: int, wrong: Sequence[Wrong], now: float
    ) -> list[calls.Action]:
        """The result of CompareDigests: the first chunk not compared, and the wrong (chunk,
        published digest, origin).
        """
        self._context.enter(now)
        if isinstance(self.running, Filling) and self.running.generation == generation:
            self.running.compared(following, wrong)
        return self._context.take_actions()

    def room_ended(self, error: TensorHubError | None, now: float) -> list[calls.Action]:
        """MakeRoom has ended: with room, with `error`, or because it was cancelled."""
        self._context.enter(now)
        if isinstance(self.running, Filling):
            self.running.room_ended(error)
        return self._context.take_actions()

    def copied(self, chunks: frozenset[int], now: float) -> list[calls.Action]:
        """The running CopyLocally has ended: these chunks are in place and verified."""
        self._context.enter(now)
        content = self._memory.content
        if self._memory.applying and content is not None:
            whole = len(chunks) == content.manifest.chunk_count
            self._memory.applied(whole=whole)
            if isinstance(self.running, Filling) and self.running.phase is Phase.APPLYING:
                self.running.applied(whole=whole)
            else:
                self._go_on()
        elif isinstance(self.running, Filling):
            self.running.copied(chunks)
        return self._context.take_actions()

    def pull_failed(self, error: TensorHubError, now: float) -> list[calls.Action]:
        """The pull has no source left, or there is no memory to copy or pull into."""
        if self._memory.applying:  # committed already: a missing chunk tears the memory
            return self.copied(frozenset(), now)
        self._context.enter(now)
        if isinstance(self.running, Filling):
            self.running.pull_failed(error)
        return self._context.take_actions()

    def pull_stopped(self, now: float) -> list[calls.Action]:
        self._context.enter(now)
        if isinstance(self.running, Filling):
            self.running.pull_stopped()
        return self._context.take_actions()

    def progress(
        self, chunks_verified: int, bytes_read: int, flows: tuple[messages.Flow, ...]
    ) -> messages.Progress | None:
        """The progress of a running pull; None: the pull belongs to no call that the coordinator
        knows.
        """
        running = self.running
        if running is None or running.key is None:
            return None
        return messages.Progress(running.key, self.shard.rank, chunks_verified, bytes_read, flows)

    # ------------------------------------------------------------------------------------- inputs:
    # the coordinator

    def state_lost(self, now: float) -> list[calls.Action]:
        """The coordinator of the next session has lost the previous coordinator's state (R2). Call
        this before `connected`.

        Held content and votes are given up. One group call reports the loss: the running call, or
        else the next call.
        """
        self._context.enter(now)
        call, known, reported = self.running, self._session.was_known, False
        self._session.left = self._session.committed = None
        if isinstance(call, GroupCall):
            reported = call.state_lost(self._memory.loss_error())
        self._memory.lose(reported=reported or not known)
        return self._context.take_actions()

    def connected(self, now: float, lease_s: float = LEASE_S) -> list[calls.Action]:
        """A session is up: repeat an unanswered Abandon, and restate the content. `_registered`
        asks for missed messages later.

        `lease_s`: the lease in the coordinator's Welcome.
        """
        self._context.enter(now)
        self._session.connected(lease_s)
        if self.state is not HandleState.CLOSED:
            if self._session.left is not None:
                self._context.say(self._session.left)
            self._memory.restate()
        return self._context.take_actions()

    def disconnected(self, now: float) -> list[calls.Action]:
        """The coordinator hears nothing for now. An owner needs no coordinator to take its memory
        back.
        """
        self._context.enter(now)
        self._session.disconnected(now)
        if isinstance(self.running, Leaving):
            self.running.disconnected()
        return self._context.take_actions()

    def receive(
        self,
        message: messages.ToRank,
        now: float,
    ) -> list[calls.Action]:
        """The coordinator says something about this registration. A stale message changes nothing
        (G9).
        """
        self._context.enter(now)
        call = self.running
        match message:
            case messages.Registered():
                self._registered(message)
            case messages.RegisterAgain():
                if self._session.asked(message.request) and not self._has_left:
                    self._memory.restate(told=message.whole, parts=message.part_ids)
            case messages.EpochChanged():
                self._session.epoch_changed(message)
                if isinstance(call, GroupCall):
                    call.epoch_changed(message)
            case messages.Outcome():
                self._outcome(message)
            case messages.SetRetained():
                self._memory.set_retained(message.keep, message.seq, message.content_id)
            case messages.Revoked():
                self._memory.order_out(message)
            case messages.Refused() if self._session.asked(message.request):
                self._refused(message.error)
            case messages.Refused():
                if call is not None and call.waits_for(message.request):
                    call.refused(message.error.error())
            case messages.Done() | messages.LeaveGranted():
                if isinstance(call, Leaving):
                    call.answered(message)
                elif isinstance(message, messages.LeaveGranted) and self.state is HandleState.READY:
                    self._memory.restate()  # the leave was given up, unheard: the content stays
            case messages.ManifestReply():
                if (
                    isinstance(call, Filling | Publishing)
                    and call.may_check
                    and call.coverage.waits_for(message.request)
                ):
                    call.coverage.came(message)
                elif isinstance(call, Filling):
                    call.manifest_came(message)
            case messages.CheckCoverage() if isinstance(call, Publishing):
                if message.key == call.key and call.may_check:
                    call.coverage.asked("", message.readers)
            case (
                messages.Start()
                | messages.ReadyAgain()
                | messages.CheckCoverage()
                | messages.Write()
                | messages.AddSource()
                | messages.DropSource()
                | messages.Compare()
            ):
                if isinstance(call, Filling) and message.key == call.key:
                    call.instructed(message)
            case _:
                assert_never(message)
        return self._context.take_actions()

    def _registered(self, message: messages.Registered) -> None:
        if not self._session.asked(message.request):
            return
        first = self._session.confirm(message)
        if not message.keep:
            self._memory.not_kept()
        elif message.retained is not None:
            self._memory.set_retained(True, message.retained)
        if first:
            self._context.act(calls.RegistrationConfirmed())
            self._say_again()

    def _say_again(self) -> None:
        """After a new connection: ask for what may have been missed."""
        if self._memory.doubt is not None:
            self._memory.ask_outcome(vote=True)
        call = self.running
        if isinstance(call, GroupCall | Leaving) and call.phase is not Phase.QUEUED:
            call.say_again()
        else:
            self._go_on()  # nothing of it was said before

    def _refused(self, info: messages.ErrorInfo) -> None:
        """The coordinator does not take this memory (any more): no group call can be made."""
        self._session.refusal = info
        self._context.act(calls.RegistrationFailed(info.error()))
        if self.running is not None:
            # an error object of its own: each call sets its memory field
            self.running.give_up(info.error())

    def _outcome(self, message: messages.Outcome) -> None:
        call = self.running
        doubted = self._memory.doubt == message.key and self._memory.publishes
        running = isinstance(call, Publishing) and call.key == message.key
        was_left = self._session.heard(
            message.key, committed=message.committed, publishes=doubted or running
        )
        if self._memory.doubt == message.key:
            self._memory.resolve(message)
            self._heard_retained(message)
            self._go_on()
        elif isinstance(call, GroupCall) and call.key == message.key:
            if not message.committed:
                info = message.error
                error = call.error or (
                    info.error() if info is not None else GroupAborted("aborted")
                )
                end = call.aborted
                if message.again:
                    end = call.again
                elif message.unknown and call.error is None:
                    end = call.unheard_of
                end(error)
            elif message.version is not None:
                call.by_source = message.by_source
                call.committed(message.version)
                self._heard_retained(message)
        elif was_left and not self._has_left:
            # the call has ended without this rank; whatever its outcome, this content is held
            self._memory.restate()

    def _heard_retained(self, outcome: messages.Outcome) -> None:
        if outcome.retained is not None and outcome.version is not None:
            self._memory.set_retained(True, outcome.retained, outcome.version.content_id)

    # ----------------------------------------------------------------------------------------------
    # time

    def next_deadline(self) -> float | None:
        return None if self.running is None else self.running.next_deadline()

    def tick(self, now: float, fault: TensorHubError | None = None) -> list[calls.Action]:
        """End a call that has passed its deadline without a word from the coordinator. `fault`: why
        this worker has no session, if it has none.
        """
        self._context.enter(now)
        if self.running is not None and now >= self.running.next_deadline():
            self.running.overdue(fault)
        return self._context.take_actions()

    def check_invariants(self) -> None:
        """Raise InvariantBroken if the handle's parts disagree."""
        call, memory = self.running, self._memory
        memory.check_invariants()
        phase = None if call is None else call.phase
        may_pull = (
            phase not in PULLS
            or self.state is HandleState.FILLING
            or (isinstance(call, Filling) and call.stages)
        )
        demand(may_pull, "what is pulled is filled, or staged", memory)
        voted = phase is not None and (
            phase is Phase.VOTED or (phase is Phase.ABANDONING and isinstance(call, Publishing))
        )
        has_staged = memory.staged is not None and not memory.applying and memory.doubt is None
        has_voted = memory.voted is not None or has_staged
        demand(voted == has_voted, "a phase says whether there was a vote", memory)
        fences = phase is not None and phase is Phase.FENCING
        demand(memory.fencing == fences, "a phase says what is fenced", memory)
