"""A rank takes its memory back (R3, R4): unpublish and close; for a host copy, release.

The coordinator is asked first, so that readers can be moved and a retained version stays. But an
owner can act alone. It waits for the answer half of its time, and has the rest for the fence. An
owner that knows that its version is retained waits for the leave. If it is cut off, it waits until
its own lease is over: from then on the coordinator does not count on it (R4).
"""

from __future__ import annotations

from abc import abstractmethod
from math import inf
from typing import ClassVar

from tensorhub.errors import LeaseLost, RetentionError, StateError, TensorHubError
from tensorhub.machine import InvariantBroken
from tensorhub.messages import Deregister, Done, LeaveGranted, LeaveRequest
from tensorhub.types import HandleState
from tensorhub.worker.active_call import DEADLINE_SLACK_S, ActiveCall, C
from tensorhub.worker.calls import CloseCall, FreeMemory, ReleaseCall, UnpublishCall
from tensorhub.worker.member_context import MemberContext
from tensorhub.worker.member_memory import MemberMemory
from tensorhub.worker.publishing import torn
from tensorhub.worker.states import LEAVE_TABLE, Phase


class Leaving(ActiveCall[C]):
    """A handle that holds content is DRAINING meanwhile."""

    machine, table = "leave", LEAVE_TABLE
    alone = True
    _closes: ClassVar[bool] = False

    def __init__(
        self, call: C, context: MemberContext, memory: MemberMemory, timeout_s: float
    ) -> None:
        super().__init__(call, context, memory, timeout_s)
        self._began = context.now
        # it may leave, whatever is lost with it
        self._abandon = isinstance(call, CloseCall) and call.abandon

    def start(self) -> None:
        if self._memory.state is HandleState.READY:
            self._withdraw()
        else:
            self._holds_nothing()

    @abstractmethod
    def _holds_nothing(self) -> None:
        """There is nothing to be fenced."""

    # -------------------------------------------------------------------------------------------
    # asking for the leave

    def _withdraw(self) -> None:
        self._memory.withdraw()
        self.enter(Phase.WITHDRAWING)
        if self._context.session.ready:
            self.say_again()
        else:
            self._take_unasked()

    def say_again(self) -> None:
        """WITHDRAWING: ask. Over a new connection the wish is a new one."""
        if self.phase is Phase.WITHDRAWING:
            self._ask(max(0.0, self.deadline - self._context.now))

    def _ask(self, timeout_s: float) -> None:
        """The answer to the newest request counts."""
        self.request = self._context.new_request()
        content = self._memory.content
        assert content is not None
        registration = self._context.shard.registration
        self._context.say(
            LeaveRequest(
                self.request,
                registration,
                content.generation,
                timeout_s,
                self._abandon,
                self._closes,
            )
        )

    def answered(self, message: LeaveGranted | Done) -> None:
        """The coordinator has something to say to a question of this call."""
        if (
            self.phase is Phase.WITHDRAWING
            and message.request == self.request
            and isinstance(message, LeaveGranted)
        ):
            self._fence()

    def refused(self, error: TensorHubError) -> None:
        if self.phase is Phase.WITHDRAWING:
            self._must_stay(error)
        else:
            self.give_up(error)

    def _must_stay(self, error: TensorHubError) -> None:
        """The coordinator does not let this memory go: it stays published, under the generation
        that was never closed.
        """
        self._memory.stay("must stay")
        self.finish(error=error)

    def _take_unasked(self) -> None:
        """No answer came, or none can come: an owner acts alone (R3), unless it knows that its
        version is retained (R4).
        """
        if self._context.now >= self._free_at():
            self._fence()
        elif self._context.now >= self.deadline:
            text = f"{self._context.title}: version {self._memory.version} is retained"
            text += ", and the coordinator can not be asked who else holds it"
            self._must_stay(
                RetentionError(f"{text}; it stays published: try again, or close(abandon=True)")
            )

    def _free_at(self) -> float:
        """When this owner may fence without a leave: once its lease is over, its memory counts for
        retention nowhere.
        """
        content, session = self._memory.content, self._context.session
        assert content is not None
        if not content.retained or self._abandon:
            return -inf
        shard = self._context.shard
        # else the shards of all ranks would stop serving with this shard
        alone = shard.world_size == 1
        if (
            alone
            and not self._closes
            and self._context.copies.keep(
                shard, content.version.content_id, content.manifest.grid_id
            )
        ):
            return -inf
        return inf if session.online else session.lease_over

    def next_deadline(self) -> float:
        if self.phase is not Phase.WITHDRAWING:
            return super().next_deadline()
        free_at = self._free_at()
        if free_at == -inf:
            # readers have half the time to leave, the fence has the rest
            return (self._began + self.deadline) / 2
        return super().next_deadline() if free_at == inf else min(free_at, self.deadline)

    def overdue(self, fault: TensorHubError | None) -> None:
        if self.phase is Phase.WITHDRAWING:
            self._take_unasked()
        else:
            super().overdue(fault)

    def disconnected(self) -> None:
        """The connection to the coordinator is lost."""
        if self.phase is Phase.WITHDRAWING:
            self._take_unasked()

    # ----------------------------------------------------------------------------------------------
    # the fence

    @abstractmethod
    def fenced(self) -> None:
        """FENCING: the fence stands, so no reader is left."""

    def fence_failed(self) -> None:
        """FENCING: accesses still run at the deadline."""
        error = self._still_read()
        self._memory.stay("not fenced in time")
        self._memory.reopen()
        self.finish(error=error)

    # ----------------------------------------------------------------------------------------------
    # given up

    def cancel(self, error: Exception) -> None:
        """A cancelled call waits for the coordinator's answer no longer than the slack."""
        self._began = self._context.now
        self.deadline = min(self.deadline, self._began + DEADLINE_SLACK_S)
        if self.phase is not Phase.WITHDRAWING:
            self.give_up(error)
        elif self._context.session.online:
            self._ask(0.0)  # the version may have to stay
        else:
            self.deadline = self._context.now
            self._take_unasked()

    def _give_up(self, error: Exception) -> None:
        match self.phase:
            case Phase.WITHDRAWING:
                self._take_unasked()
            case Phase.FENCING:
                pass  # it ends by itself
            case _:
                raise InvariantBroken(
                    f"{self} is in no phase of a leave. Story:\n{self._memory.story}"
                )


class Unpublishing(Leaving[UnpublishCall]):
    """Over when the memory is fenced."""

    what = "unpublish"

    def __init__(
        self, call: UnpublishCall, context: MemberContext, memory: MemberMemory, timeout_s: float
    ) -> None:
        super().__init__(call, context, memory, timeout_s)
        self._tells_loss = not call.before_body or memory.state is HandleState.READY
        # the caller has written all of it anew
        self._mends = not call.before_body and memory.state is HandleState.TORN

    def check_allowed(self) -> None:
        super().check_allowed()
        published = self._memory.state in (HandleState.READY, HandleState.IN_DOUBT)
        if not (
            published or self._mends or self._call.before_body or self._memory.given_up is not None
        ):
            state = self._memory.state.value
            raise StateError(f"{self._context.title} is {state}: there is nothing to unpublish")

    def _holds_nothing(self) -> None:
        """The version was given up without this call, unless a doubt about the version has just
        been resolved.
        """
        if self._mends:
            self._memory.forget("written anew")
        elif self._call.before_body and self._memory.state is HandleState.TORN:
            self.finish(error=torn(self._context.title))
            return
        number, self._memory.given_up = self._memory.given_up, None
        if number is None or not self._tells_loss:
            self.finish()
            return
        self._memory.is_loss_unreported = False
        text = (
            f"{self._context.title}: version {number}, which it held, is unknown to the coordinator"
        )
        why = (
            "it was given up or rolled back while this worker was away, or the coordinator has "
            "lost its state"
        )
        do = "Nobody reads the memory any more: write it, and publish a new version"
        self.finish(error=LeaseLost(f"{text}: {why}. {do}", retryable=False))

    def fenced(self) -> None:
        self._memory.forget("unpublished")
        self.finish()


class Releasing(Leaving[ReleaseCall]):
    """A host copy gives up what it holds, and its memory, once no reader is left. The copy may be
    filled again.
    """

    what = "release"

    def _holds_nothing(self) -> None:
        self._memory.drop_salvage()
        self._freed()

    def fenced(self) -> None:
        self._memory.forget("released")
        self._freed()

    def _freed(self) -> None:
        self._context.act(FreeMemory())
        self.finish()


class Closing(Leaving[CloseCall]):
    """... -> (DEREGISTERING) -> over: the coordinator forgets the registration, at once or, if it
    is away, a lease later.
    """

    what = "close"
    _closes = True

    def check_allowed(self) -> None:
        """Whatever the handle holds, it can be closed, and closed again."""

    def _holds_nothing(self) -> None:
        if self._memory.state is HandleState.CLOSED:
            self.finish()
        else:
            self._deregister()

    def fenced(self) -> None:
        self._memory.forget("closed")
        self._deregister()

    def _deregister(self) -> None:
        self.enter(Phase.DEREGISTERING)
        self.request = self._context.new_request()
        self._context.say(Deregister(self.request, self._context.shard.registration, self._abandon))
        if not self._context.session.ready:
            # offline it is forgotten anyway; and without a confirmation no reader knows of it
            self._closed()

    def answered(self, message: LeaveGranted | Done) -> None:
        if self.phase is not Phase.DEREGISTERING:
            super().answered(message)
        elif isinstance(message, Done) and message.request == self.request:
            self._closed()

    def disconnected(self) -> None:
        if self.phase is Phase.DEREGISTERING:
            self._closed()
        else:
            super().disconnected()

    def _give_up(self, error: Exception) -> None:
        if self.phase is Phase.DEREGISTERING:
            self._closed()
        else:
            super()._give_up(error)

    def _closed(self) -> None:
        self._memory.close()
        self.finish()
