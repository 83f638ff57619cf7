"""When the handles of a worker are woken, and which are looked at."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import anyio
import pytest

from tensorhub.runtime import clock
from tensorhub.runtime.worker.deadlines import Deadlines
from tests.rig import until

HOURS = 3600.0


class Waiting:
    """A handle, as `Deadlines` knows it. `looks`: how often its deadline was asked for."""

    def __init__(self, deadlines: Deadlines, name: str) -> None:
        self._deadlines, self.name = deadlines, name
        self.member = self
        self.deadline: float | None = None
        self.looks = 0
        self.ticks = 0

    def becomes_due_in(self, seconds: float | None) -> None:
        self.deadline = None if seconds is None else clock.now() + seconds
        self._deadlines.moved(self.name)

    def next_deadline(self) -> float | None:
        self.looks += 1
        return self.deadline

    def tick(self, now: float, fault: object) -> list[Any]:
        assert self.deadline is not None
        assert now >= self.deadline
        self.ticks += 1
        self.deadline = None if self.ticks == 3 else now  # overdue again
        return []

    def apply(self, actions: list[Any]) -> None:
        assert actions == []


@asynccontextmanager
async def kept(count: int) -> AsyncIterator[list[Waiting]]:
    handles = dict[Any, Any]()
    deadlines = Deadlines(handles, lambda: None)
    found = [Waiting(deadlines, str(number)) for number in range(count)]
    handles |= {handle.name: handle for handle in found}
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(deadlines.keep)
        yield found
        tasks.cancel_scope.cancel()


@pytest.mark.anyio
async def test_those_that_are_due_are_ticked_until_they_have_no_deadline() -> None:
    async with kept(100) as handles:
        for handle in handles:
            handle.becomes_due_in(HOURS)
        handles[7].becomes_due_in(0.02)
        handles[9].becomes_due_in(-1)
        await until(lambda: handles[7].ticks == handles[9].ticks == 3)
        assert sum(handle.ticks for handle in handles) == 6
        handles[8].becomes_due_in(0.01)  # sooner than before
        await until(lambda: handles[8].ticks == 3)


@pytest.mark.anyio
async def test_a_deadline_that_was_put_off_or_is_none_any_more_wakes_nothing() -> None:
    async with kept(3) as (one, two, three):
        one.becomes_due_in(0.01)
        one.becomes_due_in(HOURS)
        two.becomes_due_in(0.01)
        two.becomes_due_in(None)
        three.becomes_due_in(0.05)
        await until(lambda: three.ticks == 3)
        assert (one.ticks, two.ticks) == (0, 0)


@pytest.mark.anyio
async def test_the_others_are_not_looked_at() -> None:
    async with kept(1000) as handles:
        for handle in handles:
            handle.becomes_due_in(HOURS)
        await until(lambda: all(handle.looks == 1 for handle in handles))
        handles[0].becomes_due_in(-1)
        await until(lambda: handles[0].ticks == 3)
        assert sum(handle.looks for handle in handles[1:]) == 999
