"""The load generator: thin workers fill every version, alone and in groups, and the figures are of
what was done.
"""

from __future__ import annotations

import anyio
import pytest

from benches.scale import server
from benches.scale.core import REPORTS, bursts, measure


@pytest.mark.parametrize("ranks", [1, 4])
@pytest.mark.parametrize("wait_first", [False, True])
def test_everybody_fills_every_version(ranks: int, wait_first: bool) -> None:
    row = measure(8, ranks, 3, 1000, wait_first=wait_first)
    assert row.filling.count["Prepared"] == row.filling.count["Fill"] == 8 * 3
    assert row.filling.count["Progress"] == 8 * 3 * REPORTS
    assert not row.filling.count["ReadyToWrite"]  # nobody has a hook
    assert row.connecting.count["Register"] == 8 + ranks
    assert f"{8:>8}{ranks:>6}" in str(row)
    assert "Prepared" in row.by_event()


@pytest.mark.parametrize("ranks", [1, 4])
def test_what_happens_to_all_at_once(ranks: int) -> None:
    found = bursts(16, ranks, 1000)
    assert found["retain"].count["RetainedAck"] == 16 + ranks
    assert found["retained"].count["Prepared"] == 16
    assert found["leave"].count["Fenced"] == 16
    assert found["lose"].count["Disconnected"] == 8


@pytest.mark.slow
def test_over_sockets_everybody_is_assigned_a_source_and_nobody_is_lost() -> None:
    row = anyio.run(server.measure, 16, 2, 2, 1000, 10.0)
    assert len(row.arrived_ms) == len(row.assigned_ms) == 16 * 2
    assert all(
        arrived <= assigned
        for arrived, assigned in zip(row.arrived_ms, row.assigned_ms, strict=True)
    )
    assert row.lost == 0
    assert str(row).split()[0] == "16"


@pytest.mark.slow
def test_over_sockets_calls_that_wait_survive_a_restart_of_the_coordinator() -> None:
    row = anyio.run(server.restart, 16, 10_000, 10.0)  # with a manifest that it has to ask for
    assert row.lost == 0
    assert row.back_s <= row.assigned_s < float("inf")
