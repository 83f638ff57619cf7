"""What a trainer and rollouts do when, and which of it is a stall; under a system whose times are
given.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from tensorhub.testing.flow.scenario import Hosts, Scenario, Spot, load
from tensorhub.testing.flow.timetable import presences
from tensorhub.testing.flow.workload import AGAIN_S, Attempt, Rollout, System, Workload, World


class Given(System):
    """`put_s`, `get_s`: how long these take. `fails`: so many gets fail at first. `said`: what it
    was told, when.
    """

    name = "given"
    workload: Workload

    def __init__(
        self, scenario: Scenario, *, put_s: float = 0.0, get_s: float = 1.0, fails: int = 0
    ) -> None:
        self.world = World.of(scenario)
        self.workload = Workload(self.world, self)
        self.put_s, self.get_s, self.fails = put_s, get_s, fails
        self.version = 0
        self.said: list[tuple[str, float]] = []

    def put(self, version: int, done: Callable[[], None]) -> None:
        self.version = version
        self.world.timeline.after(self.put_s, done)
        for rollout in self.workload.rollouts:
            self.workload.announced(rollout)

    def come(self, rollout: Rollout) -> None:
        self._note("come")

    def notice(self, rollout: Rollout) -> None:
        self._note("notice")

    def go(self, rollout: Rollout) -> None:
        self._note("go")

    def newest(self, rollout: Rollout) -> int:
        return self.version

    def get(
        self, rollout: Rollout, done: Callable[[int], None], failed: Callable[[], None]
    ) -> None:
        self._note("get")
        if self.fails:
            self.fails -= 1
            self.world.timeline.after(0.0, failed)
        else:
            self.world.timeline.after(self.get_s, lambda: done(self.version))

    def _note(self, what: str) -> None:
        self.said.append((what, self.world.timeline.now))

    def run(self) -> list[tuple[Any, ...]]:
        self.workload.run()
        return [
            (a.joins, pytest.approx(a.began_s), pytest.approx(a.ended_s), a.version, a.outcome)
            for a in self.attempts
        ]

    @property
    def attempts(self) -> list[Attempt]:
        return self.workload.attempts


def scenario(spot: Spot | None = None, *, generate: float = 4.0) -> Scenario:
    """One rollout, a publication each 10 s, and generations of 4 s."""
    hosts = Hosts("trainer", "a", 1), Hosts("rollout", "a", 1, spot is not None)
    made = replace(
        load("standalone"), versions=3, every_copies=10.0, hosts=hosts, spot=spot, scale=None
    )
    made = replace(made, generate_mean_copies=generate, generate_sigma=0.0)
    assert made.copy_s == 1.0
    return made


def lives(on_s: float, off_s: float) -> Spot:
    return Spot(on_copies=on_s, off_copies=off_s, spread=0.0, notice_share=1.0, notice_copies=1.0)


def test_a_rollout_fetches_when_its_generation_has_ended_and_there_is_a_newer_version() -> None:
    system = Given(scenario())
    assert system.run() == [
        (True, 0.0, 1.0, 1, "done"),
        (False, 13.0, 14.0, 2, "done"),
        (False, 22.0, 23.0, 3, "done"),
    ]
    assert system.workload.puts == [(0.0, 0.0), (10.0, 10.0), (20.0, 20.0)]
    assert system.world.timeline.now == 30.0


def test_a_trainer_that_is_held_up_trains_later() -> None:
    system = Given(scenario(), put_s=2.0)
    system.run()
    assert system.workload.puts == [(0.0, 2.0), (12.0, 14.0), (24.0, 26.0)]
    assert system.world.timeline.now == 36.0


def test_calls_that_fail_are_one_stall() -> None:
    first, *_ = Given(scenario(), fails=2).run()
    assert first == (True, 0.0, 1.0 + 2 * AGAIN_S, 1, "done")


def test_without_generations_a_rollout_waits_for_the_next_version_and_that_is_no_stall() -> None:
    assert Given(scenario(generate=0.0)).run() == [
        (True, 0.0, 1.0, 1, "done"),
        (False, 10.0, 11.0, 2, "done"),
        (False, 20.0, 21.0, 3, "done"),
    ]


def test_who_comes_back_holds_nothing_and_its_former_generation_does_not_count() -> None:
    """It fetches for 3 s, and is gone 2 s into its generation of 4 s, whose end would be in its
    next life.
    """
    made = scenario(lives(5.0, 1.0))
    system = Given(made, get_s=3.0)
    began = [life.begin_s for life in presences(made)["rollout-0"] if life.begin_s < 30]
    attempts = system.run()
    assert len(attempts) == len(began) > 4
    assert all(
        attempt[:3] == (True, begin, begin + 3)
        for attempt, begin in zip(attempts[:-1], began[:-1], strict=True)
    )
    assert {attempt[4] for attempt in attempts[:-1]} == {"done"}
    assert [when for what, when in system.said if what == "get"] == pytest.approx(began)
    assert [when for what, when in system.said if what == "notice"] == pytest.approx(
        [begin + 4 for begin in began if begin + 4 <= 30]
    )


def test_who_is_gone_in_a_call_was_preempted_and_what_that_brings_later_does_not_count() -> None:
    """A call takes 3 s, a life 2 s, and the next one begins half a second later."""
    system = Given(scenario(lives(2.0, 0.5)), get_s=3.0)
    system.run()
    ended = [each for each in system.attempts if each.ended_s < 30]
    assert len(ended) > 10
    assert {(each.outcome, each.version) for each in ended} == {("preempted", 0)}
    assert [each.seconds for each in ended] == pytest.approx([2.0] * len(ended))


def test_what_still_runs_at_the_end_is_unfinished_and_has_taken_until_then() -> None:
    assert Given(scenario(), get_s=1000.0).run() == [(True, 0.0, 30.0, 0, "unfinished")]


def test_a_paused_generation_goes_on_for_what_was_left_of_it() -> None:
    """It has begun at 1, is paused from 2 to 4, and so ends at 7 instead of 5."""
    system = Given(scenario())
    timeline, workload = system.world.timeline, system.workload

    def pause() -> None:
        workload.pause(workload.rollouts[0])
        workload.pause(workload.rollouts[0])  # once more: it is the same stall

    def resume() -> None:
        workload.resume(workload.rollouts[0], 1)
        system.version = 2

    timeline.at(2.0, pause)
    timeline.at(4.0, resume)
    assert system.run()[:3] == [
        (True, 0.0, 1.0, 1, "done"),
        (False, 2.0, 4.0, 1, "done"),
        (False, 7.0, 8.0, 2, "done"),
    ]
