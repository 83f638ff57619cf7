"""The comparison of one workload, as rows and as a table. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from math import isfinite, isnan
from typing import Any

from benches.testbed.accounting import Attempt, Stalls, Waits, attempts, middle, stalls, waits
from benches.testbed.run import Result
from benches.testbed.systems.base import PHASES
from benches.testbed.ways import WAYS, Way
from tensorhub.testing.flow import timetable
from tensorhub.testing.flow.scenario import Scenario, in_groups


@dataclass(frozen=True, slots=True)
class Row:
    """One system in all rounds. Figures are medians of the rounds. `failure`: why it has none."""

    way: str
    failure: str | None = None
    rounds: int = 0
    stalls: Stalls | None = None
    joins: Waits | None = None
    updates: Waits | None = None
    both: Waits | None = None
    floor_s: float = float("nan")  # of one update: the mean of all
    cpu: float = float("nan")
    machine: float = float("nan")

    @property
    def title(self) -> str:
        return WAYS[self.way].title

    @property
    def per_update_s(self) -> float:
        assert self.stalls is not None
        return self.stalls.total_s / max(1, self.stalls.updates + self.stalls.unfinished)

    @property
    def has_updated(self) -> bool:
        """Else its stalls say nothing: as far as they got, or none."""
        return self.stalls is not None and self.stalls.updates > 0

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


def row(scenario: Scenario, way: Way, results: Sequence[Result]) -> Row:
    """Of the round whose total stall is the median. Slow rollouts do not count."""
    hosts = timetable.rollouts(in_groups(scenario, way.options.get("ranks", 1)))
    slow = {name for name, kind in hosts if kind.slow > 1}
    results = [
        replace(
            each,
            events=[event for event in each.events if event["who"].partition(".")[0] not in slow],
        )
        for each in results
    ]
    found = [(stalls(result.events, floors(scenario, way, result)), result) for result in results]
    middle_s = middle([stalled.total_s for stalled, _ in found])
    stalled, result = next(each for each in found if each[0].total_s == middle_s)
    every: list[Attempt] = [attempt for _, each in found for attempt in attempts(each.events)]
    count = max(1, stalled.updates + stalled.unfinished)
    return Row(
        way.name,
        rounds=len(results),
        stalls=stalled,
        joins=waits(every, "join"),
        updates=waits(every, "update"),
        both=waits(every, "join", "update"),
        floor_s=stalled.floor_s / count,
        cpu=result.cpu,
        machine=result.machine,
    )


def crossings(scenario: Scenario, result: Result) -> list[tuple[int, float, float]]:
    """Of each version but the first: MB that rollouts have read from another site, and seconds from
    its publication until all that updated to it had it.
    """
    sites = {name: hosts.site for name, hosts in timetable.rollouts(scenario)}
    published = {e["version"]: e["ended_s"] for e in result.events if e["kind"] == "publish"}
    found = []
    for version in sorted(published)[1:]:
        its = [e for e in attempts(result.events) if e.version == version]
        far = [
            nbytes
            for each in its
            for source, nbytes in each.sources.items()
            if sites.get(source.partition("+")[0], scenario.sites[0]) != sites[each.who]
        ]
        last_s = max((each.ended_s for each in its), default=float("nan"))
        found.append((version, sum(far) / 1e6, last_s - published[version]))
    return found


def floors(scenario: Scenario, way: Way, result: Result) -> Mapping[str, float]:
    """Seconds in which one copy can be in each rollout: over its own link, or over the WAN if
    nothing in its site has it.
    """
    home, near = scenario.sites[0], "seed" in way.roles
    far_s = result.far_floor_s if result.far_floor_s is not None else result.floor_s
    own = {
        name: result.floor_s if near or hosts.site == home else far_s
        for name, hosts in timetable.rollouts(scenario)
    }
    return own | {
        f"{name}.{rank}": own[name]
        for name in own
        for rank in range(1, way.options.get("ranks", 1))
    }


def table(rows: Sequence[Row]) -> list[str]:
    """Stalls, one line for each system; ours is what the others are compared with."""
    head = f"{'system':<44}{'updates':>8}{'stall s':>9}{'each s':>8}{'floor s':>8}{'of floor':>9}{'of ours':>8}"
    lines = [
        head
        + "".join(f"{name:>11}" for name in PHASES)
        + f"{'trainer s':>10}{'CPU':>6}{'machine':>8}{'lines':>7}"
    ]
    ours = next(
        (each.stalls.total_s for each in rows if each.way.startswith("tensorhub") and each.stalls),
        float("nan"),
    )
    for each in rows:
        if each.stalls is None:
            lines.append(f"{each.title:<44} {each.failure}")
            continue
        it = each.stalls
        count = f"{it.updates}+{it.unfinished}" if it.unfinished else str(it.updates)
        line = f"{each.title:<44}{count:>8}{it.total_s:>9.2f}{each.per_update_s:>8.3f}{each.floor_s:>8.3f}"
        line += f"{it.ratio:>9.2f}{it.total_s / ours:>8.2f}" + "".join(
            f"{it.phases[name]:>11.2f}" for name in PHASES
        )
        lines.append(
            line
            + f"{it.trainer_s:>10.2f}{each.cpu:>6.0%}{each.machine:>8.0%}{WAYS[each.way].lines():>7}"
        )
    return lines


def waits_table(rows: Sequence[Row]) -> list[str]:
    """How long until who joins or updates has the newest version."""
    lines = [
        f"{'system':<44}{'':>8}{'done':>6}{'preempted':>11}{'unfinished':>12}{'median s':>10}{'p95 s':>8}{'of ours':>16}"
    ]
    ours = next((each for each in rows if each.way.startswith("tensorhub") and each.joins), None)
    for each in rows:
        for what in ("joins", "updates", "both"):
            it: Waits | None = getattr(each, what)
            if it is None or ours is None:
                continue
            base: Waits = getattr(ours, what)
            counts = f"{it.done:>6}{it.preempted:>11}{it.unfinished:>12}"
            ratios = f"{_ratio(it.median_s, base.median_s):>8}{_ratio(it.p95_s, base.p95_s):>8}"
            lines.append(
                f"{each.title:<44}{what:>8}{counts}{it.median_s:>10.2f}{it.p95_s:>8.2f}{ratios}"
            )
    return lines


def _ratio(value: float, base: float) -> str:
    return "-" if isnan(value) or not isfinite(base) or not base else f"{value / base:.2f}"
