"""What the procedures about host copies share: the copies, the calls that run on them, and the room that they take.

Responsible for the steps of those procedures, and for the actions that follow from a step. Not responsible for
why a copy is made or ended (`worker.host_copies`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import count

from tensorhub.errors import CoordinatorUnavailable, OperationTimeout, StateError
from tensorhub.manifest import Manifest
from tensorhub.types import FetchReport, HandleState, Purpose, VersionInfo
from tensorhub.worker.budget import Budget
from tensorhub.worker.calls import Call, ReleaseCall
from tensorhub.worker.host_copy_actions import (
    AskManifest,
    BeginCall,
    CancelCall,
    CopyAction,
    DropHandle,
    LogEvent,
    StartHandle,
)
from tensorhub.worker.member import Member
from tensorhub.worker.procedures import Cancelled, Procedures, Steps, Turns
from tensorhub.worker.registration_session import Shard


@dataclass(eq=False, slots=True)
class Copy:
    """One host copy."""

    shard: Shard
    is_known: bool = False  # the coordinator has answered its registration: it has it, or `refusal` says why not
    refusal: Exception | None = None
    nbytes: int = 0  # of memory that it had when its last call ended
    fills: int = 0  # that were begun
    filling: bool = False
    turn: Turns = field(default_factory=Turns)  # to fill or release it: no fill begins in the midst of a release

    @property
    def ident(self) -> str:
        """Its registration."""
        return self.shard.registration


@dataclass(eq=False, slots=True)
class Attempt:
    """A call of a handle that was begun here, until it has ended; or a question."""

    number: int
    is_over: bool = False
    result: FetchReport | bytes | None = None
    error: Exception | None = None


class CopyPool:
    """One worker's. `actions`: what is to be done, in order; whoever takes them leaves it empty."""

    def __init__(self, bytes_max: int, op_timeout_s: float, procedures: Procedures) -> None:
        self.procedures = procedures
        self.budget = Budget(bytes_max)
        self.op_timeout_s = op_timeout_s
        self.now = 0.0
        self.actions: list[CopyAction] = []
        self.members: dict[str, Member] = {}  # of all handles of this worker, by registration
        self.copies: dict[str, Copy] = {}  # by their own registration
        self.calls: dict[str, Attempt] = {}  # that run, by registration
        self.attempts: dict[int, Attempt] = {}  # those, and questions for manifests
        self._numbers = count(1)
        self._room = Turns()  # one after the other: who makes room takes it

    def act(self, action: CopyAction) -> None:
        self.actions.append(action)

    def is_closed(self, registration: str) -> bool:
        member = self.members.get(registration)
        return member is None or member.state is HandleState.CLOSED

    @property
    def is_spot(self) -> bool:
        """Whether any of its registrations is: then this process may go at any time."""
        return any(member.shard.spot and member.shard.serves for member in self.members.values())

    # ------------------------------------------------------------------------------------------------------------ calls

    def call(self, registration: str, call: Call, timeout_s: float) -> Steps[FetchReport | None]:
        """Begin a call and wait for its end; cancelling ends it as soon as may be, and leaves nothing running."""
        attempt = self._attempt()
        self.calls.setdefault(registration, attempt)  # where one runs, this one is refused
        self.act(BeginCall(attempt.number, registration, call, timeout_s))
        try:
            yield lambda: attempt.is_over
        except Cancelled:
            with self.procedures.current.shielded():
                error = StateError("the call was cancelled by its caller")  # other ranks and the log see it
                yield from self._end(registration, attempt, error)
            raise
        if attempt.error is not None:
            raise attempt.error
        assert not isinstance(attempt.result, bytes)
        return attempt.result

    def end_call(self, registration: str, error: StateError) -> Steps[None]:
        """End the running call, if there is one, with `error`; goes on when nothing of it runs any more."""
        attempt = self.calls.get(registration)
        if attempt is not None:
            yield from self._end(registration, attempt, error)

    def _end(self, registration: str, attempt: Attempt, error: StateError) -> Steps[None]:
        if not attempt.is_over:
            self.act(CancelCall(attempt.number, registration, error))
            yield lambda: attempt.is_over

    def call_ended(self, number: int, nbytes: int) -> None:
        """`nbytes`: of host memory that its handle has now."""
        attempt = self.attempts.get(number)
        for registration in [each for each, running in self.calls.items() if running is attempt]:
            del self.calls[registration]
            if registration in self.copies:
                self.copies[registration].nbytes = nbytes

    def ended(self, number: int, result: FetchReport | bytes | None, error: Exception | None) -> None:
        attempt = self.attempts.pop(number, None)
        if attempt is not None:
            attempt.is_over, attempt.result, attempt.error = True, result, error

    def _attempt(self) -> Attempt:
        attempt = Attempt(next(self._numbers))
        self.attempts[attempt.number] = attempt
        return attempt

    def manifest(self, info: VersionInfo, shard: int, timeout_s: float, part_id: str = "") -> Steps[Manifest]:
        """`part_id`: see `AskManifest`."""
        attempt = self._attempt()
        self.act(AskManifest(attempt.number, info, shard, timeout_s, part_id))
        what = f"manifest of shard {shard} of version {info.version} of {info.model!r}"
        text = f"{what}: the coordinator did not answer within {timeout_s:g} s"
        try:
            with self.procedures.current.within(self.now + timeout_s, lambda: OperationTimeout(text)):
                yield lambda: attempt.is_over
        finally:
            self.attempts.pop(attempt.number, None)
        if attempt.error is not None:
            raise attempt.error
        assert isinstance(attempt.result, bytes)
        return Manifest.decode(attempt.result)

    # ----------------------------------------------------------------------------------------------------------- copies

    def start(self, shard: Shard) -> Copy:
        """A new copy."""
        copy = self.copies[shard.registration] = Copy(shard)
        self.act(StartHandle(shard))
        return copy

    def known(self, copy: Copy, timeout_s: float) -> Steps[None]:
        """Goes on when the coordinator knows it; raises, and it is dropped, if that does not come."""
        text = f"{copy.shard.title}: the coordinator did not answer within {timeout_s:g} s"
        try:
            with self.procedures.current.within(self.now + timeout_s, lambda: CoordinatorUnavailable(text)):
                yield lambda: copy.is_known
            if copy.refusal is not None:
                raise copy.refusal
        except Exception:
            self.drop(copy)
            raise

    def drop(self, copy: Copy) -> None:
        """It is wanted no more, and the coordinator need not agree."""
        self.copies.pop(copy.ident, None)
        self.act(DropHandle(copy.ident))

    # ------------------------------------------------------------------------------------------------------------- room

    def make_room(self, ident: str, purpose: Purpose, nbytes: int) -> Steps[None]:
        """Reserve so many bytes for `ident`, once those that it outranks are gone. StateError: there is no room for it."""
        yield from self._room.take()
        try:
            asked = set[str]()
            # Planned anew each time: while one was waited for, others may have given their room back by themselves.
            while others := [other for other in self.budget.plan(ident, purpose, nbytes) if other not in asked]:
                other = others[0]
                asked.add(other)
                copy = self.copies.get(other)
                if copy is not None:
                    self.act(LogEvent("copy_evicted", other, f"{nbytes} bytes are needed for another's {purpose.value}"))
                    error = StateError("its host memory is needed for something that comes first", retryable=True)
                    yield from self.end_call(other, error)
                    if self.budget.reservation(other) is not None:  # else a fill may have its turn, and wait for this room
                        yield from self.give_back(copy)
            self.budget.reserve(ident, purpose, nbytes)
        finally:
            self._room.give_back()

    def give_back(self, copy: Copy, wanted: Callable[[], bool] = lambda: True) -> Steps[None]:
        """Give a copy's memory back, once its readers are moved or fenced; if that is still wanted when its turn comes."""
        yield from copy.turn.take()
        try:
            if wanted() and self.budget.reservation(copy.ident) is not None and not self.is_closed(copy.ident):
                yield from self.call(copy.ident, ReleaseCall(), self.op_timeout_s)
        finally:
            copy.turn.give_back()
