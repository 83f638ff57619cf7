"""Where the coordinator says the seconds of a call went, beside how long its caller saw it take."""

from __future__ import annotations

import math

from tensorhub.coordinator import Coordinator
from tensorhub.errors import VersionUnavailable
from tensorhub.messages import Took
from tensorhub.testing.sim.assertion import demand
from tensorhub.types import OpKey

EPSILON_S = 1e-6
RANKS_KEPT = 8  # of larger groups the coordinator forgets some calls
# docs/observing.md
PARTS = (
    "ranks, version, source, before_write, fence, upstream, source busy, source disk, link, loss, "
    "reader, cpu, gil, digest, codec, copy, digests, others, store, coordinator, control, other"
).split(", ")


class Explained:
    """The explanations of one cluster. Each rank's timing is told to the coordinator by this judge,
    when its call ends: it is no message, so that no run depends on it.
    """

    def __init__(self) -> None:
        self.tells = True  # False: ranks say it themselves
        self.judged = 0  # explanations
        # of the last operation of each group: the calls that have ended
        self._walls: dict[tuple[str, str], tuple[OpKey, list[float]]] = {}
        self._left: set[OpKey] = set()  # operations that go on when a rank's call has ended

    def ended(
        self,
        core: Coordinator,
        now: float,
        incarnation: str,
        key: OpKey,
        rank: int,
        seconds: float,
        *,
        committed: bool,
        clock_rate: float = 1.0,
    ) -> None:
        """A rank's call has taken so long. Parts add up; and of a commit the explanation is as long
        as the longest call that has ended, or in a large group some call once all have ended,
        unless a rank has left before. `clock_rate`: of the coordinator's clock, by which some of
        its parts are.
        """
        if not committed:
            self._left.add(key)
        worker = core.cluster.workers.get(incarnation)
        if worker is None or not self.tells:
            return
        if not core.observations.took(worker, Took(key, rank, seconds), is_its=True):
            return  # its worker was lost meanwhile, and has come back
        before, walls = self._walls.get((key.model, key.group), (key, []))
        walls = [*walls, seconds] if before == key else [seconds]
        self._walls[key.model, key.group] = key, walls
        try:
            found = core.observations.explanation(now, key.model, None, key.group)
        except VersionUnavailable:
            return
        if found.key != key:
            return  # its group has called again, or the coordinator is a new one
        total = sum(part.seconds for part in found.parts)
        wrong = [p for p in found.parts if p.seconds < 0 or p.name not in PARTS]
        demand(not wrong, "seconds: {} has {}", found, wrong)
        demand(
            math.isclose(total, found.seconds, abs_tol=EPSILON_S),
            "seconds: the parts of {} add up to {}",
            found,
            total,
        )
        model = core.cluster.models.get(key.model)
        group = model.groups.get(key.group) if model is not None else None  # it may have left
        size = group.world_size if group is not None else math.inf
        expected = [max(walls)] if size <= RANKS_KEPT else walls
        # until then the coordinator may know another rank's time only from what it has heard of it
        is_early = size > RANKS_KEPT and len(walls) < size
        demand(
            key in self._left
            or is_early
            or any(_is_about(found.seconds, wall, clock_rate) for wall in expected),
            "seconds: {} does not take the {} s of its longest call",
            found,
            expected,
        )
        self.judged += 1


def _is_about(seconds: float, wall: float, clock_rate: float) -> bool:
    ends = wall, wall * clock_rate
    return min(ends) - EPSILON_S <= seconds <= max(ends) + EPSILON_S
