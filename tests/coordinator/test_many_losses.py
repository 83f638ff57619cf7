"""Very many workers that are lost together: each step does a bounded part of it, and a loss costs
no more among many.

Work is counted in the interpreter's instructions, which depend on no clock.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable
from types import FrameType
from typing import Any

import pytest

from benches.scale.core import Core
from tensorhub.coordinator import (
    DOOR,
    Action,
    CloseSession,
    Disconnected,
    Event,
    LookFor,
    Persist,
    Received,
    Send,
    Silent,
    Tick,
    WorkerLost,
)
from tensorhub.coordinator.limits import NOTED_PER_STEP
from tensorhub.messages import Dismissed, EpochChanged, Heartbeat
from tensorhub.runtime.control.server import SILENT_PER_STEP

LEASE_S = 10.0
TICKS_APART_S = LEASE_S / 16  # no gap
WIDEST = 100  # entities that one loss may change, and what follows of it at the end of the step


class Lost(Core):
    """A cluster whose workers hold a version, and then are heard no more."""

    def __init__(self, workers: int) -> None:
        super().__init__(workers, 1, 1000)
        self.connect()
        self.version(1, wait_first=False)
        self.looked: list[int] = []
        self.dismissed = 0
        self.work = 0
        self.work_of_step: list[int] = []

    def _counted(self, frame: FrameType, event: str, argument: object) -> Any:
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        self.work += event == "opcode"
        return self._counted

    def take(self, event: Event) -> list[Action]:
        before, tracing = self.work, sys.gettrace()
        sys.settrace(self._counted)
        try:
            actions = self.coordinator.step(event, self.now)
        finally:
            sys.settrace(tracing)
        self.work_of_step.append(self.work - before)
        assert len(self.coordinator.cluster.noted) <= NOTED_PER_STEP + WIDEST
        self.looked += [action.session for action in actions if isinstance(action, LookFor)]
        self.dismissed += sum(
            isinstance(action, Send) and isinstance(action.message, Dismissed) for action in actions
        )
        assert all(
            isinstance(action, Send | CloseSession | LookFor | Persist | WorkerLost)
            for action in actions
        )
        return actions

    def pass_time(self) -> None:
        """As the server does: it looks for all that are asked about, and tells of some at a
        time.
        """
        self.now += TICKS_APART_S
        self.take(Tick())
        while (due := self.coordinator.next_deadline()) is not None and due <= self.now:
            self.take(Tick())
        looked, self.looked = self.looked, []
        for first in range(0, len(looked), SILENT_PER_STEP):
            self.take(Silent(tuple(looked[first : first + SILENT_PER_STEP])))

    def lose_all(self) -> None:
        while self.coordinator.cluster.workers:
            self.pass_time()


def silent(cluster: Lost) -> None:
    """All say nothing more."""
    cluster.lose_all()
    assert cluster.dismissed == len(cluster.everybody)


def cut_off(cluster: Lost) -> None:
    """All their connections end at once, and none comes back."""
    for worker in cluster.everybody:
        cluster.take(Disconnected(worker.number))
    cluster.lose_all()


@pytest.mark.parametrize("lose", [silent, cut_off])
def test_a_loss_costs_no_more_among_many(lose: Callable[[Lost], None]) -> None:
    few, many = Lost(32), Lost(256)
    for cluster in (few, many):
        lose(cluster)
        cluster.coordinator.check_invariants()
        assert not cluster.coordinator.cluster.members
    assert many.work / 256 < 1.02 * few.work / 32
    assert max(many.work_of_step) < 3 * max(few.work_of_step)  # of which 33 are all that there are


def test_ranks_of_one_group_that_are_lost_together_are_told_of_once() -> None:
    """Else a group of a thousand ranks hears half a million words."""
    core = Core(8, 8, 1000)
    core.connect()
    core.version(1, wait_first=False)
    lost, left = core.readers[:5], core.readers[5:]
    for worker in lost:
        core.step(Disconnected(worker.number))
    told = Counter[int]()
    while len(core.coordinator.cluster.workers) > len(core.everybody) - len(lost):
        core.now += TICKS_APART_S
        beats = [
            Received(worker.number, Heartbeat(1, core.now)) for worker in (*core.publishers, *left)
        ]
        events: list[Event] = [*beats, Silent((DOOR,))]
        for event in events:
            for action in core.coordinator.step(event, core.now):
                if isinstance(action, Send) and isinstance(action.message, EpochChanged):
                    told[action.session] += 1
    assert told.keys() == {worker.number for worker in left}
    assert max(told.values()) <= 2 < len(lost)  # their deadlines are not all due in one step
    core.coordinator.check_invariants()
