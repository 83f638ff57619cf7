"""Events to attempts, stalls and waits."""

from __future__ import annotations

from math import inf, isnan
from typing import Any

import pytest

from benches.testbed.accounting import Attempt, attempts, quantile, stalls, waits
from benches.testbed.systems.base import PHASES


def begin(who: str, at_s: float, what: str = "update") -> dict[str, Any]:
    return {"who": who, "kind": "begin", "what": what, "began_s": at_s}


def done(
    who: str, began_s: float, ended_s: float, version: int = 2, what: str = "update", **phases: float
) -> dict[str, Any]:
    told = {"version": version, "phases": phases, "sources": {"trainer": 10}}
    return {"who": who, "kind": what, "began_s": began_s, "ended_s": ended_s, **told}


def publish(version: int, **phases: float) -> dict[str, Any]:
    took_s = sum(phases.values())
    return {
        "who": "trainer",
        "kind": "publish",
        "began_s": 1.0,
        "ended_s": 1.0 + took_s,
        "version": version,
        "phases": phases,
    }


END = {"who": "", "kind": "end", "began_s": 100.0}


def test_an_attempt_has_a_beginning_and_an_end() -> None:
    found = attempts([begin("a", 1.0), done("a", 1.0, 3.0, transfer=2.0), END])
    assert found == [Attempt("a", "update", 1.0, 3.0, "done", 2, {"transfer": 2.0}, {"trainer": 10})]
    assert found[0].seconds == 2.0


@pytest.mark.parametrize("kind", ["gone", "leave"])
def test_who_goes_breaks_its_attempt_off(kind: str) -> None:
    """And the next life's attempt is another one."""
    events = [begin("a", 1.0), {"who": "a", "kind": kind, "began_s": 4.0}, begin("a", 6.0, "join")]
    found = attempts([*events, done("a", 6.0, 7.0, what="join"), END])
    assert [(each.what, each.outcome, each.seconds) for each in found] == [
        ("update", "preempted", 3.0),
        ("join", "done", 1.0),
    ]


def test_what_runs_at_the_end_is_unfinished() -> None:
    assert [(each.outcome, each.seconds) for each in attempts([begin("a", 90.0), END])] == [("unfinished", 10.0)]


def test_who_goes_between_attempts_breaks_none_off() -> None:
    events = [begin("a", 1.0), done("a", 1.0, 2.0), {"who": "a", "kind": "gone", "began_s": 4.0}, END]
    assert [each.outcome for each in attempts(events)] == ["done"]


def test_events_come_in_any_order() -> None:
    events = [begin("a", 1.0), done("a", 1.0, 3.0), begin("b", 2.0), done("b", 2.0, 2.5), END]
    assert attempts(reversed(events)) == attempts(events)


def test_stalls_are_of_updates_and_of_the_trainer() -> None:
    """Neither who joins nor the first publication holds anybody up."""
    events = [
        publish(1, copy=5.0),
        begin("a", 0.0, "join"),
        done("a", 0.0, 9.0, 1, "join", transfer=9.0),
        publish(2, copy=0.5),
        begin("a", 10.0),
        done("a", 10.0, 12.0, wait=0.5, transfer=1.5),
        begin("b", 11.0),
        done("b", 11.0, 14.0, transfer=3.0),
        END,
    ]
    found = stalls(events, {"a": 1.0, "b": 2.0})
    assert found.total_s == 5.5
    assert found.floor_s == 3.0
    assert found.ratio == 5.5 / 3.0
    assert found.trainer_s == 0.5
    assert found.phases == {"stragglers": 0.0, "wait": 0.5, "transfer": 4.5, "copy": 0.5}
    assert set(found.phases) == set(PHASES)
    assert (found.updates, found.unfinished) == (2, 0)


def test_an_unfinished_update_counts_as_far_as_it_got() -> None:
    """So a system is not the better for updates that never end; and one that was short is not measured at a whole floor."""
    found = stalls([begin("a", 60.0), begin("b", 99.5), END], {"a": 1.0, "b": 2.0})
    assert (found.total_s, found.floor_s, found.updates, found.unfinished) == (40.5, 1.5, 0, 2)


def test_without_updates_there_is_no_ratio() -> None:
    assert isnan(stalls([END], {}).ratio)


def test_phases_add_up_to_the_total() -> None:
    events = [publish(2, wait=0.25), begin("a", 1.0), done("a", 1.0, 2.0, wait=0.5, transfer=0.5), begin("b", 99.0), END]
    found = stalls(events, {"a": 1.0, "b": 1.0})
    assert sum(found.phases.values()) == found.total_s


def of(seconds: float, outcome: Any = "done") -> Attempt:
    return Attempt("a", "join", 0.0, seconds, outcome)


def test_quantiles_without_censored_ones_are_plain() -> None:
    mine = [of(seconds) for seconds in (4.0, 1.0, 3.0, 2.0)]
    assert [quantile(mine, share) for share in (0.25, 0.5, 0.75, 0.95)] == [1.0, 2.0, 3.0, 4.0]


def test_a_preempted_attempt_has_taken_longer_than_it_lasted() -> None:
    """Left out, it would make the system look faster than it is."""
    mine = [of(1.0), of(1.5, "preempted"), of(2.0), of(4.0)]
    assert quantile([each for each in mine if each.outcome == "done"], 0.5) == 2.0
    assert quantile(mine, 0.7) == 4.0
    assert waits(mine, "join", "update") == waits(mine, "join")
    found = waits(mine, "join")
    assert (found.done, found.preempted, found.unfinished, found.median_s, found.p95_s) == (3, 1, 0, 2.0, 4.0)


def test_what_too_few_have_reached_is_not_known() -> None:
    assert quantile([of(1.0), of(2.0, "preempted"), of(3.0, "unfinished")], 0.5) == inf
    assert isnan(quantile([], 0.5))
