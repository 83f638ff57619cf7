"""Very many workers that take a version: each costs no more than among few.

Work is counted in the interpreter's instructions, which depend on no clock.
"""

from __future__ import annotations

import sys
from types import FrameType
from typing import Any

import pytest

from benches.scale.core import Core
from tensorhub.coordinator import Event


class Counted(Core):
    """Counts what the coordinator does."""

    work = 0

    def _counted(self, frame: FrameType, event: str, argument: object) -> Any:
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        self.work += event == "opcode"
        return self._counted

    def step(self, event: Event) -> None:
        take = self.coordinator.step

        def counted(event: Event, now: float) -> Any:
            tracing = sys.gettrace()
            sys.settrace(self._counted)
            try:
                return take(event, now)
            finally:
                sys.settrace(tracing)

        self.coordinator.step = counted  # type: ignore[method-assign]
        try:
            super().step(event)
        finally:
            self.coordinator.step = take  # type: ignore[method-assign]


@pytest.mark.heavy
def test_a_fill_costs_no_more_among_many() -> None:
    costs = []
    for workers in (64, 256):
        core = Counted(workers, 1, 1000)
        core.connect()
        core.work = 0
        core.version(1, wait_first=False)
        costs.append(core.work / workers)
    few, many = costs
    assert many < 1.03 * few
