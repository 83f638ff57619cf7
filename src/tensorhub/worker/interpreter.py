"""One handle's calls, and the actions of its member, which are carried out one by one.

Theory of operation. The member's actions are queued in `todo`. The shell (`runtime.worker.handle`,
or a simulated one) takes the `next` action, carries it out, and only then takes another one. So
nothing is said, opened or finished before an earlier fence stands. A call begins here, and is over
when its `Finish` is carried out. The member is done with it earlier, while fences are still to be
carried out. One call runs at a time.

Where there is no memory to be opened, an action that needs the memory fails without being tried. A
registration that was given up has a last list of actions: end the pull, fence, let go of all
memory, and only then end the call. Later actions of the member are not carried out.

Responsible for what a caller may do now, for what a call raises in the end, for the end of a
registration, and for reports about memory. Not responsible for what the calls do (`worker.member`),
nor for how an action is carried out.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from math import inf
from typing import Protocol

from tensorhub.errors import Memory as TensorState, MutabilityViolation, StateError, TensorHubError
from tensorhub.layouts.reading import ReshardedManifest
from tensorhub.messages import DIGESTS_BYTES_MAX, DigestAgain, Digests, Origin, Publish, TellDigests
from tensorhub.model.digests import WIDTHS
from tensorhub.types import HandleState, OpKind, RegistrationId
from tensorhub.worker.calls import (
    Action,
    Call,
    CancelRoom,
    CloseCall,
    CopyLocally,
    Fence,
    FillCall,
    Finish,
    FreeMemory,
    FreeStaging,
    OpenGeneration,
    PublishCall,
    RegistrationConfirmed,
    RegistrationFailed,
    ReopenGeneration,
    Say,
    StartPull,
    StopPull,
    UnpublishCall,
    staging_of,
)
from tensorhub.worker.chunk_reports import tell
from tensorhub.worker.member import Member
from tensorhub.worker.mutation_guard import MutationGuard
from tensorhub.worker.publishing import check_has_shapes
from tensorhub.worker.states import HOLDING


class Made(Protocol):
    """See `worker.owner`."""

    def take_made(
        self, registration: RegistrationId, selection: str = "", *, if_all: bool = False
    ) -> tuple[list[tuple[int, int]], bool]: ...

    def selections(self, registration: RegistrationId) -> tuple[str, ...]: ...

    def chunk_count(self, registration: RegistrationId, selection: str = "") -> int: ...


class Origins(Protocol):
    """See `worker.owner`."""

    def origin(
        self, registration: RegistrationId, generation: int, chunk: int
    ) -> Origin | None: ...


class Interpreter:
    """The interpreter of one handle. `written`: see `MutationGuard`. `page_bytes`: of digests in
    one message.
    """

    def __init__(
        self,
        member: Member,
        written: Callable[[], Sequence[str]],
        page_bytes: int = DIGESTS_BYTES_MAX,
    ) -> None:
        self.member = member
        self.todo: deque[Action] = deque()
        self.guard = MutationGuard(member, written)
        self.was_filled = False  # the last content was read from other workers, not published here
        self._call: Call | None = None  # that was begun; its Finish was not carried out yet
        self._generation = 0  # under which the memory was opened last
        # why the last OpenGeneration has found no memory
        self._unopened: TensorHubError | None = None
        self._is_known = False  # the coordinator has once taken the registration
        # no caller calls any more: it was refused at once, or made for one call that is over
        self._is_done = False
        self._last_fence: Fence | None = None  # it was given up: what ends with it
        # with which a call ends that still runs at the last fence
        self._last_error: StateError | None = None
        self._gives_up_at = inf  # for the last fence
        self._is_let_go = False  # the last fence has ended
        self._tell = partial(tell, member.shard.registration, page_bytes=page_bytes)
        self._registration = RegistrationId(member.shard.registration)

    def __repr__(self) -> str:
        return f"<Interpreter of {self.member!r}, {len(self.todo)} to do>"

    # ----------------------------------------------------------------------------------------------
    # calls

    @property
    def is_busy(self) -> bool:
        """Whether a call runs, or its fences are not carried out yet."""
        return self._call is not None

    def check(self, call: Call) -> None:
        """Raise what a caller is told before this call begins: StateError, MutabilityViolation."""
        self._check_last_ended()
        state = self.member.state
        match call:
            case PublishCall() if state is HandleState.READY:
                self.guard.raise_spoiled()
            case UnpublishCall() if state is HandleState.EMPTY:
                self.guard.raise_spoiled()
            case FillCall():
                self.guard.raise_spoiled()
                if call.kind is OpKind.UPDATE:
                    self.guard.check_kept()
            case _:
                pass

    def call_before_body(self) -> UnpublishCall | None:
        """The call that `mutate` makes before its body. Raises MutabilityViolation where no call is
        needed, and a violation is to be told; StateError where nothing can be published.
        """
        check_has_shapes(self.member.shard)
        if (
            self.member.state in (HandleState.READY, HandleState.IN_DOUBT, HandleState.TORN)
            or self.member.has_pending_work
        ):
            return UnpublishCall(before_body=True)
        self.guard.raise_spoiled()
        return None

    def begin(self, call: Call, timeout_s: float, now: float) -> list[Action]:
        """Start a call; raises StateError, and starts nothing, where the handle's state forbids
        it.
        """
        self._check_last_ended()
        # a closed handle says so itself
        if self._last_fence is not None and self.member.state is not HandleState.CLOSED:
            raise StateError(f"{self.member.shard.title} was given up; register again")
        actions = self.member.begin(call, timeout_s, now)
        self.guard.call_begins()
        self._call = call
        return actions

    def cancelled(self, now: float) -> list[Action]:
        """The caller does not wait any more; other ranks and the log see why."""
        return self.member.cancel(StateError("the call was cancelled by its caller"), now)

    def finished(self, finish: Finish) -> None:
        """The Finish of the call was carried out: another call may begin."""
        call, self._call = self._call, None
        self._is_done = self._is_done or not self.member.shard.serves
        if finish.error is None and isinstance(call, PublishCall):
            self.was_filled = False
        elif finish.error is None and isinstance(call, FillCall):
            self.was_filled = self.was_filled or finish.changed

    def raise_for(self, call: Call, finish: Finish) -> None:
        """Raise what the caller is told at the end of this call."""
        if finish.error is not None:
            raise finish.error
        if isinstance(call, UnpublishCall | CloseCall):
            self.guard.raise_violation()
        elif isinstance(call, FillCall) and not finish.changed:
            self.guard.check_kept()

    def check_idle(self) -> None:
        """Raise StateError if a call runs on the handle, or the handle is closed."""
        self._check_last_ended()
        if self.member.state is HandleState.CLOSED:
            raise StateError(f"{self.member.shard.title} is closed; register again")

    def _check_last_ended(self) -> None:
        """A call is over when its fences are: the member is done with it earlier."""
        if self.is_busy:
            text = (
                f"{self.member.shard.title}: a call is still running on this handle; one call "
                f"at a time"
            )
            raise StateError(text, retryable=True)

    # ----------------------------------------------------------------------------------------------
    # actions

    @property
    def has_more(self) -> bool:
        """Whether an action is left, to be carried out now or later."""
        return bool(self.todo) or self._is_over

    @property
    def _is_over(self) -> bool:
        """Whether the handle gets no more calls, and its last action is carried out."""
        if (
            self.todo
            or self.is_busy
            or self.member.running is not None
            or self._last_fence is not None
        ):
            return False
        return self._is_done or self.member.state is HandleState.CLOSED

    @property
    def is_given_up(self) -> bool:
        """Whether only the actions that end the registration are carried out."""
        return self._last_fence is not None

    @property
    def is_gone(self) -> bool:
        """Whether the registration has ended, and no action is left for it."""
        return self._is_let_go and not self.todo

    def add(self, actions: Iterable[Action]) -> None:
        """Queue these actions of the member behind all earlier ones."""
        if self._last_fence is None:
            self.todo.extend(actions)

    def next(self, now: float) -> Action | None:
        """The action to carry out now; None: there is none."""
        if self._is_over:
            self.todo.extendleft(self.give_up(now))
        while self.todo:
            action = self.todo.popleft()
            match action:
                case OpenGeneration():
                    self._generation, self._unopened = action.generation, None
                case ReopenGeneration() if self._unopened is not None:
                    continue
                case ReopenGeneration():
                    self._generation = action.generation
                case StartPull() | CopyLocally() if (
                    not action.staged and self._unopened is not None
                ):
                    self.add(self.member.pull_failed(self._unopened, now))
                    continue
                # no reader could read it
                case Say(message=Publish()) if self._unopened is not None:
                    self.add(self.member.cancel(self._unopened, now))
                    continue
                case RegistrationConfirmed():
                    self._is_known = True
                case RegistrationFailed():
                    self._is_done = self._is_done or not self._is_known
                case _:
                    pass
            return action
        return None

    def not_opened(self, error: TensorHubError) -> None:
        """There is no memory that an OpenGeneration could open."""
        self._unopened = error

    # ----------------------------------------------------------------------------------------------
    # its end

    def give_up(self, now: float, gives_up_at: float = inf) -> list[Say]:
        """End this registration. Returns the last messages about the registration, for the
        coordinator.

        The memory is let go, and a call that still runs ends, once no access to the memory is left.
        At `gives_up_at` (the hub closes) the memory is left as it is, closed. A second call changes
        nothing but that time.
        """
        self._gives_up_at = min(self._gives_up_at, gives_up_at)
        if self._last_fence is not None:
            return []
        memory: TensorState = "torn" if self.member.state is HandleState.FILLING else "intact"
        memory = "in_doubt" if self.member.has_voted else memory
        ended = (
            f"{self.member.shard.title} was given up"
            if gives_up_at == inf
            else "the hub was closed"
        )
        self._last_error = StateError(f"{ended} while the call was running", memory=memory)
        self._last_fence = Fence(self._generation)
        self.todo.clear()
        self.todo.extend((CancelRoom(), StopPull(), self._last_fence))
        return [Say(message) for message in self.member.given_up(now)]

    def _let_go(self, *, stands: bool) -> None:
        self._is_let_go = True
        self.todo.extend((FreeMemory(), FreeStaging()) if stands else (FreeStaging(),))
        if self.is_busy:
            self.todo.append(Finish(error=self._last_error))

    # ----------------------------------------------------------------------------------------------
    # fences

    def fence_until(self, fence: Fence) -> float:
        """When the fence is given up, see `Member.fence_until`; inf: never."""
        if fence is self._last_fence:
            return self._gives_up_at
        return self.member.fence_until(fence)

    def fenced(self, fence: Fence, owner: Made, now: float) -> None:
        """The fence stands: no access to the memory is left."""
        if fence is self._last_fence:
            self._let_go(stands=True)
            return
        said = self.tell_made(owner)[0]  # the coordinator cannot ask for these any more
        # else it is overwritten next, or was never published
        if self.member.state is HandleState.DRAINING:
            self.guard.taken_back()
        self.add([*map(Say, said), *self.member.fenced(fence.generation, now)])

    def fence_failed(self, fence: Fence, now: float) -> None:
        """Accesses still run when the fence is given up."""
        if fence is self._last_fence:
            self._let_go(stands=False)
            return
        actions = self.member.fence_failed(fence.generation, now)
        if fence.until is not None:
            self.add(actions)
        elif self._last_fence is None:  # the fence is tried again: nothing overtakes it
            self.todo.extendleft(reversed(actions))

    # ----------------------------------------------------------------------------------------------
    # digests

    def digested_again(
        self,
        question: DigestAgain,
        changed: bool | None,
        digest: bytes,
        owner: Origins,
        now: float,
        broken: str = "",
    ) -> tuple[list[Action], MutabilityViolation]:
        """The answer to that question (R8), see `Member.digested_again`; and the error about memory
        that has changed, which the next call raises. `broken`: see `MutationGuard.changed`.
        """
        content, generation = self.member.content, question.generation
        error = MutabilityViolation("the memory has changed")
        chunk, selection = self.asked_about(question)
        if changed and content is not None and content.generation == generation:
            error = self.guard.changed(content, None if selection else chunk, broken)
        origin = None if selection else owner.origin(self._registration, generation, chunk)
        answer = self.member.digested_again
        return answer(
            question.inquiry, generation, changed, error, now, digest=digest, origin=origin
        ), error

    def asked_about(self, question: DigestAgain) -> tuple[int, str]:
        """The chunk of this memory that the question means, and its selection ("": the memory's own
        grid). Content of another layout was read in selections, and has their chunks in its own
        grid.
        """
        content = self.member.content
        if (
            question.selection
            and content is not None
            and isinstance(content.manifest, ReshardedManifest)
        ):
            chunks = content.manifest.chunks_of(question.shard, question.selection) or ()
            if question.chunk < len(chunks):
                return chunks[question.chunk], ""
        return question.chunk, question.selection

    def tell_made(self, owner: Made, *, if_all: bool = False) -> tuple[list[Digests], bool]:
        """The messages about digests that were made of the published content, and of its selections
        (`if_all`: of each grid once all are made), and whether nothing is left to say.
        """
        content = self.member.content
        if content is None or not content.published or self.member.state not in HOLDING:
            return [], True
        width, said, is_all = WIDTHS[content.manifest.digest], list[Digests](), True
        for selection in ("", *owner.selections(self._registration)):
            known, are_all = owner.take_made(self._registration, selection, if_all=if_all)
            is_all = is_all and are_all
            if known:
                chunks = owner.chunk_count(self._registration, selection)
                said += self._tell(
                    content.generation, chunks, width, known, last=are_all, selection=selection
                )
        return said, is_all

    def must_make(self, question: TellDigests) -> bool:
        """Whether digests are made for the answer: only of published content. Other content has the
        digests of its read.
        """
        content = self.member.content
        return (
            content is not None and content.published and content.generation == question.generation
        )

    def tell_digests(
        self,
        question: TellDigests,
        listed: Callable[[RegistrationId, str], tuple[int, Sequence[int | None]] | None],
    ) -> list[Digests]:
        """The digests of the chunks of this memory, or of its staged content (R8). `listed`: the
        width and all digests under the question's generation, of a selection or ("") of the
        memory's own grid.
        """
        manifest, selection, own = (
            self.member.manifest_under(question.generation),
            question.selection,
            None,
        )
        if selection and isinstance(manifest, ReshardedManifest):
            # else other workers read that selection here
            own = manifest.chunks_of(question.shard, selection)
        tell = partial(
            self._tell, question.generation, last=True, selection=selection, shard=question.shard
        )
        for target in (self._registration, RegistrationId(staging_of(self._registration))):
            width, digests = listed(target, selection if own is None else "") or (0, ())
            if not width:
                continue
            chunks = own if own is not None else range(len(digests))
            named = ((number, digests[chunk]) for number, chunk in enumerate(chunks))
            return list(
                tell(
                    len(chunks),
                    width,
                    [(number, digest) for number, digest in named if digest is not None],
                )
            )
        return list(tell(0, 0, []))
