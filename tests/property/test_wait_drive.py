"""Whatever workers say, and whenever, nobody waits for what is there; and the drive notices where that is not so."""

from __future__ import annotations

from unittest.mock import patch

import pytest

from tensorhub.coordinator import limits
from tensorhub.coordinator.cluster import Cluster
from tensorhub.coordinator.operations import Operations
from tensorhub.machine import InvariantBroken, counting_transitions
from tests.property.wait_drive import SMALL, Forgotten, WaitDrive

SEEDS = 40
SEEDS_OF_SLOW = 2000
STEPS = 400


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, limit in SMALL.items():
        monkeypatch.setattr(limits, name, limit)


def run(seeds: range) -> None:
    """What failed names its seed."""
    for seed in seeds:
        try:
            WaitDrive(seed).run(STEPS)
        except (Forgotten, InvariantBroken) as error:
            error.add_note(f"WaitDrive({seed}).run({STEPS})")
            raise


def test_nobody_waits_for_what_is_there() -> None:
    with counting_transitions() as counted:
        run(range(SEEDS))
    assert counted["group operation: prepared -> committed"] > 100  # else it would show nothing
    assert counted["read lease: fencing -> fenced"] > 10
    assert counted["replica: filling -> torn"] > 5


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_nobody_waits_for_what_is_there_for_long() -> None:
    for seed in range(SEEDS, SEEDS_OF_SLOW):
        run(range(seed, seed + 1))


# ------------------------------------------------------------------------------------------- that it finds what is wrong


def failed_source_that_is_never_tried_again(operations: Operations, key: str) -> None:
    pass


def source_that_wakes_nobody(cluster: Cluster) -> None:
    while cluster.uncounted:
        version, _ = cluster.uncounted.popitem()
        version.holdings.count()
        version.holdings.has_grown = False


@pytest.mark.parametrize(
    ("owner", "name", "bug"),
    [
        (Operations, "retry_due", failed_source_that_is_never_tried_again),
        (Cluster, "count", source_that_wakes_nobody),
    ],
)
def test_it_finds_a_forgotten_wakeup(owner: type, name: str, bug: object) -> None:
    with patch.object(owner, name, bug), pytest.raises(Forgotten):
        run(range(SEEDS))
