"""One registration's own side: its calls, its votes, and what its memory holds.

Theory of operation. At most one call runs at a time and is in one `Phase`; the handle's state follows its table. Every
input returns the actions that follow, in order. The machine never waits: the shell tells it what came back.

Responsible for what a rank may promise (R6: after its vote only the coordinator decides) and for the order of fences
and writes (R3, R7). Not responsible for reading bytes (`scheduler.pull`), for access to memory (`worker.owner`), for
connections, or for time, which is an argument.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import assert_never

from tensorhub.errors import (
    CoordinatorUnavailable,
    DrainTimeout,
    GroupAborted,
    LeaseLost,
    OperationTimeout,
    RetentionError,
    StateError,
    TensorHubError,
)
from tensorhub.machine import InvariantBroken, Stateful
from tensorhub.manifest import Manifest, check_compatible
from tensorhub.messages import (
    Abandon,
    AddSource,
    Deregister,
    Done,
    DropSource,
    EpochChanged,
    ErrorInfo,
    Fill,
    FromWorker,
    GetManifest,
    Grant,
    ManifestReply,
    MustStay,
    OrderedOut,
    Outcome,
    Prepared,
    Publish,
    ReadFailed,
    ReadyToWrite,
    Refused,
    Resolve,
    Start,
    Withdraw,
    Withdrawable,
    Withdrawn,
    Write,
)
from tensorhub.messages import Registered as RegisteredReply
from tensorhub.types import HandleState, Medium, OpKey, OpKind, Purpose, VersionInfo
from tensorhub.worker.calls import (
    Action,
    AddPullSource,
    Call,
    CallHook,
    CloseCall,
    DropPullSource,
    Fence,
    FillCall,
    Finish,
    OpenMemory,
    PublishCall,
    RefuseCall,
    Registered,
    RegistrationFailed,
    ReopenMemory,
    Say,
    StartPull,
    StopPull,
    UnpublishCall,
)
from tensorhub.worker.enrolment import Content, Enrolment, Shard
from tensorhub.worker.states import HANDLE_TABLE, UNVOTED, Phase

MANIFESTS_KEPT_MAX = 16
# The coordinator ends calls at their deadline and knows why; a rank that does not hear of it ends them by itself later.
DEADLINE_SLACK_S = 2.0


@dataclass(slots=True)
class Running:
    """The call that runs now."""

    call: Call
    deadline: float
    timeout_s: float
    began: float
    phase: Phase = Phase.QUEUED
    key: OpKey | None = None  # of its group operation, once said
    generation: int = 0  # under which this call publishes or fills
    version: VersionInfo | None = None  # bound
    manifest: Manifest | None = None  # of the bound version
    grants: tuple[Grant, ...] = ()  # of the first Start or Write
    write: bool = False  # the coordinator has told every rank to overwrite
    stays: bool = False  # WITHDRAWING: the coordinator has said that a retained version would be lost
    deaf: bool = False  # a connection was lost in the midst of it, and perhaps that word
    request: int = 0  # of the question whose answer is awaited
    error: Exception | None = None  # with which it will end
    leases: set[str] = field(default_factory=set)  # that the pull reads under


class Member(Stateful[HandleState]):
    """The machine of one handle. `requests` and `generations` mint numbers that are used once."""

    table = HANDLE_TABLE

    def __init__(
        self,
        shard: Shard,
        *,
        requests: Callable[[], int],
        generations: Callable[[], int],
        manifests: dict[str, Manifest],
    ) -> None:
        super().__init__(HandleState.EMPTY)
        self.shard = shard
        self.content: Content | None = None  # READY or DRAINING: what it holds; FILLING: what it is filled with
        self.running: Running | None = None
        self.doubt: OpKey | None = None  # IN_DOUBT: the operation whose outcome is not known
        self._given_up: int | None = None  # what it held until the coordinator knew that content no more (R2)
        self._letting_go: int | None = None  # the generation of content that was given up without a call, until fenced
        self.enrolment = Enrolment(shard, requests)
        self._requests = requests
        self._generations = generations
        self._manifests = manifests  # by id; shared by a worker's handles
        self._fitting: set[str] = set()  # ids of manifests that fit this registration
        self._now = 0.0
        self._cause = 0
        self._actions: list[Action] = []

    def __repr__(self) -> str:
        phase = self.running.phase.value if self.running is not None else "idle"
        s = self.shard
        return f"<Member {s.model}/{s.group}[{s.rank}] {self.state.value} {phase}>"

    @property
    def version(self) -> int | None:
        """What `weights.version` shows."""
        if self.content is not None and self.state in (HandleState.READY, HandleState.DRAINING):
            return self.content.version.version
        return None

    @property
    def is_letting_go(self) -> bool:
        """Whether memory that holds nothing any more is still to be fenced: it is not the caller's to write."""
        return self._letting_go is not None

    # ------------------------------------------------------------------------------------------- inputs: the caller

    def begin(self, call: Call, timeout_s: float, now: float) -> list[Action]:
        """Start a call; raises StateError, and starts nothing, where the state forbids it."""
        self._enter(now)
        if self.running is not None:
            text = f"{self._name}: {_what(self.running.call)} is running on this handle; one call at a time"
            raise StateError(text, retryable=True)
        self._check_allowed(call)
        self.running = Running(call, now + timeout_s, timeout_s, now)
        self._go_on()
        return self._leave()

    def _check_allowed(self, call: Call) -> None:
        state = self.state
        if state is HandleState.CLOSED and not isinstance(call, CloseCall):
            raise StateError(f"{self._name} is closed; register again")
        if state is HandleState.IN_DOUBT:
            return  # judged again once the doubt is resolved
        match call:
            case PublishCall() if state in (HandleState.READY, HandleState.DRAINING):
                raise StateError(
                    f"{self._name} holds version {self.version}, which is published: unpublish() first, or use mutate()"
                )
            case FillCall(kind=OpKind.REPLICATE) if state in (HandleState.READY, HandleState.DRAINING):
                raise StateError(f"{self._name} holds version {self.version}: update() replaces it")
            case UnpublishCall() if state is not HandleState.READY and self._given_up is None:
                raise StateError(f"{self._name} is {state.value}: there is nothing to unpublish")
            case _:
                pass

    def cancel(self, error: Exception, now: float) -> list[Action]:
        """End the running call with `error`, if it is not this rank's to finish any more."""
        self._enter(now)
        run = self.running
        if run is not None and run.error is None:
            takes_back = isinstance(run.call, UnpublishCall | CloseCall)
            fence_s = DEADLINE_SLACK_S if takes_back else 0.0
            run.deadline = min(run.deadline, now + fence_s)  # who cancels waits for the coordinator only for the slack
            run.began = now
            if run.phase is Phase.WITHDRAWING:
                self._say_withdraw(run, hurry=True)  # it may have to stay
            else:
                self._give_up(error)
        return self._leave()

    def hook_returned(self, error: Exception | None, now: float) -> list[Action]:
        self._enter(now)
        run = self.running
        if run is not None and run.phase is Phase.HOOK:
            if error is not None:
                self._give_up(error)
            else:
                self._ready_to_write(run)
        return self._leave()

    # -------------------------------------------------------------------------------------- inputs: the owner's side

    def fenced(self, generation: int, now: float) -> list[Action]:
        """Nothing is read under that generation any more."""
        self._enter(now)
        self._say(Withdrawn(self.shard.registration, generation))
        if generation == self._letting_go:
            self._letting_go = None
            self._go_on()
        run, content = self.running, self.content
        if run is not None and run.phase is Phase.FENCING and content is not None and content.generation == generation:
            self._after_fence(run)
        return self._leave()

    def fence_failed(self, generation: int, now: float) -> list[Action]:
        """Accesses still run at the fence's deadline. The bytes are what they were: published they stay (G2, R4)."""
        self._enter(now)
        run, content = self.running, self.content
        if run is not None and run.phase is Phase.FENCING and content is not None and content.generation == generation:
            self._stays_published(run, content)
        return self._leave()

    def source_failed(self, lease: str, reason: str, detail: str, now: float) -> list[Action]:
        """A read has ended before its time (reason "dropped": because it was told to)."""
        self._enter(now)
        run = self.running
        if run is not None and run.key is not None and lease in run.leases:
            run.leases.discard(lease)
            self._say(ReadFailed(run.key, self.shard.rank, lease, reason, detail[:1000]))
        return self._leave()

    def pull_done(self, now: float) -> list[Action]:
        """Every chunk is in place and verified: vote."""
        self._enter(now)
        run = self.running
        if run is not None and run.phase is Phase.PULLING and run.key is not None:
            run.phase = Phase.VOTED
            self._say(Prepared(run.key, self.shard.rank))
            if not self.shard.serves:
                self._fetched(run)
        return self._leave()

    def pull_failed(self, error: TensorHubError, now: float) -> list[Action]:
        """The pull cannot go on with any source."""
        self._enter(now)
        run = self.running
        if run is not None and run.phase is Phase.PULLING:
            self._give_up(error)
        return self._leave()

    def pull_stopped(self, now: float) -> list[Action]:
        self._enter(now)
        run = self.running
        if run is not None and run.phase is Phase.STOPPING:
            self._torn(run)
        return self._leave()

    # ------------------------------------------------------------------------------------- inputs: the coordinator

    def connected(self, now: float) -> list[Action]:
        """A session is up: say what was left, what is held, and then (`_registered`) ask for what may be missing."""
        self._enter(now)
        self.enrolment.connected()
        if self.state is not HandleState.CLOSED:
            if self.enrolment.left is not None:
                self._say(self.enrolment.left)
            self._register()
        return self._leave()

    def disconnected(self, now: float) -> list[Action]:
        """Nobody can be told anything for now. An owner needs nobody to take its memory back."""
        self._enter(now)
        self.enrolment.disconnected()
        run = self.running
        if run is not None and run.phase is Phase.WITHDRAWING:
            self._take_unasked(run)
        elif run is not None and run.phase is Phase.DEREGISTERING:
            self._closed(run)
        return self._leave()

    def receive(
        self,
        message: RegisteredReply
        | Refused
        | Done
        | EpochChanged
        | Start
        | Write
        | AddSource
        | DropSource
        | Outcome
        | MustStay
        | Withdrawable
        | ManifestReply
        | OrderedOut,
        now: float,
    ) -> list[Action]:
        """The coordinator says something about this registration. What is stale changes nothing (G9)."""
        self._enter(now)
        run = self.running
        match message:
            case RegisteredReply():
                self._registered(message)
            case EpochChanged():
                self.enrolment.epoch_changed(message)
                self._call_again(message)
            case Outcome():
                self._outcome(message)
            case OrderedOut():
                self._ordered_out(message)
            case Refused() if self.enrolment.asked(message.request):
                self._refused(message.error)
            case _ if run is None:
                pass
            case Refused():
                if message.request == run.request and run.phase is Phase.WITHDRAWING:
                    self._must_stay(message.error.error())
                elif message.request == run.request:
                    self._give_up(message.error.error())
            case Done():
                if run.phase is Phase.DEREGISTERING and message.request == run.request:
                    self._closed(run)
            case MustStay():
                run.stays = run.stays or (run.phase is Phase.WITHDRAWING and message.request == run.request)
            case Withdrawable():
                if run.phase is Phase.WITHDRAWING and message.request == run.request:
                    self._fence_for(run)
            case ManifestReply():
                if run.phase is Phase.MANIFEST and message.request == run.request:
                    self._manifest_came(run, message.manifest)
            case Start() | Write() | AddSource() | DropSource():
                if message.key == run.key:
                    self._about_fill(run, message)
            case _:
                assert_never(message)
        return self._leave()

    # ------------------------------------------------------------------------------------------------------- time

    def next_deadline(self) -> float | None:
        run = self.running
        if run is None:
            return None
        if run.phase is Phase.WITHDRAWING and not run.stays:
            return (
                run.began + run.deadline
            ) / 2  # readers have half the time to leave by themselves, the fence has the rest
        return run.deadline + DEADLINE_SLACK_S

    def tick(self, now: float) -> list[Action]:
        """End a call whose deadline passed without a word from the coordinator."""
        self._enter(now)
        run, due = self.running, self.next_deadline()
        if run is not None and due is not None and now >= due and run.phase is Phase.WITHDRAWING:
            self._take_unasked(run)
        elif run is not None and due is not None and now >= due:
            run.deadline = now  # each further step gets DEADLINE_SLACK_S
            what = _what(run.call)
            if self.enrolment.online:
                self._give_up(OperationTimeout(f"{self._name}: {what} did not end within {run.timeout_s:g} s"))
            else:
                text = f"{self._name}: {what}: the coordinator could not be reached within {run.timeout_s:g} s"
                self._give_up(CoordinatorUnavailable(text))
        return self._leave()

    # ------------------------------------------------------------------------------------------ registration

    def _register(self) -> None:
        """Say what is held, or was voted for. Memory that is being taken back or filled is neither."""
        run, holds = self.running, None
        if self.state is HandleState.IN_DOUBT or (self.state is HandleState.READY and not self._fencing(run)):
            holds = self.content
        elif run is not None and run.phase in (Phase.VOTED, Phase.ABANDONING):
            holds = self._promised(run, run.call) if isinstance(run.call, PublishCall) else self.content
        self._say(self.enrolment.register(holds.held() if holds is not None else None))

    @staticmethod
    def _fencing(run: Running | None) -> bool:
        return run is not None and run.phase is Phase.FENCING

    def _promised(self, run: Running, call: PublishCall) -> Content:
        """What this rank has voted to publish; the content id is not known yet."""
        s = self.shard
        assert s.manifest is not None
        version = VersionInfo(s.model, call.version, "", s.manifest.nbytes, s.world_size)
        return Content(version, s.manifest, run.generation)

    def _registered(self, message: RegisteredReply) -> None:
        if not self.enrolment.asked(message.request):
            return
        first = self.enrolment.confirm(message)
        if not message.keep and self.state is HandleState.READY:
            number = self.version
            self._drop_content(HandleState.EMPTY, "ordered out: the coordinator does not know that content")
            self._given_up = number
        if first:
            self._actions.append(Registered())
            self._say_again()

    def _refused(self, info: ErrorInfo) -> None:
        """The coordinator does not take this memory (any more): no group call can be made."""
        self.enrolment.refusal = info
        self._actions.append(RegistrationFailed(info.error()))
        if self.running is not None:
            self._give_up(info.error())  # one for each call: what it says of the memory is that call's

    def _say_again(self) -> None:
        """After a new connection: ask for what may have been missed."""
        run = self.running
        if self.doubt is not None:
            if not self._publishes():
                self._say(Prepared(self.doubt, self.shard.rank))
            self._say(Resolve(self.doubt, self.shard.rank))
        if run is None:
            return
        match run.phase:
            case Phase.QUEUED:
                self._go_on()
                return  # nothing of it was said before
            case Phase.MANIFEST:
                self._ask_manifest(run)
            case Phase.VOTED if isinstance(run.call, PublishCall):
                self._say(self._publish_message(run, run.call))
            case Phase.ASKED if isinstance(run.call, FillCall):
                self._say(self._fill_message(run, run.call))
            case Phase.HELD if run.key is not None:
                self._say(ReadyToWrite(run.key, self.shard.rank))
            case Phase.VOTED if run.key is not None:
                self._say(Prepared(run.key, self.shard.rank))
            case _:
                pass
        if run.key is not None:
            run.deaf = True
            self._say(Resolve(run.key, self.shard.rank))

    # --------------------------------------------------------------------------------------------- going on

    def _go_on(self) -> None:
        """Say what a queued call has to say, as soon as somebody can hear it."""
        run = self.running
        if run is None or run.phase is not Phase.QUEUED or self._letting_go is not None:
            return
        if isinstance(run.call, UnpublishCall | CloseCall) and self.doubt is None:
            self._take_back(run)
            return
        if self.enrolment.refusal is not None:
            self._finish(error=self.enrolment.refusal.error())
            return
        if not self.enrolment.ready:
            return
        if self.doubt is not None:
            self._say(Resolve(self.doubt, self.shard.rank))
            return
        try:
            self._check_allowed(run.call)
        except StateError as error:
            self._finish(error=error)
            return
        match run.call:
            case PublishCall():
                self._publish(run, run.call)
            case FillCall():
                self._take_key(run)
                run.phase = Phase.ASKED
                self._say(self._fill_message(run, run.call))
            case RefuseCall():
                self._take_key(run)
                assert run.key is not None
                refusal = ErrorInfo.of(GroupAborted(run.call.reason))
                self._say(Abandon(run.key, self.shard.rank, refusal))
                self._finish()
            case UnpublishCall() | CloseCall():
                pass  # begun above
            case _:
                assert_never(run.call)

    def _take_key(self, run: Running) -> None:
        run.key = self.enrolment.take_key()
        run.generation = self._generations()

    def _call_again(self, message: EpochChanged) -> None:
        """The operation that this call named has ended without this rank; the call counts for the next one."""
        run = self.running
        if run is None or run.key is None or run.error is not None or run.key.epoch != message.epoch:
            return
        if run.key.sequence < message.sequence:
            match run.call:
                case PublishCall() if run.phase is Phase.VOTED:
                    run.key = self.enrolment.take_key()
                    self._say(self._publish_message(run, run.call))
                case FillCall() if run.phase is Phase.ASKED:
                    run.key = self.enrolment.take_key()
                    self._say(self._fill_message(run, run.call))
                case _:
                    pass

    def _publish(self, run: Running, call: PublishCall) -> None:
        """The promise begins here: readers may come the moment the coordinator has decided."""
        assert self.shard.manifest is not None
        self._take_key(run)
        self._actions.append(OpenMemory(run.generation, "", self.shard.manifest, complete=True))
        run.phase = Phase.VOTED
        self._say(self._publish_message(run, call))

    def _publish_message(self, run: Running, call: PublishCall) -> Publish:
        assert run.key is not None
        rank, registration = self.shard.rank, self.shard.registration
        return Publish(run.key, rank, registration, call.version, run.generation, max(0.0, run.deadline - self._now))

    def _fill_message(self, run: Running, call: FillCall) -> Fill:
        assert run.key is not None
        return Fill(
            key=run.key,
            rank=self.shard.rank,
            registration=self.shard.registration,
            kind=call.kind,
            selector=call.selector,
            at_least=call.at_least,
            generation=run.generation,
            hold=call.hold,
            staged=call.staged,
            medium=Medium.DEVICE,
            purpose=Purpose.USE,
            timeout_s=max(0.0, run.deadline - self._now),
        )

    # ---------------------------------------------------------------------------------------------- filling

    def _about_fill(self, run: Running, message: Start | Write | AddSource | DropSource) -> None:
        match message:
            case Start():
                if run.phase is Phase.ASKED:
                    run.version, run.write, run.grants = message.version, message.write, message.grants
                    self._find_manifest(run, message.manifest_id)
                elif run.phase is Phase.PULLING:
                    self._reconcile(run, message.grants)
                elif run.phase is Phase.HELD and message.write:
                    self._write(run, message.grants)
                elif run.phase is Phase.ABANDONING:
                    run.write = run.write or message.write  # it crossed our Abandon: nothing was written here
            case Write():
                if run.phase is Phase.HELD:
                    self._write(run, message.grants)
                elif run.phase is Phase.ABANDONING:
                    run.write = True  # it crossed our Abandon: nothing was written here
            case AddSource():
                self._add_source(run, message.grant)
            case DropSource():
                if run.phase is Phase.PULLING and message.lease in run.leases:
                    self._actions.append(DropPullSource(message.lease))
                else:
                    run.grants = tuple(g for g in run.grants if g.lease != message.lease)
                    self._say(ReadFailed(message.key, self.shard.rank, message.lease, "dropped", ""))
            case _:
                assert_never(message)

    def _add_source(self, run: Running, grant: Grant) -> None:
        if run.phase is Phase.PULLING:
            if grant.lease not in run.leases:
                run.leases.add(grant.lease)
                self._actions.append(AddPullSource(grant))
        elif run.phase in UNVOTED:
            run.grants = (*run.grants, grant)

    def _reconcile(self, run: Running, grants: tuple[Grant, ...]) -> None:
        """After a lost connection: the coordinator's list of our leases is the true one."""
        for lease in sorted(run.leases - {grant.lease for grant in grants}):
            self._actions.append(DropPullSource(lease))
        for grant in grants:
            self._add_source(run, grant)

    def _find_manifest(self, run: Running, manifest_id: str) -> None:
        manifest = self._manifests.get(manifest_id)
        if manifest is None:
            run.phase = Phase.MANIFEST
            self._ask_manifest(run)
        else:
            self._manifest_found(run, manifest)

    def _ask_manifest(self, run: Running) -> None:
        assert run.version is not None
        run.request = self._requests()
        self._say(GetManifest(run.request, self.shard.model, run.version.content_id, self.shard.number))

    def _manifest_came(self, run: Running, blob: bytes) -> None:
        try:
            manifest = Manifest.decode(blob)
        except TensorHubError as error:
            self._give_up(error)
            return
        while len(self._manifests) >= MANIFESTS_KEPT_MAX:
            del self._manifests[next(iter(self._manifests))]
        self._manifests[manifest.manifest_id] = manifest
        self._manifest_found(run, manifest)

    def _manifest_found(self, run: Running, manifest: Manifest) -> None:
        run.manifest, mine = manifest, self.shard.manifest
        if mine is not None and manifest.manifest_id not in self._fitting:
            try:
                check_compatible(manifest, mine)
            except TensorHubError as error:
                self._give_up(error)
                return
            self._fitting.add(manifest.manifest_id)
        if isinstance(run.call, FillCall) and run.call.hold:
            assert run.version is not None
            run.phase = Phase.HOOK
            self._actions.append(CallHook(run.version))
        else:
            self._ready_to_write(run)

    def _ready_to_write(self, run: Running) -> None:
        assert run.key is not None
        if run.write:
            self._write(run, run.grants)
        else:
            run.phase = Phase.HELD
            self._say(ReadyToWrite(run.key, self.shard.rank))

    def _write(self, run: Running, grants: tuple[Grant, ...]) -> None:
        """Every rank is ready: fence what this one holds, then fill."""
        run.write, run.grants = True, grants
        if self.state is HandleState.READY:
            self._fence_for(run)
        else:
            self._start_pull(run)

    def _start_pull(self, run: Running) -> None:
        assert run.version is not None
        assert run.manifest is not None
        self._become(HandleState.FILLING, f"filled with {run.version.version}")
        self.content = Content(run.version, run.manifest, run.generation)
        run.phase = Phase.PULLING
        run.leases = {grant.lease for grant in run.grants}
        if self.shard.serves:
            self._actions.append(OpenMemory(run.generation, run.version.content_id, run.manifest, complete=False))
        self._actions.append(StartPull(run.version, run.manifest, run.generation, run.grants))

    # ------------------------------------------------------------------------------------------- taking it back

    def _take_back(self, run: Running) -> None:
        if self.state is HandleState.READY:
            self._withdraw(run)
        elif isinstance(run.call, CloseCall) and self.state is not HandleState.CLOSED:
            self._deregister(run)
        elif self._given_up is not None:
            text = f"{self._name}: version {self._given_up}, which it held, is unknown to the coordinator"
            self._given_up = None
            why = "it was given up or rolled back while this worker was away, or the coordinator has lost its state"
            do = "Nobody reads the memory any more: write it, and publish a new version"
            self._finish(error=LeaseLost(f"{text}: {why}. {do}", retryable=False))
        else:
            self._finish()

    def _withdraw(self, run: Running) -> None:
        assert self.content is not None
        self._become(HandleState.DRAINING, "withdrawn")
        run.request = self._requests()
        if self.enrolment.ready:
            run.phase = Phase.WITHDRAWING
            self._say_withdraw(run, hurry=False)
        else:
            self._fence_for(run)

    def _say_withdraw(self, run: Running, *, hurry: bool) -> None:
        assert self.content is not None
        abandon = isinstance(run.call, CloseCall) and run.call.abandon
        left_s, registration = 0.0 if hurry else max(0.0, run.deadline - self._now), self.shard.registration
        self._say(Withdraw(run.request, registration, self.content.generation, left_s, abandon, hurry))

    def _must_stay(self, error: TensorHubError) -> None:
        """The coordinator does not let this memory go: it stays published, under the generation that was never closed."""
        self._become(HandleState.READY, "must stay")
        self._finish(error=error)

    def _take_unasked(self, run: Running) -> None:
        """No word came, or none can come: an owner needs nobody (R3), unless it knows that its version is retained (R4)."""
        if run.stays:
            text = (
                f"{self._name}: version {self.version} is retained, and the coordinator can not be asked who else holds it"
            )
            self._must_stay(RetentionError(f"{text}; it stays published: try again, or close(abandon=True)"))
        else:
            self._fence_for(run)

    def _fence_for(self, run: Running) -> None:
        assert self.content is not None
        run.phase = Phase.FENCING
        self._actions.append(Fence(self.content.generation, run.deadline))

    def _after_fence(self, run: Running) -> None:
        match run.call:
            case UnpublishCall():
                self._forget_content("unpublished")
                self._finish()
            case CloseCall():
                self._forget_content("closed")
                self._deregister(run)
            case FillCall() if run.error is None:
                self._start_pull(run)
            case FillCall():
                run.phase = Phase.ABANDONING  # given up between the fence and the first byte: nothing was written
                self._republish()
                self._finish(error=run.error)
            case _:
                raise InvariantBroken(f"{self}: {run.call} does not fence. Story:\n{self.story}")

    def _stays_published(self, run: Running, content: Content) -> None:
        """The fence was given up, and nothing was written: let readers in again, and end the call."""
        text = f"{self._name}: version {content.version.version} is still being read after {run.timeout_s:g} s"
        error = DrainTimeout(f"{text}: it stays published and must not be written; try again, with a longer timeout")
        if not isinstance(run.call, FillCall):
            self._become(HandleState.READY, "not fenced in time")
        elif run.error is None:
            self._abandon(run, error)
        if run.error is None or isinstance(run.error, OperationTimeout):
            run.error = error
        run.phase = Phase.ABANDONING
        self._republish()
        self._finish(error=run.error)

    def _forget_content(self, why: str) -> None:
        self.content = None
        self._become(HandleState.EMPTY, why)

    def _drop_content(self, state: HandleState, why: str) -> None:
        """Give up what is held. The next call waits for the fence, so that nobody counts on this memory any more."""
        assert self.content is not None
        self._letting_go = self.content.generation
        self._actions.append(Fence(self.content.generation))
        self.content = None
        self._become(state, why)

    def _ordered_out(self, message: OrderedOut) -> None:
        """What was held is retired. What is on its way out, or about to be overwritten, is fenced without that word; if it
        is announced again after all, the answer is that it is not kept.
        """
        held = self.content is not None and self.content.version.content_id == message.content_id
        if held and self.state is HandleState.READY and not self._fencing(self.running):
            self._drop_content(HandleState.EMPTY, message.reason)

    def _deregister(self, run: Running) -> None:
        if self.enrolment.ready:
            assert isinstance(run.call, CloseCall)
            run.phase, run.request = Phase.DEREGISTERING, self._requests()
            self._say(Deregister(run.request, self.shard.registration, run.call.abandon))
        else:
            self._closed(run)

    def _closed(self, run: Running) -> None:
        if self.content is not None:
            self._actions.append(Fence(self.content.generation))
            self.content = None
        if self.state is not HandleState.CLOSED:
            self._become(HandleState.CLOSED, "closed")
        self._finish(error=run.error)

    # ----------------------------------------------------------------------------------------------- decisions

    def _outcome(self, message: Outcome) -> None:
        run, left = self.running, self.enrolment.left
        if left is not None and left.key == message.key:
            self.enrolment.left = None
        if self.doubt == message.key:
            self.doubt = None
            self._resolved(message)
            self._go_on()
        elif run is not None and run.key == message.key:
            if message.committed:
                self._committed(run, message)
            else:
                self._aborted(run, message)
        elif left is not None and left.key == message.key:
            self._register()  # the call has ended without us; whatever became of it, this is what is held

    def _committed(self, run: Running, message: Outcome) -> None:
        version, changed = message.version, True
        if version is None:
            return
        match run.call:
            case PublishCall():
                self.content = self._promised(run, run.call)
                self.content.version = version
                self._become(HandleState.READY, f"published {version.version}")
            case FillCall() if run.phase is Phase.VOTED:
                self._become(HandleState.READY, f"filled with {version.version}")
            case FillCall() if self.content is not None and self.content.version.content_id == version.content_id:
                changed = False  # a barrier: this content was held already
            case FillCall() if self.content is None and run.phase in (Phase.ASKED, Phase.ABANDONING):
                changed = False  # as above, but it was rolled back since
            case _:
                raise InvariantBroken(f"{self}: committed before this rank voted. Story:\n{self.story}")
        self._announce_if_uncounted(message.key)
        self._finish(version=version, changed=changed)

    def _announce_if_uncounted(self, key: OpKey) -> None:
        """A coordinator that knows a commit from its records only does not know that this memory holds it."""
        if self.enrolment.is_older(key):
            self._register()

    def _aborted(self, run: Running, message: Outcome) -> None:
        info = message.error
        error = run.error or (info.error() if info is not None else GroupAborted("aborted"))
        match run.phase:
            case Phase.PULLING:
                self._stop_pull(run, error)
            case Phase.STOPPING | Phase.FENCING:
                run.error = error
            case Phase.VOTED if isinstance(run.call, FillCall):
                run.error = error
                self._torn(run)
            case Phase.VOTED | Phase.ABANDONING if isinstance(run.call, PublishCall):
                self._actions.append(Fence(run.generation))
                self._finish(error=error)
            case _:
                if run.write or run.deaf:  # the coordinator may count on a fill that was never begun
                    self._register()
                self._finish(error=error)

    def _republish(self) -> None:
        """The old version is whole, but closed: open and announce it again (R7)."""
        assert self.content is not None
        self.content.generation = self._generations()
        self._actions.append(ReopenMemory(self.content.generation))
        self._register()

    def _stop_pull(self, run: Running, error: Exception) -> None:
        run.error = error
        run.phase = Phase.STOPPING
        self._actions.append(StopPull())

    def _fetched(self, run: Running) -> None:
        """All of it is verified, and the caller's: no other memory depends on it, so there is no outcome to wait for."""
        self.content = None
        self._become(HandleState.CLOSED, "fetched")
        self._finish(version=run.version, changed=True)

    def _torn(self, run: Running) -> None:
        """The fill is broken off; nobody may read what is there."""
        assert self.content is not None
        self._actions.append(Fence(self.content.generation))
        self.content = None
        self._become(HandleState.TORN, "fill broken off")
        error = run.error
        if isinstance(error, TensorHubError):
            error.memory = "torn"
        self._finish(error=error)

    def _give_up(self, error: Exception) -> None:
        """End the call from this side, as far as that is still this rank's to do."""
        run = self.running
        assert run is not None
        match run.phase:
            case Phase.QUEUED:
                if self.doubt is not None and isinstance(error, TensorHubError):
                    error.memory = "in_doubt"
                self._finish(error=error)
            case Phase.ASKED | Phase.MANIFEST | Phase.HOOK | Phase.HELD:
                run.error = error
                run.phase = Phase.ABANDONING
                self._abandon(run, error)
            case Phase.FENCING:
                if run.key is not None:
                    run.error = error
                    self._abandon(run, error)
                # else: taking memory back; the fence ends by itself
            case Phase.PULLING:
                self._abandon(run, error)
                self._stop_pull(run, error)
            case Phase.VOTED if isinstance(run.call, PublishCall):
                run.error = error
                run.phase = Phase.ABANDONING
                self._abandon(run, error)
            case Phase.VOTED:
                self._doubt(run, error)
            case Phase.ABANDONING:
                if isinstance(run.call, PublishCall):
                    self._doubt(run, error)
                else:
                    if self.state is HandleState.READY and run.version is None and isinstance(run.error, TensorHubError):
                        run.error.memory = "in_doubt"  # if it holds that content already, the others may have ended well
                    self._finish(error=run.error)
            case Phase.WITHDRAWING:
                self._take_unasked(run)
            case Phase.DEREGISTERING:
                self._closed(run)
            case Phase.STOPPING:
                pass
            case _:
                assert_never(run.phase)

    def _abandon(self, run: Running, error: Exception) -> None:
        assert run.key is not None
        self._say(self.enrolment.abandon(run.key, _info(error)))

    def _doubt(self, run: Running, error: Exception) -> None:
        """Voted, and no word of the outcome: the memory stays as it is until somebody knows (R6)."""
        assert run.key is not None
        self.doubt = run.key
        if isinstance(run.call, PublishCall):
            self.content = self._promised(run, run.call)
        self._become(HandleState.IN_DOUBT, "voted, outcome unknown")
        if isinstance(error, TensorHubError):
            error.memory = "in_doubt"
        self._finish(error=error)

    def _publishes(self) -> bool:
        """Whether what is in doubt is a publication: its content id is the coordinator's to tell."""
        return self.content is not None and not self.content.version.content_id

    def _resolved(self, message: Outcome) -> None:
        """What became of the operation that was in doubt."""
        assert self.content is not None
        published = self._publishes()
        if message.committed and message.version is not None:
            self.content.version = message.version
            self._become(HandleState.READY, "doubt resolved: committed")
            self._announce_if_uncounted(message.key)
            return
        self._drop_content(HandleState.EMPTY if published else HandleState.TORN, "doubt resolved: aborted")

    # ------------------------------------------------------------------------------------------------- helpers

    @property
    def _name(self) -> str:
        return self.shard.title

    def _enter(self, now: float) -> None:
        self._now = max(now, self._now)
        self._cause += 1

    def _leave(self) -> list[Action]:
        actions, self._actions = self._actions, []
        return actions

    def _say(self, message: FromWorker) -> None:
        if self.enrolment.online:
            self._actions.append(Say(message))

    def _become(self, state: HandleState, why: str) -> None:
        self._given_up = None
        self.become(state, self._cause, self._now, why)

    def _finish(self, *, version: VersionInfo | None = None, changed: bool = False, error: Exception | None = None) -> None:
        self.running = None
        self._actions.append(Finish(version, changed, error))

    def check_invariants(self) -> None:
        """Raise InvariantBroken if the handle's parts disagree."""
        holds = self.content is not None
        needs = (HandleState.READY, HandleState.DRAINING, HandleState.FILLING, HandleState.IN_DOUBT)
        if holds != (self.state in needs):
            raise InvariantBroken(f"{self}: content {self.content} in state {self.state}. Story:\n{self.story}")
        if (self.doubt is not None) != (self.state is HandleState.IN_DOUBT):
            raise InvariantBroken(f"{self}: doubt {self.doubt} in state {self.state}. Story:\n{self.story}")
        if self.running is not None and self.running.phase is Phase.PULLING and self.state is not HandleState.FILLING:
            raise InvariantBroken(f"{self}: pulls in state {self.state}. Story:\n{self.story}")


def _what(call: Call) -> str:
    return call.kind.value if isinstance(call, FillCall) else type(call).__name__.removesuffix("Call").lower()


def _info(error: Exception) -> ErrorInfo:
    """As the other ranks hear it: that this one was cancelled or closed does not keep them from trying again."""
    if isinstance(error, StateError):
        return ErrorInfo.of(StateError(str(error), retryable=True))
    if isinstance(error, TensorHubError):
        return ErrorInfo.of(error)
    return ErrorInfo.of(GroupAborted(f"{type(error).__name__}: {error}"[:2000]))
