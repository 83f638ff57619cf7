"""One handle's calls, and the actions that its member wants carried out, one after the other.

Theory of operation. The member's actions are queued in `todo`. The shell (`runtime.worker.handle`, or a simulated one) takes
the first action, carries it out, and only then takes the next. So nothing is said, opened or finished before an earlier
fence stands. A call begins here, and is over when its `Finish` is carried out. The member is done with it earlier, while
fences are still to be carried out. One call runs at a time.

Responsible for what a caller may do now, for what a call raises in the end, and for reports about memory. Not responsible
for what the calls do (`worker.member`), nor for how an action is carried out.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from math import inf
from typing import Protocol

from tensorhub.digests import WIDTHS
from tensorhub.errors import Memory as TensorState, MutabilityViolation, StateError
from tensorhub.messages import DIGESTS_BYTES_MAX, DigestAgain, Digests, Origin, TellDigests
from tensorhub.types import HandleState, OpKind, RegistrationId
from tensorhub.worker.calls import Action, Call, CloseCall, Fence, FillCall, Finish, PublishCall, UnpublishCall, staging_of
from tensorhub.worker.chunk_reports import tell
from tensorhub.worker.member import Member
from tensorhub.worker.mutation_guard import MutationGuard
from tensorhub.worker.publishing import check_has_shapes

HOLDING = (HandleState.READY, HandleState.DRAINING)


class Made(Protocol):
    """See `worker.owner`."""

    def take_made(self, registration: RegistrationId, *, if_all: bool = False) -> tuple[list[tuple[int, int]], bool]: ...


class Origins(Protocol):
    """See `worker.owner`."""

    def origin(self, registration: RegistrationId, generation: int, chunk: int) -> Origin | None: ...


class Interpreter:
    """That of one handle. `written`: see `MutationGuard`. `page_bytes`: of digests in one message."""

    def __init__(self, member: Member, written: Callable[[], Sequence[str]], page_bytes: int = DIGESTS_BYTES_MAX) -> None:
        self.member = member
        self.todo: deque[Action] = deque()
        self.guard = MutationGuard(member, written)
        self.was_filled = False  # what the memory got last came from others, not from its publisher
        self._call: Call | None = None  # that was begun, and whose Finish was not carried out
        self._has_ended = False  # nobody carries out what a call would want
        self._tell = partial(tell, member.shard.registration, page_bytes=page_bytes)
        self._registration = RegistrationId(member.shard.registration)

    def __repr__(self) -> str:
        return f"<Interpreter of {self.member!r}, {len(self.todo)} to do>"

    # ------------------------------------------------------------------------------------------------- calls

    @property
    def is_busy(self) -> bool:
        """Whether a call runs, or its fences."""
        return self._call is not None

    @property
    def is_over(self) -> bool:
        """Whether the registration is closed, and nothing is left to be done for it."""
        return self.member.state is HandleState.CLOSED and self.member.running is None and not self.todo

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
        """What `mutate` calls before its body. Raises MutabilityViolation where there is nothing to call, and to be told;
        StateError where nothing can be published.
        """
        check_has_shapes(self.member.shard)
        if self.member.state in (HandleState.READY, HandleState.IN_DOUBT):
            return UnpublishCall()
        self.guard.raise_spoiled()
        return None

    def begin(self, call: Call, timeout_s: float, now: float) -> list[Action]:
        """Start a call; raises StateError, and starts nothing, where the handle's state forbids it."""
        self._check_last_ended()
        if self._has_ended and self.member.state is not HandleState.CLOSED:  # that one says so itself
            raise StateError(f"{self.member.shard.title} was given up; register again")
        actions = self.member.begin(call, timeout_s, now)
        self.guard.call_begins()
        self._call = call
        return actions

    def cancelled(self, now: float) -> list[Action]:
        """Who called does not wait any more; other ranks and the log see why."""
        return self.member.cancel(StateError("the call was cancelled by its caller"), now)

    def finished(self, finish: Finish) -> None:
        """Its Finish was carried out: another call may begin."""
        call, self._call = self._call, None
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

    def give_up(self) -> Finish:
        """Nothing is carried out any more. What a call that still runs ends with."""
        self._has_ended = True
        memory: TensorState = "torn" if self.member.state is HandleState.FILLING else "intact"
        return Finish(error=StateError("the hub was closed while the call was running", memory=memory))

    def check_idle(self) -> None:
        """Raise StateError if the memory is not the caller's to write: a call runs on it, or it is closed."""
        self._check_last_ended()
        title = self.member.shard.title
        if self.member.state is HandleState.CLOSED:
            raise StateError(f"{title} is closed; register again")
        if self.member.has_pending_work:
            text = f"{title}: what it held was ordered out, and is still being read; try again"
            raise StateError(text, retryable=True)

    def _check_last_ended(self) -> None:
        """A call is over when its fences are: the member is done with it earlier."""
        if self.is_busy:
            text = f"{self.member.shard.title}: a call is still running on this handle; one call at a time"
            raise StateError(text, retryable=True)

    # ------------------------------------------------------------------------------------------------- fences

    def fence_until(self, fence: Fence) -> float:
        """When it is given up: by its own deadline, or because its call was cancelled since; inf: never."""
        if fence.until is None:
            return inf
        until = self.member.fence_until
        return fence.until if until is None else min(fence.until, until)

    def fenced(self, fence: Fence, now: float) -> list[Action]:
        """It stands: nobody reads that memory."""
        if self.member.state is HandleState.DRAINING:  # else it is overwritten next, or was never published
            self.guard.taken_back()
        return self.member.fenced(fence.generation, now)

    # ------------------------------------------------------------------------------------------------- digests

    def digested_again(
        self, question: DigestAgain, changed: bool | None, digest: bytes, owner: Origins, now: float
    ) -> tuple[list[Action], MutabilityViolation]:
        """The answer to that question (R8), see `Member.digested_again`; and what is wrong with memory that has changed: the
        next call is told.
        """
        content, generation = self.member.content, question.generation
        error = MutabilityViolation("the memory has changed")
        if changed and content is not None and content.generation == generation:
            error = self.guard.changed(content, question.chunk)
        origin = owner.origin(self._registration, generation, question.chunk)
        answer = self.member.digested_again
        return answer(question.inquiry, generation, changed, error, now, digest=digest, origin=origin), error

    def tell_made(self, owner: Made, *, if_all: bool = False) -> tuple[list[Digests], bool]:
        """What is said of the digests that were made of what is published (`if_all`: once it is all), and whether nothing is
        left to say.
        """
        content = self.member.content
        if content is None or not content.published or self.member.state not in HOLDING:
            return [], True
        known, are_all = owner.take_made(self._registration, if_all=if_all)
        width = WIDTHS[content.manifest.digest]
        said = self._tell(content.generation, content.manifest.chunk_count, width, known, last=are_all)
        return list(said) if known else [], are_all

    def must_make(self, question: TellDigests) -> bool:
        """Whether digests are made for the answer: all of what is published. What was read has those it was read with."""
        content = self.member.content
        return (
            content is not None and content.published and content.generation == question.generation and not question.origin
        )

    def tell_digests(
        self,
        question: TellDigests,
        listed: Callable[[RegistrationId], tuple[int, Sequence[int | None]] | None],
        read_from: Callable[[RegistrationId], Iterable[int]],
    ) -> list[Digests]:
        """Which digests the chunks of this memory have, or of what is staged for it (R8). `listed`: their width and all of
        them, under the question's generation; `read_from`: which were read at its origin.
        """
        for target in (self._registration, RegistrationId(staging_of(self._registration))):
            width, digests = listed(target) or (0, ())
            if width:
                chunks = read_from(target) if question.origin else range(len(digests))
                known = [(chunk, digest) for chunk in chunks if (digest := digests[chunk]) is not None]
                return list(self._tell(question.generation, len(digests), width, known, last=True))
        return list(self._tell(question.generation, 0, 0, [], last=True))
