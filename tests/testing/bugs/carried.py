"""Bugs in what a worker's shell is told to carry out, room for what is staged and giving up; and in
what a worker knows of what it has to keep.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

from tensorhub.testing import Fault
from tensorhub.worker import registration_session
from tensorhub.worker.calls import Action, MakeRoom
from tensorhub.worker.interpreter import Interpreter
from tensorhub.worker.member_memory import MemberMemory
from tests.testing.bugs import bug, replaced
from tests.testing.bugs.inside import around


@bug("R3: the memory of a registration that is given up is let go without a fence")
def given_up_without_a_fence() -> Iterator[None]:
    def give_up(
        before: Callable[..., Any], self: Interpreter, now: float, gives_up_at: float = 0.0
    ) -> Any:
        first = not self.is_given_up
        said = before(self, now)
        if first:
            self.todo.pop()
            self._let_go(stands=True)
        return said

    with around(Interpreter, "give_up", give_up):
        yield


@bug("G9: what a registration's machine wants said after its Deregister is said, too")
def said_after_deregister() -> Iterator[None]:
    def add(before: Callable[..., None], self: Interpreter, actions: Iterable[Action]) -> None:
        self.todo.extend(actions)

    with around(Interpreter, "add", add):
        yield


@bug("G7: what was made for one fetch stays registered when that is over")
def fetch_stays_registered() -> Iterator[None]:
    def finished(before: Callable[..., None], self: Interpreter, finish: Any) -> None:
        before(self, finish)
        self._is_done = False

    with around(Interpreter, "finished", finished):
        yield


@bug("R5: a staged update takes host memory for which it has no room")
def staged_without_room() -> Iterator[None]:
    def next_(before: Callable[..., Action | None], self: Interpreter, now: float) -> Action | None:
        action = before(self, now)
        if not isinstance(action, MakeRoom):
            return action
        self.add(self.member.room_ended(None, now))
        return before(self, now)

    with around(Interpreter, "next", next_):
        yield


@bug("R4: a staged update forgets, when it is in place, that its version is retained")
def staged_forgets_that_it_is_retained() -> Iterator[None]:
    def applied(before: Callable[..., None], self: MemberMemory, *, whole: bool) -> None:
        if self.staged is not None:
            self.staged.retained = False
        before(self, whole=whole)

    with around(MemberMemory, "applied", applied):
        yield


@bug(
    "R4: an owner that is cut off waits a tenth of the margin before it gives up what is retained",
    faults=(Fault.PARTITION, Fault.CUT, Fault.DROP),
)
def lease_margin_of_a_tenth() -> Iterator[None]:
    margin = registration_session.LEASE_MARGIN / 10
    with replaced(registration_session, "LEASE_MARGIN", margin):
        yield
