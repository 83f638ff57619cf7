"""A trainer that publishes, and rollouts that come, fetch, generate and go, whatever system moves
the weights.

Responsible for the time of each call, and for what it says: an `Attempt` is one call of one
rollout, from the moment when it could generate no more until it could again. That is its stall. Not
responsible for what a call does (`System`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Literal

from tensorhub.testing.flow.scenario import Hosts, Scenario
from tensorhub.testing.flow.timeline import Timeline
from tensorhub.testing.flow.timetable import Presence, generations, presences, rollouts
from tensorhub.testing.flow.topology import Topology
from tensorhub.testing.flow.transfers import Transfers

AGAIN_S = 0.05  # before a call that failed is made again
Outcome = Literal["done", "preempted", "unfinished"]


@dataclass(slots=True)
class Attempt:
    """One call of one rollout. `joins`: it held nothing before. `version`: what it got."""

    rollout: str
    joins: bool
    began_s: float
    ended_s: float = 0.0
    version: int = 0
    outcome: Outcome = "unfinished"

    @property
    def seconds(self) -> float:
        return self.ended_s - self.began_s


@dataclass(eq=False)
class Rollout:
    """One group of ranks. `life`: counts how often it came."""

    name: str
    hosts: Hosts
    lengths: Iterator[float]
    life: int = 0
    is_there: bool = False
    held: int = 0
    attempt: Attempt | None = None  # that runs
    generates: int = 0  # how often it began to; an older one's end does not count
    ends_s: float = 0.0  # when the generation that runs does
    is_idle: bool = False  # it waits for the next version, and that is no stall


class System:
    """What moves weights. A callback is called in the future, never at once."""

    name: str
    workload: Workload | None = None  # that calls it

    def put(self, version: int, done: Callable[[], None]) -> None:
        """The trainer has a new version. `done`: it may go on."""
        raise NotImplementedError

    def come(self, rollout: Rollout) -> None:
        """It is there from now on."""

    def notice(self, rollout: Rollout) -> None:
        """It will be gone soon."""

    def go(self, rollout: Rollout) -> None:
        """It is gone, without another word."""
        raise NotImplementedError

    def newest(self, rollout: Rollout) -> int:
        """What this rollout knows of."""
        raise NotImplementedError

    def get(
        self, rollout: Rollout, done: Callable[[int], None], failed: Callable[[], None]
    ) -> None:
        """It takes the newest version. `done`: with this number."""
        raise NotImplementedError


@dataclass
class World:
    """What every system is in."""

    scenario: Scenario
    timeline: Timeline
    topology: Topology
    transfers: Transfers

    @classmethod
    def of(cls, scenario: Scenario) -> World:
        timeline, topology = Timeline(), Topology(scenario)
        transfers = Transfers(timeline, topology.capacities)
        timeline.settled = transfers.settle
        return cls(scenario, timeline, topology, transfers)


@dataclass
class Workload:
    """All that happens in a scenario under one system. `attempts`, `puts`: what came of it."""

    world: World
    system: System
    attempts: list[Attempt] = field(default_factory=list)
    # when each began, and when the trainer went on
    puts: list[tuple[float, float]] = field(default_factory=list)
    rollouts: list[Rollout] = field(default_factory=list)
    is_over: bool = False

    def run(self) -> None:
        scenario, timeline = self.world.scenario, self.world.timeline
        absent = presences(scenario)
        for name, hosts in rollouts(scenario):
            rollout = Rollout(name, hosts, generations(scenario, name))
            self.rollouts.append(rollout)
            for each in absent.get(name, [Presence(0.0, scenario.ends_s * 1e3, None)]):
                self._plan(rollout, each)
        timeline.at(0.0, lambda: self._put(1))
        # A system that holds the trainer up takes longer. One that never ends ends here.
        timeline.run(scenario.ends_s * 1e3, lambda: self.is_over)
        for attempt in self.attempts:
            if attempt.outcome == "unfinished":
                attempt.ended_s = timeline.now

    def _plan(self, rollout: Rollout, presence: Presence) -> None:
        timeline = self.world.timeline
        timeline.at(presence.begin_s, lambda: self._come(rollout))
        if presence.notice_s is not None:
            timeline.at(presence.notice_s, lambda: self.system.notice(rollout))
        if presence.end_s < self.world.scenario.ends_s * 100:
            timeline.at(presence.end_s, lambda: self._go(rollout))

    # -- the trainer

    def _put(self, version: int) -> None:
        timeline = self.world.timeline
        began = timeline.now
        every_s = self.world.scenario.every_copies * self.world.scenario.copy_s

        def done() -> None:
            self.puts.append((began, timeline.now))
            if version < self.world.scenario.versions:
                timeline.after(every_s, lambda: self._put(version + 1))
            else:
                timeline.after(every_s, self._end)

        self.system.put(version, done)

    def _end(self) -> None:
        self.is_over = True

    # -- rollouts

    def _come(self, rollout: Rollout) -> None:
        rollout.is_there, rollout.held = True, 0
        rollout.life += 1
        self.system.come(rollout)
        self._get(rollout)

    def _go(self, rollout: Rollout) -> None:
        rollout.is_there = rollout.is_idle = False
        rollout.generates += 1
        if rollout.attempt is not None:
            self._ended(rollout, "preempted", rollout.attempt.version)
        self.system.go(rollout)

    def _get(self, rollout: Rollout) -> None:
        """Its generation has ended: it fetches the newest version."""
        rollout.is_idle = False
        if rollout.attempt is None:
            rollout.attempt = Attempt(rollout.name, not rollout.held, self.world.timeline.now)
            self.attempts.append(rollout.attempt)
        life = rollout.life

        def done(version: int) -> None:
            if rollout.is_there and rollout.life == life:
                rollout.held = version
                self._ended(rollout, "done", version)
                self._generate(rollout, next(rollout.lengths))

        def failed() -> None:
            if rollout.is_there and rollout.life == life:
                self.world.timeline.after(
                    AGAIN_S, lambda: self._get(rollout) if rollout.life == life else None
                )

        self.system.get(rollout, done, failed)

    def _ended(self, rollout: Rollout, outcome: Outcome, version: int) -> None:
        attempt = rollout.attempt
        if attempt is not None:
            attempt.ended_s, attempt.outcome, attempt.version = (
                self.world.timeline.now,
                outcome,
                version,
            )
            rollout.attempt = None

    def _generate(self, rollout: Rollout, seconds: float) -> None:
        rollout.generates += 1
        number, timeline = rollout.generates, self.world.timeline
        rollout.ends_s = timeline.now + seconds

        def generated() -> None:
            if rollout.generates == number and rollout.is_there:
                self._generated(rollout)

        timeline.after(seconds, generated)

    def _generated(self, rollout: Rollout) -> None:
        if self.system.newest(rollout) > rollout.held:
            self._get(rollout)
        elif self.world.scenario.generate_mean_copies:
            self._generate(rollout, next(rollout.lengths))
        else:
            rollout.is_idle = True

    # -- what systems say

    def announced(self, rollout: Rollout) -> None:
        """It knows of a newer version now."""
        if rollout.is_idle and self.system.newest(rollout) > rollout.held:
            self._get(rollout)

    def pause(self, rollout: Rollout) -> None:
        """In the midst of its generation."""
        if rollout.attempt is None and rollout.is_there:
            rollout.generates += 1
            rollout.attempt = Attempt(rollout.name, not rollout.held, self.world.timeline.now)
            self.attempts.append(rollout.attempt)

    def resume(self, rollout: Rollout, version: int) -> None:
        """It goes on with the new version, where it was."""
        if rollout.attempt is not None and rollout.is_there:
            began = rollout.attempt.began_s
            rollout.held = version
            self._ended(rollout, "done", version)
            self._generate(rollout, max(0.0, rollout.ends_s - began))
