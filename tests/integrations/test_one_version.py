"""The states of engines and a trainer's steps under random orders of events: lost calls and
answers, late calls, faults of flips, engines and trainers that are killed, coordinators that lose
their state, and clocks that go on.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Set
from contextlib import suppress
from dataclasses import dataclass, field

import pytest

from tensorhub.errors import LeaseLost, StateError
from tensorhub.integrations.one_version import (
    ABORT,
    ATTEMPTS,
    COMMIT,
    Answer,
    Decide,
    EngineState,
    Fence,
    Flip,
    Records,
    Seat,
    Settle,
    Stage,
    Step,
    steps,
    version_of,
)
from tensorhub.machine import IllegalTransition

LEASE_S, DECIDE_S = 1.0, 2.0
NAMES = ("a", "b", "c")


class Log:
    """The coordinator's part: a number is published once, and above all before. Only the two newest
    ones are listed. `history`: another number for each loss of its state; then this one answers
    nothing.
    """

    def __init__(self, history: int = 0) -> None:
        self.history, self.is_lost = history, False
        self.numbers: dict[int, int] = {}
        self.committed: int | None = None

    def append(self, number: int, nbytes: int) -> bool:
        if self.is_lost:
            raise LeaseLost("the coordinator has lost its state")
        if number <= max(self.numbers, default=-1):
            return False
        self.numbers[number] = nbytes
        return True

    def read(self) -> Records:
        if self.is_lost:
            raise LeaseLost("the coordinator has lost its state")
        newest = sorted(self.numbers)[-2:]
        return Records({each: self.numbers[each] for each in newest}, self.committed)

    def decide(self, attempt: int, is_commit: bool) -> bool:
        if self.append(2 * attempt + 1, COMMIT if is_commit else ABORT):
            return is_commit
        return bool(self.read().decision(attempt))

    def note(self, version: int) -> None:
        self.committed = max(version, -1 if self.committed is None else self.committed)


class SimEngine:
    """What `one_version_engine` does around a `Seat`. `place`: the content that is in place, by its
    history and version. `log`: of the coordinator that it has reached last.
    """

    def __init__(self, log: Log) -> None:
        self.seat = Seat(LEASE_S, DECIDE_S)
        self.log = self.known = log
        self.place: tuple[int, int] | None = None
        self.old: tuple[int, int] | None = None
        self.staged: tuple[int, int] | None = None
        self.polled: tuple[Records, float] | None = None
        # fetched, not in place yet
        self.caught: tuple[tuple[int, int], Records, float] | None = None
        self.fence_seen: tuple[int, float] | None = None
        self.asked_at = -LEASE_S  # the coordinator has heard of it then

    def follow(self, now: float) -> None:
        if self.known is not self.log:
            self.known, self.fence_seen = self.log, None
            self.seat.forget(now)

    def call(self, step: Step, now: float, fails: bool) -> None:
        self.follow(now)
        if isinstance(step, Stage):
            self.seat.begin(step.attempt, now)
            if fails:
                raise StateError("it cannot be staged")
            self.seat.vote(step.attempt, now)
            self.staged = self.log.history, version_of(step.attempt)
        elif isinstance(step, Flip):
            if self.seat.flip(step.attempt, now):
                self.old, self.place = self.place, None if fails else self.staged
            if self.place is None:
                raise StateError("it cannot be put in place")
        elif isinstance(step, Settle):
            self.settle(step.attempt, step.is_commit, now)

    def settle(self, attempt: int, is_commit: bool, now: float) -> None:
        is_flipped = attempt == self.seat.attempt and self.seat.state is EngineState.FLIPPED
        if is_flipped and (not is_commit or self.place is None):
            self.place = self.staged if is_commit else self.old
        self.seat.settle(attempt, is_commit, now)

    def poll(self, now: float) -> None:
        """The first part asks, the second one acts on the answer, and a third one puts in place
        what the engine has fetched itself.
        """
        seat = self.seat
        self.follow(now)
        if self.caught is not None:
            (place, records, asked_at), self.caught = self.caught, None
            is_lost = place[0] != self.log.history
            if not (seat.state is EngineState.FLIPPED or seat.is_outdated(asked_at) or is_lost):
                self.place = place
                seat.caught_up(place[1], records, asked_at)
            return
        if self.polled is None:
            self.polled = self.read(now)
            return
        (records, asked_at), self.polled = self.polled, None
        overdue = self.overdue(records, now)
        if overdue is not None:
            self.log.decide(overdue, False)
            records, asked_at = self.read(now)
        if seat.is_outdated(asked_at):
            return
        if seat.state is EngineState.FLIPPED:
            decision = records.decision(seat.attempt)
            if decision is not None:
                self.settle(seat.attempt, decision, now)
        seat.heard(records, asked_at)
        if seat.is_behind(records):
            assert records.current is not None
            self.caught = (self.log.history, records.current), *self.read(now)

    def read(self, now: float) -> tuple[Records, float]:
        records, self.asked_at = self.log.read(), now
        return records, now

    def overdue(self, records: Records, now: float) -> int | None:
        fence = records.fence
        if fence is None:
            self.fence_seen = None
        elif self.fence_seen is None or self.fence_seen[0] != fence:
            self.fence_seen = fence, now
        elif now >= self.fence_seen[1] + DECIDE_S:
            return fence
        undecided = records.decision(self.seat.attempt) is None
        return self.seat.attempt if self.seat.is_overdue(now) and undecided else None


@dataclass
class SimTrainer:
    """One step at a time; each of its calls is an event of its own. It asks the engines that the
    coordinator lists, and looks again after the fence.
    """

    world: World
    version: int
    its: Iterator[Step] = field(init=False)
    step: Step | None = None
    left: list[str] = field(default_factory=list)
    done: set[str] = field(default_factory=set)
    resumes_at: float = 0.0
    fenced: int = -1
    waited: int = -1  # in this attempt, for engines that are listed since
    result: Set[str] | None = None

    def __post_init__(self) -> None:
        self.log = log = self.world.log
        records = log.read()
        if records.fence is not None:
            log.decide(records.fence, False)
            records = log.read()
        for number, nbytes in records.known.items():
            if number % 2 and nbytes == COMMIT:
                log.note(version_of(number // 2))
        is_first = records.current is None
        self.alone_at = self.world.now + self.world.fence_wait_s if is_first else 0.0
        first = max(self.version * ATTEMPTS, records.newest // 2 + 2)
        self.listed = self.world.listed()
        self._steps = steps(first, self.listed, 4)
        self._take(None)

    def _take(self, answer: Answer | None) -> None:
        try:
            self.step = next(self._steps) if answer is None else self._steps.send(answer)
        except StopIteration as end:
            self.step, self.result = None, end.value
            return
        self.done = set()
        self.left = []
        if isinstance(self.step, Stage) and not self.begins(self.step.attempt):
            self.step = None
        if isinstance(self.step, Stage | Flip | Settle):
            self.left = self.world.random.sample(sorted(self.step.engines), len(self.step.engines))

    def begins(self, attempt: int) -> bool:
        return attempt - 1 == self.fenced or self.log.append(2 * attempt - 1, ABORT)

    def go_on(self) -> None:
        try:
            self._go_on()
        except LeaseLost:
            self.step = None

    def _go_on(self) -> None:
        world, step = self.world, self.step
        if step is None or world.now < self.resumes_at:
            return
        if isinstance(step, Fence):
            if world.now < self.alone_at:
                return
            if not self.resumes_at:
                if not self.log.append(2 * step.attempt, 1):
                    self._take(False)
                    return
                self.fenced = step.attempt
                if step.waits:
                    self.resumes_at = world.now + world.fence_wait_s
                    return
            self.resumes_at = 0.0
            self._take(True)
        elif isinstance(step, Decide):
            self._take(self.log.decide(step.attempt, step.is_commit))
        elif self.left:
            name = self.left.pop()
            if world.calls(name, step):
                self.done.add(name)
        elif (
            isinstance(step, Flip)
            and step.attempt != self.waited
            and set(world.listed()) - set(self.listed)
        ):
            self.waited = step.attempt
            self.resumes_at = world.now + world.fence_wait_s
        else:
            self.resumes_at = 0.0
            if isinstance(step, Settle) and step.is_commit:
                self.log.note(version_of(step.attempt))
            self._take(frozenset(self.done))


class World:
    def __init__(self, seed: int, *, fence_wait_s: float = LEASE_S * 1.01) -> None:
        self.random = random.Random(seed)
        self.now = 0.0
        self.log = Log()
        self.fence_wait_s = fence_wait_s
        self.engines = {name: SimEngine(self.log) for name in NAMES}
        self.late: list[tuple[str, Step]] = []
        self.zombies: list[SimTrainer] = []
        self.faults = 0.15
        self.version = 1
        self.trainer = SimTrainer(self, 1)
        self.served = -1, -1
        self.commits = self.losses = 0

    def calls(self, name: str, step: Step) -> bool:
        """Whether the trainer gets a good answer."""
        luck = self.random.random()
        if luck < self.faults / 3:
            return False  # the call is lost
        if luck < self.faults * 2 / 3:
            self.late.append((name, step))
            return False
        is_answered = self.delivers(name, step)
        return is_answered and luck > self.faults

    def delivers(self, name: str, step: Step) -> bool:
        try:
            fails = self.random.random() < self.faults / 2
            self.engines[name].call(step, self.now, fails)
        except StateError:
            return False
        return True

    def event(self) -> None:
        kind = self.random.random()
        if kind < 0.45:
            self.trainer.go_on()
        elif kind < 0.80:
            self.poll(self.random.choice(NAMES))
        elif kind < 0.92:
            self.now += self.random.choice([0.01, 0.2, 0.5])
        elif self.faults and kind < 0.94:
            if self.late:
                self.delivers(*self.late.pop(self.random.randrange(len(self.late))))
        elif self.faults and kind < 0.95:
            self.engines[self.random.choice(NAMES)] = SimEngine(self.log)  # killed, started anew
        elif (self.faults and kind < 0.96) or self.trainer.step is None:
            self.commits += bool(self.trainer.result)
            self.zombies.append(self.trainer)
            self.version += self.random.random() < 0.7
            self.trainer = SimTrainer(self, self.version)
        elif self.faults and kind < 0.97 and self.zombies:
            self.random.choice(self.zombies).go_on()  # it was only stopped for a while
        elif self.faults and 0.97 <= kind < 0.972:
            self.lose()
        elif kind >= 0.98:
            self.engines[self.random.choice(NAMES)].log = self.log
        self.judge()

    def listed(self) -> list[str]:
        """Without some of those that were not heard of for long."""
        return [
            name
            for name, each in self.engines.items()
            if each.log is self.log
            and (self.now < each.asked_at + LEASE_S or self.random.random() < 0.7)
        ]

    def poll(self, name: str) -> None:
        with suppress(LeaseLost):
            self.engines[name].poll(self.now)

    def lose(self) -> None:
        """The coordinator comes back without its state. Engines reach it one after another, and a
        trainer begins again.
        """
        self.log.is_lost = True
        self.log = Log(self.log.history + 1)
        self.zombies.append(self.trainer)
        self.version = 1
        self.trainer = SimTrainer(self, self.version)
        self.losses += 1

    def judge(self) -> None:
        serving = {name: each.seat.serves(self.now) for name, each in self.engines.items()}
        places = set[tuple[int, int]]()
        for name, version in serving.items():
            if version is not None:
                place = self.engines[name].place
                assert place is not None
                assert place[1] == version, f"{name} has torn weights"
                places.add(place)
        assert len(places) <= 1, f"two versions are served: {serving}, {places}"
        for place in places:
            assert place >= self.served, f"version {place} after {self.served}"
            self.served = place

    def run(self, events: int) -> None:
        for _ in range(events):
            self.event()


@pytest.mark.parametrize(
    "seeds", [range(20), pytest.param(range(20, 400), marks=pytest.mark.heavy)]
)
def test_no_two_versions_are_served_at_any_time_and_all_serve_one_in_the_end(seeds: range) -> None:
    commits = losses = 0
    for seed in seeds:
        world = World(seed)
        world.run(1500)
        commits += world.commits
        losses += world.losses
        world.faults = 0.0
        for each in world.engines.values():
            each.log = world.log
        while world.trainer.step is not None:  # the last update comes to its end
            world.event()
        for _ in range(200):
            world.now += 0.1
            for each in world.engines.values():
                each.poll(world.now)
                each.poll(world.now)
            world.judge()
        serving = {each.seat.serves(world.now) for each in world.engines.values()}
        assert serving == {world.log.read().current}, seed
    assert commits > len(seeds)  # it is no proof if nothing is ever committed
    assert losses > len(seeds)


def test_the_judge_finds_a_trainer_that_does_not_wait_for_leases() -> None:
    with pytest.raises(AssertionError, match="two versions are served"):  # noqa: PT012
        for seed in range(400):
            World(seed, fence_wait_s=0.0001).run(1500)


def test_the_judge_finds_a_first_commit_that_does_not_wait_for_leases_of_before(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Of engines that have not reached the coordinator since it has lost its state."""
    made = SimTrainer.__post_init__

    def hurried(trainer: SimTrainer) -> None:
        made(trainer)
        trainer.alone_at = 0.0

    monkeypatch.setattr(SimTrainer, "__post_init__", hurried)
    with pytest.raises(AssertionError, match="two versions are served"):  # noqa: PT012
        for seed in range(400):
            World(seed).run(1500)


def test_the_judge_finds_trainers_whose_attempts_have_the_same_numbers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A vote for one of them is none for the other."""
    monkeypatch.setattr(SimTrainer, "begins", lambda *_: True)
    with pytest.raises(AssertionError, match="two versions are served"):  # noqa: PT012
        for seed in range(400):
            World(seed).run(1500)


def test_an_attempt_without_faults() -> None:
    its = steps(ATTEMPTS, NAMES, 4)
    assert next(its) == Stage(ATTEMPTS, frozenset(NAMES))
    assert its.send(frozenset(NAMES)) == Fence(ATTEMPTS, waits=False)
    assert its.send(True) == Flip(ATTEMPTS, frozenset(NAMES))
    assert its.send(frozenset(NAMES)) == Decide(ATTEMPTS, True)
    assert its.send(True) == Settle(ATTEMPTS, frozenset(NAMES), True)
    with pytest.raises(StopIteration) as end:
        its.send(True)
    assert end.value.value == frozenset(NAMES)


def test_an_engine_that_did_not_vote_is_fenced_and_one_that_did_not_flip_ends_the_attempt() -> None:
    its = steps(ATTEMPTS, NAMES, 4)
    next(its)
    two = frozenset({"a", "b"})
    assert its.send(two) == Stage(ATTEMPTS + 1, two)
    assert its.send(two) == Fence(ATTEMPTS + 1, waits=True)
    assert its.send(True) == Flip(ATTEMPTS + 1, two)
    assert its.send(frozenset({"b"})) == Decide(ATTEMPTS + 1, False)
    assert its.send(False) == Settle(ATTEMPTS + 1, two, False)
    assert its.send(True) == Stage(ATTEMPTS + 2, frozenset({"b"}))
    with pytest.raises(StopIteration) as end:
        its.send(frozenset())
    assert end.value.value == frozenset()


def test_a_seat_keeps_to_its_table() -> None:
    seat = Seat(LEASE_S, DECIDE_S)
    with pytest.raises(StateError, match="has not voted in attempt 5"):
        seat.flip(5, 0.0)
    with pytest.raises(IllegalTransition, match="ready -> flipped"):
        seat.become(EngineState.FLIPPED, 0, 0.0, "a test")
    seat.begin(5, 0.0)
    seat.vote(5, 0.0)
    with pytest.raises(StateError, match="cannot take version 0 now"):
        seat.begin(4, 0.0)
    assert seat.flip(5, 0.0)
    assert not seat.flip(5, 0.0)  # repeated
    with pytest.raises(StateError, match="waits for the decision on version 0"):
        seat.begin(6, 0.0)
    assert seat.settle(5, True, 0.0)
    assert not seat.settle(5, True, 0.0)
    seat.begin(ATTEMPTS, 0.0)
    seat.vote(ATTEMPTS, 0.0)
    assert not seat.settle(ATTEMPTS, True, 0.0)  # it has not flipped: its weights are the old ones
    assert seat.version == version_of(5) != version_of(ATTEMPTS)


def test_a_decision_that_newer_records_hide() -> None:
    newer = {18: 1, 19: ABORT}
    assert [Records(newer, None).decision(n) for n in (8, 9, 10)] == [False, False, None]
    assert Records(newer, version_of(8)).decision(8) is True
