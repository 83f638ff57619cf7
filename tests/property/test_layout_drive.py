"""Groups of several layouts read each other's versions, whatever happens: nobody waits for what is there."""

from __future__ import annotations

from collections import Counter

import pytest

from tensorhub.coordinator import limits
from tensorhub.machine import InvariantBroken, counting_transitions
from tests.property.layout_drive import LayoutDrive
from tests.property.wait_drive import SMALL, Forgotten

SEEDS = 16  # the same ones each time: the slow test has the next ones
STEPS = 400


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, limit in SMALL.items():
        monkeypatch.setattr(limits, name, limit)


def run(seeds: range) -> Counter[str]:
    """What failed names its seed. Returns how often something was reached."""
    reached = Counter[str]()
    for seed in seeds:
        drive = LayoutDrive(seed)
        try:
            drive.run(STEPS)
            reached.update(drive.reached)
            drive.heal()
            assert not drive.asleep()
        except (Forgotten, InvariantBroken, AssertionError) as error:
            error.add_note(f"LayoutDrive({seed}).run({STEPS})")
            raise
    return reached


def test_nobody_waits_for_what_is_there_in_whatever_layout() -> None:
    with counting_transitions() as counted:
        reached = run(range(SEEDS))
    assert counted["group operation: prepared -> committed"] > 50  # else it would show nothing
    assert min(reached[what] for what in ("bridges", "follows", "holds")) > 2, reached


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_nobody_waits_for_long() -> None:
    for seed in range(SEEDS, 1000):
        run(range(seed, seed + 1))
