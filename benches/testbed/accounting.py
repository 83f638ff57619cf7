"""What came of a run: the events that its processes wrote, as attempts, stalls and waits. Pure.

A *stall* is the time during which a worker can neither train nor generate because of weight
transfer. A rollout stalls from when it could generate again until it does, the trainer from when it
could train again until it does. Its *floor* is what the bytes take into the rollout over its own
link, at the rate that was measured on such a link; the trainer's is none.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from math import ceil, nan
from typing import Any, Literal

from benches.testbed.systems.base import PHASES

Event = Mapping[str, Any]
Outcome = Literal["done", "preempted", "unfinished"]


@dataclass(frozen=True, slots=True)
class Attempt:
    """A rollout wanted the newest version. One that was preempted ended with its host, an
    unfinished one with the run.
    """

    who: str
    what: str  # "join": it held none; or "update"
    began_s: float
    ended_s: float
    outcome: Outcome = "done"
    version: int | None = None
    phases: Mapping[str, float] = field(default_factory=dict)
    sources: Mapping[str, int] = field(default_factory=dict)

    @property
    def seconds(self) -> float:
        return self.ended_s - self.began_s


def attempts(events: Iterable[Event]) -> list[Attempt]:
    """In the order of their beginnings. `events` say when each begins and is done, who leaves or is
    gone, when all ends.

    A rank of a group asks after each generation; where there is "nothing" new, it has wanted
    nothing.
    """
    found, running = list[Attempt](), dict[str, Event]()

    def broken_off(who: str, at_s: float, outcome: Outcome) -> None:
        if (begin := running.pop(who, None)) is not None:
            found.append(Attempt(who, begin["what"], begin["began_s"], at_s, outcome))

    for event in sorted(events, key=lambda event: event.get("ended_s", event["began_s"])):
        who, kind = event["who"], event["kind"]
        if kind == "begin":
            running[who] = event
        elif kind in ("join", "update"):
            running.pop(who, None)
            done = (event[name] for name in ("version", "phases", "sources"))
            found.append(Attempt(who, kind, event["began_s"], event["ended_s"], "done", *done))
        elif kind == "nothing":
            running.pop(who, None)
        elif kind in ("leave", "gone"):
            broken_off(who, event["began_s"], "preempted")
        elif kind == "end":
            for left in list(running):
                broken_off(left, event["began_s"], "unfinished")
    return sorted(found, key=lambda attempt: attempt.began_s)


@dataclass(frozen=True, slots=True)
class Stalls:
    """Of one system in one run: seconds, of all workers together. Those of unfinished updates count
    as far as they got.
    """

    total_s: float
    floor_s: float
    phases: Mapping[str, float]
    trainer_s: float
    updates: int
    unfinished: int

    @property
    def ratio(self) -> float:
        """Of the floor."""
        return self.total_s / self.floor_s if self.floor_s else nan


def stalls(events: Sequence[Event], floors_s: Mapping[str, float]) -> Stalls:
    """Of all updates and publications but the first. `floors_s`: what one update of each rollout
    takes at least.
    """
    updates = [attempt for attempt in attempts(events) if attempt.what == "update"]
    published = [event for event in events if event["kind"] == "publish" and event["version"] > 1]
    done = [attempt for attempt in updates if attempt.outcome == "done"]
    phases = dict.fromkeys(PHASES, 0.0)
    for told in [attempt.phases for attempt in done] + [event["phases"] for event in published]:
        for name, seconds in told.items():
            phases[name] += seconds
    broken = [attempt for attempt in updates if attempt.outcome != "done"]
    phases["wait"] += sum(attempt.seconds for attempt in broken)
    trainer_s = sum(sum(event["phases"].values()) for event in published)
    floor_s = sum(floors_s[attempt.who] for attempt in done)
    floor_s += sum(min(floors_s[attempt.who], attempt.seconds) for attempt in broken)
    total_s = trainer_s + sum(attempt.seconds for attempt in updates)
    return Stalls(total_s, floor_s, phases, trainer_s, len(done), len(broken))


@dataclass(frozen=True, slots=True)
class Waits:
    """How long attempts took, with the preempted and the unfinished ones censored: they took longer
    than they lasted.

    The quantiles are Kaplan and Meier's; inf: so many have not got there.
    """

    done: int
    preempted: int
    unfinished: int
    median_s: float
    p95_s: float


def waits(found: Sequence[Attempt], *what: str) -> Waits:
    mine = [attempt for attempt in found if attempt.what in what]
    count = {
        outcome: sum(attempt.outcome == outcome for attempt in mine)
        for outcome in ("done", "preempted", "unfinished")
    }
    return Waits(
        count["done"],
        count["preempted"],
        count["unfinished"],
        quantile(mine, 0.5),
        quantile(mine, 0.95),
    )


def quantile(found: Sequence[Attempt], share: float) -> float:
    """The time by which so many are done; inf if that is not known."""
    left, ordered = (
        1.0,
        sorted(found, key=lambda attempt: (attempt.seconds, attempt.outcome != "done")),
    )
    for number, attempt in enumerate(ordered):
        if attempt.outcome == "done":
            left *= 1 - 1 / (len(ordered) - number)
            if left <= 1 - share + 1e-9:
                return attempt.seconds
    return float("inf") if ordered else nan


def middle(values: Sequence[float]) -> float:
    """The median, the lower one of two; nan of none."""
    return sorted(values)[ceil(len(values) / 2) - 1] if values else nan
