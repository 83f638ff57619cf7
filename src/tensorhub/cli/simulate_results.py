"""What a search has covered: how often each fault, transition and recovery path was taken and each
demand judged, and by how many seeds.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

# seeds; from here on, a fault, transition, path or demand that was never reached is a failure
COMPLETE_FROM = 1000

LEAST = {"groups": 3, "versions": 3, "events": 1000, "kinds of faults": 3}  # what makes a full seed


def lacking(report: Mapping[str, Any]) -> str:
    """What a seed had too little of, in words; "" for a full one."""
    had = {**report, "kinds of faults": sum(times > 0 for times in report["faults"].values())}
    return ", ".join(
        f"{had[name]:,} {name}, not {number:,}"
        for name, number in LEAST.items()
        if had[name] < number
    )


class Tally:
    """How often each thing of one kind has happened."""

    def __init__(self, known: Iterable[str]) -> None:
        """`known`: what could happen."""
        self.times: Counter[str] = Counter(dict.fromkeys(known, 0))
        self.seeds: Counter[str] = Counter(dict.fromkeys(self.times, 0))  # in how many seeds

    def add(self, times: Mapping[str, int]) -> None:
        """What happened in one seed. (What a report names, even with 0, is known from then on.)"""
        self.times.update(times)
        self.seeds.update({name: int(number > 0) for name, number in times.items()})

    def never(self) -> list[str]:
        """What should have happened, and did not."""
        return [name for name, times in self.times.items() if times == 0]

    def lines(self, title: str) -> list[str]:
        """One row each, in the order in which they became known."""
        width = max(map(len, [title, *self.times]))
        rows = (
            (name, f"{times:,}" if times else "never", f"{self.seeds[name]:,}")
            for name, times in self.times.items()
        )
        return [
            f"{name:{width}}  {times:>10}  {seeds:>10}"
            for name, times, seeds in ((title, "times", "seeds"), *rows)
        ]

    def as_json(self) -> dict[str, Any]:
        return {
            name: {"times": times, "seeds": self.seeds[name]} for name, times in self.times.items()
        }


@dataclass(frozen=True, slots=True)
class SeedResult:
    """How one seed ended: with the fields of its report, or with the broken guarantee."""

    seed: int
    report: dict[str, Any] | None
    failure: str | None
    is_broken: bool = False  # the run itself has said so


class Results:
    """The sum of all reports, and the seeds that failed."""

    def __init__(
        self,
        faults: Iterable[str],
        transitions: Iterable[str],
        paths: Iterable[str],
        demands: Iterable[str],
    ) -> None:
        self.seeds = 0
        self.events = 0
        self.faults = Tally(faults)
        self.transitions = Tally(transitions)
        self.paths = Tally(paths)
        self.demands = Tally(demands)
        self.hashes: dict[int, str] = {}  # end hash by seed
        self.full = 0  # seeds that had all of `LEAST`
        self.failures: list[SeedResult] = []
        self.repeated = 0  # seeds that were run twice
        self.seconds = 0.0

    def add(self, report: Mapping[str, Any]) -> None:
        """The fields of one seed's report."""
        self.seeds += 1
        self.events += report["events"]
        self.faults.add(report["faults"])
        self.transitions.add(report["transitions"])
        self.paths.add(report["paths"])
        self.demands.add(report["demands"])
        self.hashes[report["seed"]] = report["end_hash"]
        self.full += not lacking(report)

    @property
    def speed(self) -> float:
        """Events per second."""
        return self.events / max(self.seconds, 1e-9)

    def never(self) -> list[str]:
        """All that was not reached, as `"fault crash"`."""
        kinds = (
            ("fault", self.faults),
            ("transition", self.transitions),
            ("recovery path", self.paths),
            ("demand", self.demands),
        )
        return [f"{kind} {name}" for kind, tally in kinds for name in tally.never()]

    def render(self) -> str:
        """The coverage, as text."""
        tallies = (
            ("faults", self.faults),
            ("transitions", self.transitions),
            ("recovery paths", self.paths),
            ("demands", self.demands),
        )
        return "\n\n".join("\n".join(tally.lines(title)) for title, tally in tallies)

    def as_json(self) -> dict[str, Any]:
        return {
            "seeds": self.seeds,
            "events": self.events,
            "full": self.full,
            "faults": self.faults.as_json(),
            "transitions": self.transitions.as_json(),
            "paths": self.paths.as_json(),
            "demands": self.demands.as_json(),
            "never": self.never(),
        }
