"""The machine of a worker's host copies, in whatever order things come: what is reserved never is
more than there is, whatever is asked for ends, and an error leaves all of it as it was.

`World` carries its actions out, as a shell would: handles that are answered, calls that take their
time and may fail, memory that is taken and given back. It counts that memory itself.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import Any, cast

import pytest
from hypothesis import settings, strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from tensorhub.errors import (
    CoordinatorUnavailable,
    OperationTimeout,
    RegistrationError,
    RetentionError,
    StateError,
    TensorHubError,
    VersionUnavailable,
)
from tensorhub.machine import InvariantBroken
from tensorhub.messages import CopyRefused, DropCopy, MakeCopy
from tensorhub.testing.sim.memory import make_manifest
from tensorhub.types import FetchReport, HandleState, Medium, OpKind, Purpose, VersionInfo
from tensorhub.worker.calls import (
    Call,
    CloseCall,
    FillCall,
    RefuseCall,
    ReleaseCall,
    Say,
)
from tensorhub.worker.host_copies import HostCopies
from tensorhub.worker.host_copy_actions import (
    AskManifest,
    BeginCall,
    CancelCall,
    CopyAction,
    DropHandle,
    FinishRequest,
    LogEvent,
    StartHandle,
)
from tensorhub.worker.member import Member
from tensorhub.worker.procedures import Steps
from tensorhub.worker.registration_session import Shard

MANIFEST = make_manifest(1, "xxh3-64")
ONE = MANIFEST.nbytes
OP_TIMEOUT_S = 60.0
NO_ERROR = None


def version(number: int) -> VersionInfo:
    return VersionInfo("m", number, f"content{number}", ONE, 1)


@dataclass
class Content:
    version: VersionInfo
    manifest: Any = MANIFEST
    generation: int = 7


@dataclass
class Running:
    number: int
    call: Call
    cancelled: Exception | None = None


@dataclass(eq=False)
class FakeMember:
    """One handle, as far as the machine looks at it."""

    shard: Shard
    state: HandleState = HandleState.EMPTY
    content: Content | None = None
    is_answered: bool = False
    refusal: TensorHubError | None = None
    nbytes: int = 0  # of host memory
    running: Running | None = None
    has_voted: bool = False

    @property
    def runs(self) -> type[Call] | None:
        return type(self.running.call) if self.running is not None else None

    @property
    def is_registered(self) -> bool:
        return self.is_answered and self.refusal is None

    def report_loss(self) -> None: ...


@dataclass
class World:
    """One worker's shell, with everything that takes time still to be done."""

    bytes_max: int = 2 * ONE
    now: float = 0.0
    members: dict[str, FakeMember] = field(default_factory=dict)
    asked: list[AskManifest] = field(default_factory=list)
    finished: dict[int, FinishRequest] = field(default_factory=dict)
    refused: dict[str, str] = field(default_factory=dict)
    told: list[str] = field(default_factory=list)
    warned: dict[str, bool] = field(default_factory=dict)  # by event: whether it is a warning
    begun: list[tuple[str, Call]] = field(default_factory=list)
    staged: dict[str, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.idents, self.requests = count(1), count(1)
        self.copies = HostCopies(self.bytes_max, OP_TIMEOUT_S, lambda: f"h{next(self.idents)}")

    def taken(self) -> int:
        """Of host memory, in truth."""
        return sum(member.nbytes for member in self.members.values()) + sum(self.staged.values())

    # -- what is asked for

    def handle(
        self,
        name: str = "a",
        world_size: int = 1,
        *,
        spot: bool = False,
        content: int | None = None,
    ) -> FakeMember:
        member = FakeMember(
            Shard(name, "m", name, 0, world_size, spot, "layout", MANIFEST, 0), is_answered=True
        )
        if content is not None:
            member.state, member.content = HandleState.READY, Content(version(content))
        self.members[name] = member
        self.copies.began(cast(Member, member))
        return member

    def ask(self, ask: Callable[..., Steps[Any]], *arguments: Any, **more: Any) -> int:
        request = next(self.requests)
        self.do(self.copies.begin(ask(*arguments, **more), self.now, request))
        return request

    def prefetch(self, member: FakeMember, timeout_s: float = 10.0) -> int:
        return self.ask(self.copies.prefetch, member, "latest", timeout_s)

    def close(self, member: FakeMember, timeout_s: float = 10.0, *, abandon: bool = False) -> int:
        return self.ask(self.copies.close, member, timeout_s, abandon=abandon)

    def order(self, ident: str = "c", number: int = 1) -> None:
        self.do(self.copies.ordered(MakeCopy(ident, version(number), 0), self.now))

    def error(self, request: int) -> Exception | None:
        return self.finished[request].error

    # -- what is to be done

    def do(self, actions: Sequence[CopyAction]) -> None:
        todo = list(actions)
        while todo:
            todo += self._do(todo.pop(0))
        self.copies.check_invariants()

    def _do(self, action: CopyAction) -> list[CopyAction]:
        match action:
            case StartHandle():
                member = self.members[action.shard.registration] = FakeMember(action.shard)
                self.copies.began(cast(Member, member))
            case DropHandle():
                return self._end(action.registration)
            case BeginCall():
                return self._begin(action)
            case CancelCall():
                running = (
                    self.members[action.registration].running
                    if action.registration in self.members
                    else None
                )
                if running is not None and running.number == action.number:
                    running.cancelled = action.error
            case AskManifest():
                self.asked.append(action)
            case FinishRequest():
                assert action.request not in self.finished
                self.finished[action.request] = action
            case Say():
                assert isinstance(action.message, CopyRefused)
                self.refused[action.message.copy] = action.message.reason
            case LogEvent():
                self.told.append(action.event)
                self.warned[action.event] = action.is_warning
        return []

    def _begin(self, action: BeginCall) -> list[CopyAction]:
        member = self.members.get(action.registration)
        self.begun.append((action.registration, action.call))
        if member is None or member.state is HandleState.CLOSED:
            error: TensorHubError | None = StateError("closed")
            error = None if isinstance(action.call, CloseCall) else error
            return self.copies.call_ended(action.number, self.now, error=error)
        if member.running is not None:
            assert isinstance(action.call, CloseCall), (
                f"{action.call} in the midst of {member.running}"
            )
            return self.copies.call_ended(
                action.number, self.now, error=StateError("one call at a time")
            )
        if isinstance(action.call, FillCall):
            assert self.copies.budget.reservation(action.registration) is not None
        member.running = Running(action.number, action.call)
        return []

    def _end(self, registration: str) -> list[CopyAction]:
        member, actions = self.members.pop(registration, None), list[CopyAction]()
        if member is None:
            return []
        if member.running is not None:
            actions += self.copies.call_ended(
                member.running.number, self.now, error=StateError("given up")
            )
        if member.shard.medium is Medium.HOST:
            member.nbytes = 0
            actions += self.copies.freed(registration, self.now)
        return actions + self.copies.ended(registration, self.now)

    # -- what takes its time

    def answer(self, member: FakeMember, refusal: TensorHubError | None = None) -> None:
        member.is_answered, member.refusal = True, refusal
        if refusal is not None and member.running is not None:
            self.end_call(member, refusal)

    def take(self, member: FakeMember) -> None:
        """The running fill takes its memory."""
        assert member.runs is FillCall
        self.copies.take(member.shard.registration, member.shard.purpose, ONE)
        member.nbytes = ONE
        assert self.taken() <= self.bytes_max

    def end_call(self, member: FakeMember, error: TensorHubError | None = None) -> None:
        """The running call ends as it wants to, or with that."""
        running = member.running
        assert running is not None
        failed, actions = error or running.cancelled, list[CopyAction]()
        if failed is None:
            actions = self._succeed(member, running.call)
        member.running = None
        report = (
            FetchReport(1, True) if isinstance(running.call, FillCall) and failed is None else None
        )
        self.do(actions)
        self.do(self.copies.call_ended(running.number, self.now, result=report, error=failed))
        if member.state is HandleState.CLOSED:
            self.do(self._end(member.shard.registration))

    def _succeed(self, member: FakeMember, call: Call) -> list[CopyAction]:
        match call:
            case FillCall():
                if not member.nbytes:
                    self.take(member)
                number = call.selector if isinstance(call.selector, int) else 1
                member.state, member.content = HandleState.READY, Content(version(number))
            case ReleaseCall() | CloseCall():
                member.state = (
                    HandleState.CLOSED if isinstance(call, CloseCall) else HandleState.EMPTY
                )
                member.content, member.nbytes = None, 0
                return self.copies.freed(member.shard.registration, self.now)
            case _:
                pass
        return []

    def drop(self, ident: str) -> None:
        self.do(self.copies.dropped(DropCopy(ident), self.now))

    def answer_manifest(self, error: TensorHubError | None = None) -> None:
        ask = self.asked.pop(0)
        if error is not None:
            self.do(self.copies.call_ended(ask.number, self.now, error=error))
        else:
            self.do(self.copies.call_ended(ask.number, self.now, result=MANIFEST.encode()))

    def pass_time(self) -> None:
        """Until the next deadline."""
        until = self.copies.next_deadline()
        self.now = max(self.now, until if until is not None else self.now + 1)
        self.do(self.copies.tick(self.now))

    def running(self) -> list[FakeMember]:
        return [member for member in self.members.values() if member.running is not None]

    def unanswered(self) -> list[FakeMember]:
        return [member for member in self.members.values() if not member.is_answered]

    def settle(self) -> None:
        """All that takes its time is done, and succeeds where it was not cancelled."""
        for _ in range(1000):
            if self.unanswered():
                self.answer(self.unanswered()[0])
            elif self.asked:
                self.answer_manifest()
            elif self.running():
                self.end_call(self.running()[0])
            else:
                return
        raise AssertionError(f"it goes on for ever: {self.copies}")

    def settled(self, request: int) -> Exception | None:
        self.settle()
        return self.error(request)

    def copy(self) -> FakeMember:
        (copy,) = [member for member in self.members.values() if member.shard.medium is Medium.HOST]
        return copy

    def filled(self, name: str = "a", **more: Any) -> tuple[FakeMember, FakeMember]:
        """A handle, and what was prefetched for it."""
        before, handle = set(self.members), self.handle(name, **more)
        self.prefetch(handle)
        self.settle()
        (new,) = set(self.members) - before - {name}
        return handle, self.members[new]


# --------------------------------------------------------------------------------------------------
# prefetch and seeds


def test_a_prefetch_makes_a_copy_and_fills_it() -> None:
    world = World()
    handle = world.handle()
    request = world.prefetch(handle)
    copy = world.copy()
    assert (copy.shard.group, copy.shard.purpose) == ("a/host", Purpose.PREFETCH)
    assert copy.runs is FillCall  # the call waits until the coordinator has answered
    assert world.copies.budget.reserved_bytes == ONE
    world.end_call(copy)
    assert world.finished == {request: FinishRequest(request, FetchReport(1, True))}


def test_one_prefetch_at_a_time() -> None:
    world = World()
    handle = world.handle()
    first = world.prefetch(handle)
    world.answer(world.copy())
    assert "one prefetch at a time" in str(world.error(world.prefetch(handle)))
    assert world.settled(first) is None


@pytest.mark.parametrize("when", ["unknown", "refused"])
def test_a_copy_that_the_coordinator_does_not_take_is_dropped(when: str) -> None:
    world = World()
    handle = world.handle()
    request = world.prefetch(handle)
    if when == "unknown":
        world.end_call(world.copy(), CoordinatorUnavailable("it did not answer"))
        assert isinstance(world.error(request), CoordinatorUnavailable)
    else:
        world.answer(world.copy(), RegistrationError("no"))
        assert isinstance(world.error(request), RegistrationError)
    assert list(world.members) == ["a"]
    assert world.copies.budget.reserved_bytes == 0


def test_no_room_is_said_before_anybody_hears_of_a_copy() -> None:
    for bytes_max, text in ((0, "Options.host_memory_bytes is 0"), (ONE - 1, f"give {ONE}")):
        world = World(bytes_max)
        handle = world.handle()
        assert text in str(world.error(world.prefetch(handle)))
        assert list(world.members) == ["a"]


def test_a_rank_without_room_refuses_for_all() -> None:
    world = World(0)
    request = world.prefetch(world.handle(world_size=2))
    world.answer(world.copy())
    assert world.copy().runs is RefuseCall
    world.settle()
    assert isinstance(world.error(request), StateError)


def test_a_fill_waits_for_the_release_before_it_and_no_longer_than_it_may() -> None:
    world = World()
    handle, copy = world.filled()
    world.do(world.copies.end_prefetch("a", world.now, frees=True))
    assert isinstance(copy.running and copy.running.call, ReleaseCall)
    request = world.prefetch(handle, 3.0)
    assert world.begun[-1] == (copy.shard.registration, ReleaseCall())
    world.pass_time()
    assert (world.now, type(world.error(request))) == (3.0, OperationTimeout)
    again = world.prefetch(handle)
    world.end_call(copy)
    assert copy.runs is FillCall
    assert world.settled(again) is None


def test_an_update_that_reads_ends_the_prefetch_unless_it_is_voted_for_and_no_release() -> None:
    world = World()
    handle, copy = world.filled()
    for has_voted in (True, False):
        request = world.prefetch(handle)
        copy.has_voted = has_voted
        world.do(world.copies.end_prefetch("a", world.now))
        world.settle()
        error = world.error(request)
        assert (error is None) is has_voted
    assert "an update has taken what was prefetched so far" in str(error)
    assert isinstance(error, StateError)
    assert error.retryable
    world.do(world.copies.end_prefetch("a", world.now, frees=True))
    world.do(world.copies.end_prefetch("a", world.now))
    assert copy.running is not None
    assert (copy.runs, copy.running.cancelled) == (ReleaseCall, None)


def test_what_is_being_filled_anew_is_not_released_for_the_version_before() -> None:
    world = World()
    handle, copy = world.filled()
    request = world.prefetch(handle)
    world.do(world.copies.end_prefetch("a", world.now, frees=True))  # it ends this one
    assert copy.running is not None
    world.end_call(copy)
    error = world.error(request)
    assert isinstance(error, StateError)
    assert error.retryable
    assert world.settled(world.prefetch(handle)) is None
    assert copy.content is not None


def test_a_fill_that_was_begun_while_what_is_to_be_released_still_ends_is_not_released() -> None:
    """The release before it keeps the copy busy, until the prefetch between them has given up."""
    world = World()
    handle, copy = world.filled()
    world.do(world.copies.end_prefetch("a", world.now, frees=True))
    between = world.prefetch(handle, timeout_s=1)
    world.do(world.copies.end_prefetch("a", world.now, frees=True))
    while between not in world.finished:
        world.pass_time()
    later = world.prefetch(handle)
    assert copy.runs is ReleaseCall
    world.end_call(copy)
    assert world.settled(later) is None
    assert copy.content is not None


def test_a_budget_that_is_exceeded_is_noticed() -> None:
    world = World()
    world.filled()
    world.copies.budget.bytes_max = 0
    with pytest.raises(InvariantBroken, match=r"^no more is reserved than there is: "):
        world.copies.check_invariants()


def test_a_fill_that_fails_before_it_takes_memory_gives_its_room_back() -> None:
    world = World()
    request = world.prefetch(world.handle())
    copy = world.copy()
    world.answer(copy)
    assert copy.runs is FillCall
    assert world.copies.budget.reserved_bytes == ONE
    world.end_call(copy, VersionUnavailable("no source"))
    assert isinstance(world.error(request), VersionUnavailable)
    assert world.copies.budget.reserved_bytes == 0


def test_seeds_are_made_once_and_filled_again() -> None:
    world = World()
    for _ in range(2):
        request = world.ask(world.copies.seed, version(1), 0, 5.0)
        world.settle()
        assert world.error(request) is None
    assert world.copy().shard.purpose is Purpose.SEED
    late = world.ask(world.copies.seed, version(1), 0, 5.0)
    world.pass_time()
    assert isinstance(world.error(late), OperationTimeout)


def test_a_seed_of_a_version_is_filled_with_that_version_and_is_no_other_ones() -> None:
    world = World()
    for number in (1, 2):
        request = world.ask(world.copies.seed, version(number), 0, 5.0, number)
        assert world.settled(request) is None
        held = [world.copies.seeded(version(each), 0) is not None for each in (1, 2)]
        assert held == [number == 1, number == 2]


# --------------------------------------------------------------------------------------------------
# room


def test_who_outranks_a_copy_has_it_released_and_then_its_room() -> None:
    world = World(ONE)
    _, copy = world.filled()
    request = world.ask(world.copies.make_room, "a/staged", Purpose.USE, ONE)
    assert copy.runs is ReleaseCall
    assert request not in world.finished  # its memory is not given back yet
    assert world.copies.budget.reservation("a/staged") is None
    assert world.settled(request) is None
    assert world.copies.budget.reservation("a/staged") is not None
    assert world.told == ["copy_evicted"]


def test_a_fill_that_runs_does_not_keep_the_room_that_is_needed_for_what_comes_first() -> None:
    world = World(ONE)
    prefetch = world.prefetch(world.handle())
    copy = world.copy()
    world.answer(copy)
    world.take(copy)
    request = world.ask(world.copies.make_room, "b/staged", Purpose.USE, ONE)
    assert copy.running is not None
    assert isinstance(copy.running.cancelled, StateError)  # else it would run on
    world.end_call(copy)
    assert "needed for something that comes first" in str(world.error(prefetch))
    assert world.settled(request) is None


def test_a_copy_that_must_stay_leaves_no_room() -> None:
    world = World(ONE)
    _, copy = world.filled()
    request = world.ask(world.copies.make_room, "a/staged", Purpose.USE, ONE)
    world.end_call(copy, RetentionError("it must stay"))
    assert isinstance(world.error(request), RetentionError)
    assert world.copies.budget.reservation(copy.shard.registration) is not None


def test_room_is_made_for_one_after_the_other() -> None:
    world = World(ONE)
    _, copy = world.filled()
    first = world.ask(world.copies.make_room, "first", Purpose.USE, ONE)
    second = world.ask(world.copies.make_room, "second", Purpose.USE, ONE)
    world.end_call(copy)
    assert world.error(first) is None
    assert isinstance(world.error(second), StateError)


@pytest.mark.parametrize("whom", [0, 1])
def test_who_is_cancelled_while_it_waits_for_room_is_in_nobodys_way(whom: int) -> None:
    world = World(ONE)
    world.filled()
    requests = [world.ask(world.copies.make_room, name, Purpose.USE, ONE) for name in "xy"]
    world.do(world.copies.cancel(requests[whom], world.now))
    world.settle()
    assert "cancelled by its caller" in str(world.error(requests[whom]))
    assert world.error(requests[1 - whom]) is None
    assert world.copies.budget.reserved_bytes == ONE


# --------------------------------------------------------------------------------------------------
# closing


def test_a_close_closes_what_ends_with_the_handle_first() -> None:
    world = World()
    handle, copy = world.filled()
    request = world.close(handle)
    assert copy.runs is CloseCall
    assert world.running() == [copy]
    assert "is being closed" in str(world.error(world.prefetch(handle)))
    world.end_call(copy)
    assert handle.runs is CloseCall
    assert world.settled(request) is None
    assert world.members == {}


@pytest.mark.parametrize("fails", ["copy", "handle", "cancelled copy", "cancelled handle"])
def test_a_close_that_fails_leaves_the_handle(fails: str) -> None:
    world = World()
    handle, copy = world.filled()
    request = world.close(handle)
    if "handle" in fails:
        world.end_call(copy)
    at = copy if "copy" in fails else handle
    if "cancelled" in fails:
        world.do(world.copies.cancel(request, world.now))
        world.end_call(at)
    else:
        world.end_call(at, RetentionError("it must stay"))
    assert isinstance(world.error(request), StateError if "cancelled" in fails else RetentionError)
    assert world.copies.budget.reserved_bytes == (ONE if "copy" in fails else 0)
    again = world.prefetch(handle)
    assert world.settled(again) is None


def test_a_handle_that_becomes_the_last_one_while_it_closes_takes_the_copies_with_it() -> None:
    world = World()
    handle, other = world.handle("a", content=1), world.handle("b")
    world.order("kept")
    world.settle()
    request = world.close(handle)
    world.close(other, abandon=True)
    world.end_call(other)
    world.end_call(handle)
    assert world.members["kept"].runs is CloseCall
    assert world.settled(request) is None
    assert world.members == {}


def test_a_close_that_fails_does_not_undo_an_earlier_one() -> None:
    world = World()
    first, second = world.handle("a"), world.handle("b")
    assert world.settled(world.close(first)) is None
    request = world.close(second)
    world.end_call(second, RetentionError("it must stay"))
    assert isinstance(world.error(request), RetentionError)
    world.do(world._end("b"))
    world.order("c")
    assert world.refused["c"] == "this worker closes"


def test_with_the_last_handle_goes_what_is_retained_and_what_is_being_made_is_refused() -> None:
    world = World()
    handle, _ = world.handle("a"), world.handle("spare", content=1)
    world.order("kept")
    world.settle()
    kept = world.members["kept"]
    world.close(world.members["spare"])
    world.settle()
    assert kept.state is HandleState.READY  # another handle is left
    world.order("making")
    request = world.close(handle)
    assert "this worker closes" in world.refused["making"]
    world.order("more")
    assert world.refused["more"] == "this worker closes"
    assert kept.runs is CloseCall
    world.drop("kept")
    assert world.settled(request) is None
    assert world.members == {}


def test_an_abandoned_close_leaves_what_is_retained() -> None:
    world = World()
    handle = world.handle(content=1)
    world.order("kept")
    world.settle()
    assert world.settled(world.close(handle, abandon=True)) is None
    assert list(world.members) == ["kept"]


# --------------------------------------------------------------------------------------------------
# orders


def test_a_copy_that_is_ordered_is_filled_once() -> None:
    world = World()
    world.handle(content=1)
    world.order()
    world.order()  # said again
    world.settle()
    assert world.begun == [("c", FillCall(OpKind.REPLICATE, 1))]
    assert world.refused == {}


def test_what_cannot_be_made_is_refused() -> None:
    world = World(ONE)
    world.handle(content=1)
    world.order("one")
    world.settle()
    world.order("two")
    world.settle()
    world.order("three", 3)
    world.answer_manifest(VersionUnavailable("no such version"))
    assert "does not outrank" in world.refused["two"]
    assert world.refused["three"] == "no such version"
    world.drop("one")
    world.settle()
    assert list(world.members) == ["a"]
    world.copies.stop()
    world.order("four")
    assert world.refused["four"] == "this worker closes"


def test_a_copy_that_is_ordered_out_twice_ends_once() -> None:
    """The coordinator says it again to a worker that it has taken for lost."""
    world = World()
    world.handle(content=1)
    world.order("c")
    world.settle()
    world.drop("c")
    world.drop("c")
    world.drop("c")
    world.settle()
    assert [call for name, call in world.begun if name == "c" and isinstance(call, CloseCall)] == [
        CloseCall()
    ]
    assert list(world.members) == ["a"]


def test_a_copy_that_ends_by_itself_while_it_is_closed_or_released_is_no_failure() -> None:
    """A retention copy after a rollback, which has taken its version; a prefetched copy with its
    handle.
    """
    world = World()
    handle = world.handle(content=1)
    world.order("c")
    world.settle()
    world.drop("c")
    assert world.members["c"].runs is CloseCall
    world.do(world.copies.freed("c", world.now))
    assert (list(world.members), world.told) == (["a"], [])
    world.prefetch(handle)
    world.settle()
    world.do(world.copies.end_prefetch("a", world.now, frees=True))
    assert world.copy().runs is ReleaseCall
    world.do(world._end("a"))
    assert (world.members, world.told) == ({}, [])


@pytest.mark.parametrize("error", [RetentionError("it must stay"), StateError("it is read")])
def test_a_copy_that_cannot_go_yet_stays_and_says_why(error: TensorHubError) -> None:
    """One that is ordered out, and one that was prefetched for an update that is done. That it must
    stay is no failure.
    """
    world = World()
    world.filled()
    prefetched = world.copy()
    world.order("c")
    world.settle()
    world.drop("c")
    world.end_call(world.members["c"], error)
    world.do(world.copies.end_prefetch("a", world.now, frees=True))
    world.end_call(prefetched, error)
    assert set(world.members) == {"a", "c", prefetched.shard.registration}
    assert world.taken() == world.copies.budget.reserved_bytes == 2 * ONE
    warns = not isinstance(error, RetentionError)
    assert world.warned == {"copy_not_ended": warns, "copy_not_released": warns}


def test_a_copy_that_is_being_filled_does_not_end_with_the_memory_that_it_gives_back() -> None:
    world = World()
    world.order("c")
    world.answer_manifest()
    copy = world.members["c"]
    world.answer(copy)
    world.take(copy)
    world.do(world.copies.freed("c", world.now))
    assert copy.runs is FillCall
    world.settle()
    assert list(world.members) == ["c"]


def test_a_version_that_is_larger_than_what_was_reserved_and_has_no_room_leaves_none_taken() -> (
    None
):
    world = World()
    _, copy = world.filled()
    budget, ident = world.copies.budget, copy.shard.registration
    assert budget.reservation(ident) is not None
    with pytest.raises(StateError, match="give"):
        world.copies.take(ident, Purpose.PREFETCH, 3 * ONE)
    assert budget.reservation(ident) is None


def test_a_copy_that_is_not_needed_while_it_is_made() -> None:
    world = World()
    world.order("c")
    world.answer_manifest()
    world.answer(world.members["c"])
    world.drop("c")
    world.settle()
    assert "not needed any more" in world.refused["c"]
    assert world.members == {}
    assert world.copies.budget.reserved_bytes == 0


# --------------------------------------------------------------------------------------------------
# any order


class AnyOrder(RuleBasedStateMachine):
    """A few handles, everything that can be asked for, and whatever may come of it."""

    def __init__(self) -> None:
        super().__init__()
        self.world = World()
        self.handles = [
            self.world.handle("a", content=1),
            self.world.handle("b"),
            self.world.handle("c", 2),
        ]
        self.requests: set[int] = set()
        self.names = count()

    handles_ = st.integers(0, 2)

    def _of(self, number: int) -> FakeMember:
        return self.handles[number]

    @rule(number=handles_, timeout_s=st.sampled_from((0.0, 1.0, 10.0)))
    def prefetch(self, number: int, timeout_s: float) -> None:
        self.requests.add(self.world.prefetch(self._of(number), timeout_s))

    @rule(number=handles_, abandon=st.booleans())
    def close(self, number: int, abandon: bool) -> None:
        self.requests.add(self.world.close(self._of(number), 5.0, abandon=abandon))

    @rule(timeout_s=st.sampled_from((1.0, 10.0)), shard=st.integers(0, 1))
    def seed(self, timeout_s: float, shard: int) -> None:
        self.requests.add(self.world.ask(self.world.copies.seed, version(1), shard, timeout_s))

    @rule(number=handles_)
    def stage(self, number: int) -> None:
        ident = f"{self._of(number).shard.registration}/staged"
        if ident not in self.world.staged:
            request = self.world.ask(self.world.copies.make_room, ident, Purpose.USE, ONE)
            self.requests.add(request)

    @rule(number=handles_)
    def staged_is_freed(self, number: int) -> None:
        ident = f"{self._of(number).shard.registration}/staged"
        self.world.staged.pop(ident, None)
        self.world.do(self.world.copies.freed(ident, self.world.now))

    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        open_ = sorted(self.requests - self.world.finished.keys())
        if open_:
            self.world.do(
                self.world.copies.cancel(data.draw(st.sampled_from(open_)), self.world.now)
            )

    @rule(number=st.integers(1, 2))
    def order(self, number: int) -> None:
        self.world.order(f"o{next(self.names)}", number)

    @rule(data=st.data())
    def drop(self, data: st.DataObject) -> None:
        self.world.drop(data.draw(st.sampled_from([f"o{number}" for number in range(8)])))

    @rule(number=handles_, frees=st.booleans())
    def end_prefetch(self, number: int, frees: bool) -> None:
        ident = self._of(number).shard.registration
        self.world.do(self.world.copies.end_prefetch(ident, self.world.now, frees=frees))

    @precondition(lambda self: self.world.unanswered())
    @rule(data=st.data(), refused=st.sampled_from((False, False, True)))
    def answer(self, data: st.DataObject, refused: bool) -> None:
        member = data.draw(st.sampled_from(self.world.unanswered()))
        self.world.answer(member, RegistrationError("no") if refused else None)

    @precondition(lambda self: self.world.asked)
    @rule(failed=st.booleans())
    def answer_manifest(self, failed: bool) -> None:
        self.world.answer_manifest(VersionUnavailable("gone") if failed else None)

    @precondition(lambda self: self.world.running())
    @rule(data=st.data(), fails=st.sampled_from((False, False, True)))
    def end_call(self, data: st.DataObject, fails: bool) -> None:
        member = data.draw(st.sampled_from(self.world.running()))
        self.world.end_call(member, RetentionError("it must stay") if fails else None)

    @precondition(lambda self: self.world.running())
    @rule(data=st.data())
    def take_memory(self, data: st.DataObject) -> None:
        member = data.draw(st.sampled_from(self.world.running()))
        if member.runs is FillCall:
            self.world.take(member)

    @rule()
    def pass_time(self) -> None:
        self.world.pass_time()

    @rule(number=handles_)
    def register_anew(self, number: int) -> None:
        """In the place of one that is closed."""
        if (
            self._of(number).state is HandleState.CLOSED
            and self._of(number).shard.registration not in self.world.members
        ):
            self.handles[number] = self.world.handle(
                f"{'abc'[number]}{next(self.names)}", 2 if number == 2 else 1
            )

    @rule(data=st.data())
    def handle_goes(self, data: st.DataObject) -> None:
        """A registration ends by itself."""
        copies = [each for each in self.world.members.values() if each.shard.medium is Medium.HOST]
        if copies:
            self.world.do(self.world._end(data.draw(st.sampled_from(copies)).shard.registration))

    @invariant()
    def never_more_than_there_is(self) -> None:
        world = self.world
        for request in self.requests & world.finished.keys():
            self.requests.discard(request)
        assert world.taken() <= world.copies.budget.reserved_bytes <= world.bytes_max

    def teardown(self) -> None:
        world = self.world
        world.settle()
        while world.copies.next_deadline() is not None:
            world.pass_time()
            world.settle()
        assert not self.requests - world.finished.keys(), (
            f"unfinished: {self.requests - world.finished.keys()}, {world.copies}"
        )
        world.copies.check_invariants()


TestAnyOrder = AnyOrder.TestCase
TestAnyOrder.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)
