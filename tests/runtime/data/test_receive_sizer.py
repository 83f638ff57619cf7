"""How much a lane's calls receive, over slow and over fast links."""

from __future__ import annotations

import pytest

from tensorhub.runtime.data.receive_sizer import CACHED_BYTES, CONTENDED_S, FIRST_BYTES, LARGE_BYTES, OFFER_S, ReceiveSizer
from tensorhub.scheduler.links import SECONDS_MIN


def calls(sizer: ReceiveSizer, *bytes_per_s: float, verify_s: float = 0.0, is_digested: bool = True) -> list[int]:
    """What one call after another receives, each at that speed; and the next one."""
    sizes = [sizer.call_bytes]
    for speed in bytes_per_s:
        sizer.arrived(sizes[-1], sizes[-1] / speed, verify_s, 0.0, is_digested=is_digested)
        sizes.append(sizer.call_bytes)
    return sizes


@pytest.mark.parametrize("speed", [25e6, 1e6])
@pytest.mark.parametrize(("verify_s", "calls_s"), [(0.0, OFFER_S), (1.0, CONTENDED_S)])
def test_over_a_slow_link_a_call_ends_soon(speed: float, verify_s: float, calls_s: float) -> None:
    """What has arrived is another reader's only when the call has returned."""
    sizes = calls(ReceiveSizer(), *[speed] * 10, verify_s=verify_s)
    assert sizes[-1] == pytest.approx(speed * calls_s, rel=0.01)


def test_over_a_fast_link_calls_are_soon_large() -> None:
    sizes = calls(ReceiveSizer(), *[10e9] * 6)
    assert (sizes[0], sizes[3:]) == (FIRST_BYTES, [CACHED_BYTES] * 4)


def test_one_slow_call_does_not_count_for_long() -> None:
    sizes = calls(ReceiveSizer(), *[10e9] * 4, 10e6, *[10e9] * 4)
    assert sizes[5] < FIRST_BYTES
    assert sizes[-1] == CACHED_BYTES


@pytest.mark.parametrize(("verify_s", "is_digested"), [(1.0, True), (0.0, False)])
def test_where_small_pieces_do_not_pay_calls_are_larger(verify_s: float, is_digested: bool) -> None:
    assert calls(ReceiveSizer(), *[50e9] * 8, verify_s=verify_s, is_digested=is_digested)[-1] == LARGE_BYTES


def test_a_flow_begins_with_its_first_bytes() -> None:
    sizer = ReceiveSizer()
    sizer.arrived(10**6, 5.0, 0.0, 100.0, is_digested=True)
    assert sizer.meter.flow("l") is None
    sizer.arrived(7, 0.1, 0.0, 100.0 + SECONDS_MIN / 2, is_digested=True)
    assert sizer.meter.flow("l") is None
    sizer.arrived(8, 0.1, 0.0, 104.0, is_digested=True)
    flow = sizer.meter.flow("l")
    assert flow is not None
    assert (flow.lease, flow.nbytes, flow.seconds) == ("l", 15, 4.0)
