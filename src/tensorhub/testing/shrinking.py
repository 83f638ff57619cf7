"""A failing seed explains itself: the guarantee, the parties, and the shortest history that still
fails.

Theory of operation. Delta debugging (Zeller and Hildebrandt, 2002) over the atoms of a run
(`drivers.parts`): kinds of faults, then parties, then single faults and turns are left out as long
as the same demand fails in no longer a history; so is the time before faults end. The demand is
known by the line that makes it.
"""

from __future__ import annotations

import re
import time
import traceback
from collections import deque
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass

from tensorhub.errors import StateError
from tensorhub.testing.drivers.parts import Part, PartTimeline, Recording, Whole
from tensorhub.testing.sim.assertion import GuaranteeBroken
from tensorhub.testing.sim.faults import Fault
from tensorhub.testing.sim.promises import promise_of
from tensorhub.testing.sim.recovery_paths import RECOVERY_PATHS
from tensorhub.testing.simulated import SeedReport, SimulatedCluster, reported, run_seed

# `tensorhub simulate` takes these from the module that it searches with.
__all__ = ["RECOVERY_PATHS", "Fault", "SeedReport", "explain", "run_part", "run_seed"]

SECONDS = 60.0
SHOWN = 60  # lines of a history; of a longer one those that name what the failure names
EVENTS_TIMES = 2  # as many as the shortest history so far may have more heartbeats
LOOKS = 64  # events between two looks at the clock
DEMANDING = ("assertion.py", "machine.py")  # where demands of others fail
NAMES = re.compile(r"\b(?:w|g|fetch|id)\d+\b")  # workers, groups, leases and contents
VERSIONS = re.compile(r"(?:actor:|version=|number=|v=|\bv)(\d+)\b")

Demand = tuple[str, str, int | None]


class _Longer(Exception):
    """This history is no shorter, or time is up."""


class _Cluster(SimulatedCluster):
    """Gives up where its history is longer than another one, or at a time."""

    lines_max = events_max = float("inf")
    give_up_at = float("inf")
    timeline: PartTimeline

    def take_event(self) -> None:
        super().take_event()
        timeline = self.timeline
        is_late = timeline.events % LOOKS == 0 and time.monotonic() >= self.give_up_at
        if is_late or timeline.lines > self.lines_max or timeline.events > self.events_max:
            raise _Longer


@dataclass(frozen=True)
class Seed:
    """What is drawn: as for `run_seed`."""

    number: int
    faults: Collection[Fault] | None = None
    events: int = 1000

    def cluster(self, part: Whole, timeline: PartTimeline) -> _Cluster:
        return _Cluster(
            self.number, faults=self.faults, events=self.events, part=part, timeline=timeline
        )

    @property
    def command(self) -> str:
        faults = "" if self.faults is None else f" --faults {','.join(self.faults)}"
        return f"tensorhub simulate --seed {self.number}{faults} --events {self.events}"


@dataclass(frozen=True)
class Failure:
    """How a run, or a part of it, has failed."""

    error: Exception
    cluster: _Cluster
    atoms: tuple[str, ...]

    @property
    def until(self) -> int:
        """Events after which faults end."""
        return self.cluster.faults_until or self.events

    @property
    def events(self) -> int:
        return self.cluster.timeline.events

    @property
    def demand(self) -> Demand:
        """Which one, of all that can fail: where it stands."""
        frames = [
            frame
            for frame in traceback.extract_tb(self.error.__traceback__)
            if not frame.filename.endswith(DEMANDING)
        ]
        return type(self.error).__name__, frames[-1].filename, frames[-1].lineno

    @property
    def lines(self) -> int:
        """How long its history is."""
        return self.cluster.timeline.lines


class Shrinking:
    """One seed that fails. `seconds`: for all of it, but for the first run."""

    def __init__(self, seed: Seed, seconds: float = SECONDS) -> None:
        self.seed = seed
        self.runs = 0
        self._seconds = seconds
        self._give_up_at = float("inf")
        self.whole = Recording()

    def recorder(self) -> _Cluster:
        """All of it, still to be run, and remembered."""
        timeline = PartTimeline(self.seed.number, self.whole.states, records=True)
        return self.seed.cluster(self.whole, timeline)

    def record(self) -> Failure | None:
        """Run all of it; None: it does not fail."""
        cluster = self.recorder()
        try:
            cluster.run_phases()
        except Exception as error:
            return Failure(error, cluster, tuple(self.whole.atoms))
        return None

    def part(self, part: Part) -> _Cluster:
        """That part of the recorded run, still to be run."""
        timeline = PartTimeline(self.seed.number, self.whole.states, records=False)
        return self.seed.cluster(part, timeline)

    def shrink(self) -> tuple[Failure, Failure] | None:
        """The recorded failure, and the smallest that was found; None: the seed does not fail."""
        first = self.record()
        if first is None:
            return None
        self._give_up_at = time.monotonic() + self._seconds
        best = self._again(first, first.atoms, first.until) or first
        if best is first:
            return first, first  # its like is not among the parts
        before: Failure | None = None
        while best is not before:
            before = best
            best = self._without_kinds(best)
            best = self._without_parties(best)
            best = self._ends_earlier(best)
            best = self._without_any(best)
        return first, best

    def _again(self, best: Failure, atoms: Sequence[str], until: int) -> Failure | None:
        """The same failure of these atoms, unless its history is longer."""
        if time.monotonic() >= self._give_up_at:
            return None
        self.runs += 1
        part = Part(self.whole, atoms, until)
        cluster = self.part(part)
        cluster.lines_max = best.lines
        # what fails before faults end is not looked for afterwards
        is_early = best.cluster.faults_until is None
        cluster.events_max = until if is_early else EVENTS_TIMES * best.events
        cluster.give_up_at = self._give_up_at
        try:
            cluster.run_phases()
        except _Longer:
            return None
        except Exception as error:
            found = Failure(error, cluster, tuple(atom for atom in atoms if atom in part.met))
            return found if found.demand == best.demand else None
        return None

    def _without(self, best: Failure, left_out: Collection[str]) -> Failure:
        """The better one of these two."""
        left = [atom for atom in best.atoms if atom not in left_out]
        if len(left) == len(best.atoms):
            return best
        return self._again(best, left, best.until) or best

    def _without_kinds(self, best: Failure) -> Failure:
        kinds = self.whole.kinds
        best = self._without(best, kinds)
        for kind in Fault:
            best = self._without(best, [atom for atom in kinds if kinds[atom] is kind])
        return best

    def _without_parties(self, best: Failure) -> Failure:
        for atoms in self.whole.parties.values():
            best = self._without(best, atoms)
        return best

    def _ends_earlier(self, best: Failure) -> Failure:
        for share in (0.0, 0.1, 0.3, 0.6, 0.9):
            until = max(1, int(best.until * share))
            if until < best.until:
                found = self._again(best, best.atoms, until)
                if found is not None:
                    return found
        return best

    def _without_any(self, best: Failure) -> Failure:
        """Ever smaller slices, the last atoms first."""
        size = len(best.atoms) // 2
        while size:
            end = len(best.atoms)
            while end > 0:
                best = self._without(best, set(best.atoms[max(0, end - size) : end]))
                end -= size
            size //= 2
        return best


def explain(
    seed: int,
    *,
    faults: Collection[Fault] | None = None,
    events: int = 1000,
    seconds: float = SECONDS,
) -> str | None:
    """Why that seed fails, by the shortest history that was found within `seconds`; None: it does
    not fail. The other arguments are `run_seed`'s.
    """
    shrinking = Shrinking(Seed(seed, faults, events), seconds)
    found = shrinking.shrink()
    if found is None:
        return None
    first, best = found
    whole = shrinking.whole
    faults_left = sum(atom in whole.kinds for atom in best.atoms)
    shrunk = (
        f"shrunk in {shrinking.runs} runs: {faults_left} of {len(whole.kinds)} faults, "
        f"{len(best.atoms) - faults_left} of {len(first.atoms) - len(whole.kinds)} turns, "
        f"{best.events:,} of {first.events:,} events, "
        f"{best.lines:,} of {first.lines:,} lines"
    )
    return "\n".join([*_told(best, whole), shrunk, f"reproduce: {_command(shrinking.seed, best)}"])


def run_part(
    seed: int,
    atoms: Collection[str],
    until: int,
    *,
    faults: Collection[Fault] | None = None,
    events: int = 1000,
) -> SeedReport:
    """Run these atoms of a seed alone, as the last line of `explain` says. Raises StateError for
    one that the seed has not, and GuaranteeBroken, with what `explain` says.
    """
    shrinking = Shrinking(Seed(seed, faults, events))
    shrinking.record()
    strange = sorted(set(atoms).difference(shrinking.whole.atoms))
    if strange:
        raise StateError(f"seed {seed} has no {', '.join(strange)}: give what its failure has said")
    cluster = shrinking.part(Part(shrinking.whole, atoms, until))
    try:
        return reported(cluster)
    except GuaranteeBroken as broken:
        error = broken.__cause__
        assert isinstance(error, Exception)
        failure = Failure(error, cluster, tuple(atoms))
        reproduce = f"reproduce: {_command(shrinking.seed, failure)}"
        text = "\n".join([*_told(failure, shrinking.whole), reproduce])
        raise GuaranteeBroken(text) from error


def _command(seed: Seed, failure: Failure) -> str:
    only = ",".join(failure.atoms) or "nothing"
    return f"{seed.command} --only {only} --until {failure.until}"


def _told(failure: Failure, whole: Recording) -> Iterator[str]:
    """The guarantee, the parties and the history."""
    error, cluster = failure.error, failure.cluster
    text = f"{error}" if isinstance(error, GuaranteeBroken) else f"{type(error).__name__}: {error}"
    yield text
    promise = promise_of(text)
    if promise:
        yield f"guarantee: {promise}"
    groups = ", ".join(
        f"{group.name} ({' '.join(dict.fromkeys(h.worker.name for h in group.ranks))})"
        for group in cluster.users.groups
    )
    others = [atom for atom in failure.atoms if atom[0] in "adw"]
    yield f"parties: coordinator, {', '.join([groups or 'no group', *others])}"
    kinds = [f"{whole.kinds[atom]} ({atom})" for atom in failure.atoms if atom in whole.kinds]
    yield f"faults: {', '.join(kinds) or 'none'}"
    yield from _history(cluster.timeline.trace_lines(), text)


def _history(lines: Sequence[str], text: str) -> Iterator[str]:
    """With a mark at each line that names what the failure names."""
    names = _names(text.partition("Story:")[0])
    about = [bool(names & _names(line)) for line in lines]
    everything = range(len(lines))
    named = [n for n in everything if about[n]]
    kept = deque(named if named and len(lines) > SHOWN else everything, maxlen=SHOWN)
    left_out = len(lines) - len(kept)
    subject = f" that names {', '.join(sorted(names))}" if names else ""
    yield f"history ({left_out:,} lines are left out; *: a line{subject}):"
    yield from (f"{'*' if about[n] else ' '}{lines[n]}" for n in kept)


def _names(text: str) -> set[str]:
    """Of workers, groups, leases, contents and versions."""
    return {*NAMES.findall(text), *(f"v{number}" for number in VERSIONS.findall(text))}
