"""Tasks of several steps in a pure machine: a generator yields the condition that it waits for, and
acts in between.

Theory of operation. A procedure waits for a condition. After each of the machine's events the
conditions are checked, in the order in which the procedures began, and a procedure goes on in the
event in which its condition came true. A wait ends earlier, with `Cancelled`, at the deadline of a
`within` block, or when the procedure is cancelled. What the procedure does then, to put things in
order, is not interrupted again.

Responsible for when each procedure goes on, and for the order in which procedures that want one
thing get it (`Turns`). No clock: time is an argument. Not responsible for what procedures do.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from math import inf
from typing import Any, TypeVar

T = TypeVar("T")
Steps = Generator[Callable[[], bool], None, T]


class Cancelled(Exception):
    """Raised where a procedure waits: it is to end, or is too late. (It is no TensorHubError, as
    callers would see.)
    """


class Procedure:
    """One procedure. `request`: the caller's request that ends with the procedure; None: no caller
    waits for it.
    """

    __slots__ = ("_is_interrupted", "is_cancelled", "request", "steps", "until", "waits_for")

    def __init__(self, steps: Steps[Any], request: int | None) -> None:
        self.request = request
        self.steps = steps
        self.waits_for: Callable[[], bool] = lambda: True
        self.until = inf  # when its wait ends if nothing has come
        self.is_cancelled = False
        self._is_interrupted = False  # `Cancelled` was raised in it

    @contextmanager
    def within(self, until: float, late: Callable[[], Exception]) -> Iterator[None]:
        """If the block is not over at `until`, it raises the error that `late` makes. Such blocks
        are not nested.
        """
        self.until = until
        try:
            yield
        except Cancelled:
            if self.is_cancelled:
                raise
            self._is_interrupted = False
            raise late() from None
        finally:
            self.until = inf

    def next_deadline(self) -> float:
        return inf if self._is_interrupted else self.until

    def go_on(self, now: float) -> bool:
        """Take one step, if what it waits for has come, or it has to end. Raises StopIteration, and
        what the steps raise.
        """
        is_met = self.waits_for()
        if not self._is_interrupted and (self.is_cancelled or (not is_met and now >= self.until)):
            self._is_interrupted = True
            self.waits_for = self.steps.throw(Cancelled())
        elif is_met:
            self.waits_for = next(self.steps)
        else:
            return False
        return True


class Procedures:
    """The running procedures of one machine. `ended` is told how each has ended: its result, or its
    error.
    """

    def __init__(self, ended: Callable[[Procedure, Any, Exception | None], None]) -> None:
        self._ended = ended
        self._running: dict[Procedure, None] = {}  # in the order in which they began
        self._current: Procedure | None = None

    def __len__(self) -> int:
        return len(self._running)

    @property
    def current(self) -> Procedure:
        """The procedure that takes a step now."""
        assert self._current is not None
        return self._current

    def begin(self, steps: Steps[Any], request: int | None = None) -> Procedure:
        """The first step is taken with the next `go_on`."""
        procedure = Procedure(steps, request)
        self._running[procedure] = None
        return procedure

    def cancel(self, request: int) -> None:
        """The request was given up by its caller."""
        for procedure in self._running:
            procedure.is_cancelled = procedure.is_cancelled or procedure.request == request

    def go_on(self, now: float) -> None:
        """Take every step that can be taken now."""
        while any(self._take_step(procedure, now) for procedure in list(self._running)):
            pass

    def _take_step(self, procedure: Procedure, now: float) -> bool:
        self._current = procedure
        try:
            return procedure.go_on(now)
        except StopIteration as end:
            result, error = end.value, None
        except Exception as raised:
            result, error = None, raised
        finally:
            self._current = None
        del self._running[procedure]
        self._ended(procedure, result, error)
        return True

    def next_deadline(self) -> float | None:
        """When the earliest wait ends without its condition, or None."""
        until = min((procedure.next_deadline() for procedure in self._running), default=inf)
        return None if until == inf else until


class Turns:
    """One thing that several procedures want: one has it at a time, in the order in which they
    asked.
    """

    def __init__(self) -> None:
        self._line: deque[object] = deque()  # one for each that wants it; the first has it

    def __repr__(self) -> str:
        return f"<Turns: {len(self._line)} in line>"

    @contextmanager
    def line(self) -> Iterator[Callable[[], bool]]:
        """Stand in line until the end of the block, which is given the condition that its turn has
        come.
        """
        mine = object()
        self._line.append(mine)
        try:
            yield lambda: self._line[0] is mine
        finally:
            self._line.remove(mine)
