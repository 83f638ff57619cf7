"""However guests come and go, who could be served is served in the end; and the drive notices where that is not so."""

from __future__ import annotations

from unittest.mock import patch

import pytest

from tensorhub.coordinator import limits
from tensorhub.coordinator.entities import ReadLease
from tensorhub.coordinator.readers import Readers
from tensorhub.coordinator.states import LeaseState
from tensorhub.machine import InvariantBroken
from tests.property.guest_drive import SMALL, GuestDrive, GuestForgotten

SEEDS = 16
SEEDS_OF_SLOW = 1500


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, limit in SMALL.items():
        monkeypatch.setattr(limits, name, limit)


def run(seeds: range) -> list[GuestDrive]:
    """What failed names its seed."""
    drives = [GuestDrive(seed) for seed in seeds]
    for drive in drives:
        try:
            drive.run()
        except (GuestForgotten, InvariantBroken) as error:
            error.add_note(f"GuestDrive({drive.seed}).run()")
            raise
    return drives


def test_whoever_could_be_served_is_served() -> None:
    drives = run(range(SEEDS))
    assert sum(drive.served for drive in drives) > 50  # else it would show nothing
    assert sum(drive.waited for drive in drives) > 300
    assert any("Options.guest_share" in reason for drive in drives for reason in drive.lobby.closed.values())


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_whoever_could_be_served_is_served_for_long() -> None:
    for seed in range(SEEDS, SEEDS_OF_SLOW):
        run(range(seed, seed + 1))


# ------------------------------------------------------------------------------------------- that it finds what is wrong

BECOME = Readers._become


def place_that_is_freed_and_wakes_nobody(readers: Readers, lease: ReadLease, state: LeaseState, why: str) -> None:
    model, version = lease.holding.member.group.model, lease.holding.version
    waiting = model.guests_unbound, version.starving, readers._cluster.woken_guests
    before = [dict(each) for each in waiting]
    BECOME(readers, lease, state, why)
    for each, was in zip(waiting, before, strict=True):
        each.clear()
        each.update(was)


def place_that_a_cancelled_guest_keeps(readers: Readers, lease: ReadLease, state: LeaseState, why: str) -> None:
    BECOME(readers, lease, state, why)
    guest = lease.part.member.worker
    if guest.read_only and why == "operation aborted":
        lease.holding.guests.add(guest.origin, guest)


def test_it_finds_a_freed_place_that_wakes_nobody() -> None:
    with patch.object(Readers, "_become", place_that_is_freed_and_wakes_nobody), pytest.raises(GuestForgotten):
        run(range(SEEDS))


def test_it_finds_a_cancelled_guest_that_keeps_its_place() -> None:
    with patch.object(Readers, "_become", place_that_a_cancelled_guest_keeps), pytest.raises(InvariantBroken):
        run(range(SEEDS))
