"""A running call: the part that all calls share, and the part that all calls of a group share (R6).

Each call is an object of its own, which lives from `begin` to its `Finish`, and moves from `Phase`
to `Phase` along the table of its kind. Each kind of call is a module: `publishing`, `filling`,
`leaving`. The machine of the handle (`worker.member`) tells the call only the events that concern
it.

Responsible for a call's deadline, for how it is given up, and for a vote without an answer. Not
responsible for the content of the memory (`worker.member_memory`).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import ClassVar, Generic, TypeVar

from tensorhub.errors import (
    DrainTimeout,
    GroupAborted,
    Memory as TensorState,
    OperationTimeout,
    StateError,
    TensorHubError,
    text_of,
    unreachable,
)
from tensorhub.machine import Stateful
from tensorhub.messages import FORMER_KEYS_MAX, Abandon, EpochChanged, ErrorInfo, Resolve
from tensorhub.types import HandleState, OpKey, VersionInfo
from tensorhub.worker.calls import Call, Finish, RefuseCall
from tensorhub.worker.member_context import MemberContext
from tensorhub.worker.member_memory import MemberMemory
from tensorhub.worker.states import AT_ONCE_TABLE, OVER, Phase

C = TypeVar("C", bound=Call)

# The coordinator ends calls at their deadline and knows why; a rank that hears nothing ends its
# call by itself later. Offline it hears nothing, and waits no longer than the deadline.
DEADLINE_SLACK_S = 2.0
ENDS_BY_ITSELF = (Phase.FENCING, Phase.STOPPING, Phase.APPLYING)  # soon, whatever the deadline
ERROR_CHARS_MAX = 2000  # of an error for other ranks: a coordinator passes no more on


class ActiveCall(Stateful[Phase], Generic[C], ABC):
    """The call that runs now; `call` is its caller's request."""

    alone: ClassVar[bool] = False  # can be made without the coordinator
    what: str  # what errors call it

    def __init__(
        self, call: C, context: MemberContext, memory: MemberMemory, timeout_s: float
    ) -> None:
        super().__init__(Phase.QUEUED)
        self.story = memory.story  # one for the handle and its calls
        self.timeout_s = timeout_s
        self.deadline = context.now + timeout_s
        self.key: OpKey | None = None  # of its group operation, once said
        self.request = 0  # of the question that awaits an answer
        self.error: Exception | None = None  # with which it will end
        # how often it was bound to another content, because the previous content was gone
        self.rebinds = 0
        self.by_source = False  # see `messages.Outcome`
        self._call = call
        self._context = context
        self._memory = memory

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.what} {self.phase.value} until {self.deadline:.3f}>"

    @property
    def phase(self) -> Phase:
        return self.state

    @property
    def over(self) -> bool:
        """Whether Finish was said."""
        return self.state is OVER

    def enter(self, phase: Phase) -> None:
        self.become(phase, self._context.cause, self._context.now, self.what)

    # -- its beginning and end

    def check_allowed(self) -> None:
        """Raise StateError where the handle's state forbids this call. In doubt it is judged again
        afterwards.
        """
        if self._memory.state is HandleState.CLOSED:
            raise StateError(f"{self._context.title} is closed; register again")

    @abstractmethod
    def start(self) -> None:
        """Say the first message of the call: QUEUED is over."""

    def finish(
        self,
        *,
        version: VersionInfo | None = None,
        changed: bool = False,
        error: Exception | None = None,
    ) -> None:
        self.enter(Phase.OVER)
        self._context.act(Finish(version, changed, error, self.rebinds, self.by_source))

    # -- given up from this side

    def cancel(self, error: Exception) -> None:
        """The caller does not want the call any more: end with `error`, if this rank may still end
        the call.
        """
        self.deadline = min(self.deadline, self._context.now)
        self.give_up(error)

    def give_up(self, error: Exception) -> None:
        """End the call from this side, if this rank may still end it."""
        if self.phase is not Phase.QUEUED:
            self._give_up(error)
            return
        if self._memory.doubt is not None:
            set_memory(error, "in_doubt")
        self._end_queued(error)

    def _end_queued(self, error: Exception) -> None:
        if self._memory.unfenced is None:
            self.finish(error=error)
        else:  # a Finish would wait for that fence
            self.error, self.deadline = error, min(self.deadline, self._context.now)

    def _give_up(self, error: Exception) -> None:
        """End a call that has started. (By default a call ends when it starts.)"""

    def next_deadline(self) -> float:
        ends_by_itself = self.phase in ENDS_BY_ITSELF or self._waits_for_fence()
        has_slack = self._context.session.online or ends_by_itself
        return self.deadline + (DEADLINE_SLACK_S if has_slack else 0.0)

    def _waits_for_fence(self) -> bool:
        """Whether it begins, or ends by `never_began`, once an earlier fence has ended."""
        return self.phase is Phase.QUEUED and self._memory.unfenced is not None

    def overdue(self, fault: TensorHubError | None) -> None:
        """The deadline has passed without a word from the coordinator. `fault`: see
        `Member.tick`.
        """
        self.deadline = self._context.now  # each further step gets DEADLINE_SLACK_S
        if self._waits_for_fence():
            return
        if self._context.session.online:
            text = f"{self._context.title}: {self.what} did not end within {self.timeout_s:g} s"
            self.give_up(OperationTimeout(text))
        else:
            text = (
                f"{self._context.title}: {self.what}: the coordinator could not be reached "
                f"within {self.timeout_s:g} s"
            )
            self.give_up(unreachable(text, fault))

    def waits_for(self, request: int) -> bool:
        """Whether the call waits for the answer to that request."""
        return request == self.request

    def refused(self, error: TensorHubError) -> None:
        """The coordinator has refused the request."""
        self.give_up(error)

    # -- for those that fence, which have `fenced` and `fence_failed`

    def _fence(self) -> None:
        self.enter(Phase.FENCING)
        self._memory.fence(self.deadline)

    def never_began(self) -> None:
        """QUEUED: the fence that the call waits for does not stand in time."""
        self.finish(error=self.error or self._still_read())

    def _still_read(self) -> DrainTimeout:
        what, stays = f"version {self._memory.version}", "stays published and "
        if self._memory.unfenced is not None:
            what, stays = "what it held before", ""
        return DrainTimeout(
            f"{self._context.title}: {what} is still being read after {self.timeout_s:g} s: "
            f"it {stays}must not be written; try again, with a longer timeout"
        )


class GroupCall(ActiveCall[C]):
    """A call that all ranks of the group make, and that ends alike for all of them (G4)."""

    # the call was said, and may still join another operation than the named one
    unbound: ClassVar[Phase]

    def __init__(
        self, call: C, context: MemberContext, memory: MemberMemory, timeout_s: float
    ) -> None:
        super().__init__(call, context, memory, timeout_s)
        self.generation = 0  # under which this call publishes or fills
        self.former: tuple[OpKey, ...] = ()  # the operations that it named before, newest last

    @property
    def operation(self) -> OpKey:
        """The key of its operation; the call has been said."""
        assert self.key is not None
        return self.key

    def _take_key(self) -> None:
        if self.key is None:
            self.generation = self._context.new_generation()
        else:
            self.former = (*self.former, self.key)[-FORMER_KEYS_MAX:]
        self.key = self._context.session.take_key()

    @abstractmethod
    def _say_call(self) -> None: ...

    def epoch_changed(self, message: EpochChanged) -> None:
        """If the operation that this call named has ended without this rank, the call counts for
        the next one.
        """
        key = self.key
        if key is None or self.error is not None or not self._is_unbound():
            return
        if key.epoch == message.epoch and key.sequence < message.sequence:
            self._take_key()
            self._say_call()

    def _is_unbound(self) -> bool:
        return self.phase is self.unbound

    def say_again(self) -> None:
        """After a new connection: ask for what may have been missed."""
        self._say_phase_again()
        self._context.say(Resolve(self.operation, self._context.shard.rank))

    @abstractmethod
    def _say_phase_again(self) -> None:
        """Repeat the messages of the call that the coordinator may have missed."""

    # -- its end

    @abstractmethod
    def committed(self, version: VersionInfo) -> None: ...

    @abstractmethod
    def aborted(self, error: Exception) -> None: ...

    def state_lost(self, error: Exception) -> bool:
        """No coordinator can know the outcome any more. True: the call ends with that error, not
        well or with its own.
        """
        if self.phase is Phase.QUEUED:
            self._end_queued(error)
            return True
        own = None if self._may_be_committed() else self.error
        self.aborted(own or error)
        return own is None and self.phase is not Phase.APPLYING

    @abstractmethod
    def _may_be_committed(self) -> bool:
        """Whether the operation may have been committed, by all that this rank knows."""

    @abstractmethod
    def unheard_of(self, error: Exception) -> None:
        """A new coordinator has no record of the operation: the operation was not committed, and
        will not be.
        """

    def again(self, error: Exception) -> None:
        """The operation was aborted so that all its ranks repeat the call."""
        self.aborted(error)

    def _finish_committed(self, version: VersionInfo, *, changed: bool = True) -> None:
        self._memory.restate_after(self.operation)
        self.finish(version=version, changed=changed)

    def _abandon(self, error: Exception) -> None:
        self._context.say(self._context.session.abandon(self.operation, _to_others(error)))

    def _doubt(self, error: Exception) -> None:
        """This rank has voted, and has not heard the outcome (R6)."""
        self._memory.doubt_outcome(self.operation)
        set_memory(error, "in_doubt")
        self.finish(error=error)


class Refusing(ActiveCall[RefuseCall]):
    """This rank does not make its next group call: the group's call ends at once."""

    machine, table, what = "immediate call", AT_ONCE_TABLE, "refuse"

    def start(self) -> None:
        self._context.say(
            Abandon(self._context.session.take_key(), self._context.shard.rank, self._call.error)
        )
        self.finish()


def set_memory(error: Exception, memory: TensorState) -> None:
    """Have the error tell the caller in which state the memory is."""
    if isinstance(error, TensorHubError):
        error.memory = memory


def _to_others(error: Exception) -> ErrorInfo:
    """The error for the group's other ranks: a rank that was cancelled or closed does not keep them
    from a retry.
    """
    if isinstance(error, StateError):
        error = StateError(str(error), retryable=True)
    elif not isinstance(error, TensorHubError):
        error = GroupAborted(text_of(error))
    return ErrorInfo.of(error).brief(ERROR_CHARS_MAX)
