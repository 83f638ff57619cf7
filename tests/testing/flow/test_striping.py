"""A fast rollout joins while the only complete copies are on slow machines, under the real coordinator."""

from __future__ import annotations

from dataclasses import replace
from random import Random

import pytest

from tensorhub.coordinator.source_choice import SourceChoice
from tensorhub.testing.flow.coordinated import Coordinated
from tensorhub.testing.flow.scenario import Scenario, load
from tensorhub.testing.flow.thin import ThinRank
from tensorhub.testing.flow.topology import Topology
from tensorhub.testing.flow.workload import World
from tensorhub.types import OpKind

LONG = 8  # times as many bytes: what it costs to begin matters less
SHARE = 0.25  # of a link
PATIENCE_S = 120.0
JOIN_MAX = 4  # of the fast ones: what the others have said of links is believed
FAST = 12  # rollouts that have read the version first: most links are fast, and known to be


class Cluster:
    """A trainer that has taken its version back, fast rollouts that have given it up, and slow ones that hold it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, slow: int) -> None:
        scenario = load("update")
        trainer, rollouts = scenario.hosts
        hosts = (trainer, replace(rollouts, count=FAST + slow))
        self.scenario: Scenario = replace(scenario, rank_bytes=LONG * scenario.rank_bytes, hosts=hosts)
        self.slow = [f"rollout-{number}" for number in range(FAST, FAST + slow)]
        make = Topology.__init__

        def made(topology: Topology, of: Scenario) -> None:
            make(topology, of)
            for name in self.slow:
                for link in (topology.places[name].up, topology.places[name].down):
                    topology.capacities[link] *= SHARE

        with monkeypatch.context() as patched:
            patched.setattr(Topology, "__init__", made)
            self.world = World.of(self.scenario)
        self.hub = Coordinated(self.world)
        self.fast = [f"rollout-{number}" for number in range(FAST)]
        self.ranks = {name: self.join(name) for name in ("trainer-0", *self.fast, *self.slow)}
        self.runs(1.0)
        self.ranks["trainer-0"].publish(1, lambda _: None)
        self.runs(1.0)
        self.fill(*self.fast)
        self.runs(2 * self.scenario.copy_s)
        for name in self.slow:  # one after the other, so that each is known to be slow: it reads from a fast one
            self.fill(name)
            self.runs(2 * self.scenario.copy_s / SHARE)
        for name in ("trainer-0", *self.fast):
            self.ranks[name].unpublish(lambda: None)
        self.runs(1.0)
        assert [name for name, rank in self.ranks.items() if rank.memory is not None] == self.slow

    def join(self, name: str) -> ThinRank:
        return self.hub.peer(self.world.topology.places[name]).register(name, 0)

    def runs(self, seconds: float) -> None:
        timeline = self.world.timeline
        timeline.after(seconds, lambda: None)  # so that its time comes, also if nothing happens
        timeline.run(timeline.now + seconds)

    def fill(self, *names: str) -> dict[str, float]:
        """These call. When each is done, in copies, once time has passed."""
        began, ended = self.world.timeline.now, dict[str, float]()
        for name in names:

            def done(_: object, name: str = name) -> None:
                ended[name] = (self.world.timeline.now - began) / self.scenario.copy_s

            self.ranks[name].fill(OpKind.REPLICATE, done)
        return ended

    def join_later(self, *after_s: float) -> tuple[list[float], int]:
        """Fast rollouts call so many seconds from now. How long each takes, in copies; how many leases one has, at most."""
        timeline, found = self.world.timeline, list[dict[str, float]]()
        for name, wait_s in zip(self.fast, after_s, strict=False):
            timeline.after(wait_s, lambda name=name: found.append(self.fill(name)))  # type: ignore[misc]
        leases, until_s = 0, timeline.now + PATIENCE_S
        while len(found) < len(after_s) or not all(found):
            assert timeline.now < until_s, found
            self.runs(0.25)
            self.hub.coordinator.check_invariants()
            parts = [member.part for member in self.hub.coordinator.cluster.members.values()]
            leases = max([leases, *(len(part.leases) for part in parts if part is not None)])
        return [seconds for each in found for seconds in each.values()], leases


def joined(monkeypatch: pytest.MonkeyPatch, slow: int, *after_s: float) -> tuple[list[float], list[float], int]:
    """How long each takes, in copies; the same if nobody reads from several; how many leases one has, at most."""
    took, leases = Cluster(monkeypatch, slow).join_later(*after_s)
    with monkeypatch.context() as patched:
        patched.setattr(SourceChoice, "beside", lambda *_: [])
        without, _ = Cluster(monkeypatch, slow).join_later(*after_s)
    return took, without, leases


@pytest.mark.parametrize(("slow", "copies"), [(1, 4.0), (2, 2.0), (3, 4 / 3), (4, 1.0)])
def test_slow_sources_fill_a_fast_rollout_together(monkeypatch: pytest.MonkeyPatch, slow: int, copies: float) -> None:
    took, without, leases = joined(monkeypatch, slow, 0.0)
    assert without == pytest.approx([4.0], rel=0.001)
    assert copies <= took[0] <= 1.03 * copies
    assert leases == slow


def test_who_comes_after_it_reads_from_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """So all of them have it nearly as soon as the first one."""
    took, without, _ = joined(monkeypatch, 3, 0.0, 2.0, 4.0)
    assert min(without) > 3.6
    assert max(took) <= 1.03 * 4 / 3


@pytest.mark.parametrize("seed", range(12))
def test_nobody_is_slower_for_it(monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    """Whoever comes when: the invariants, which say that there is no cycle, hold all the time."""
    draw = Random(seed)
    after_s = sorted(draw.uniform(0, 40) for _ in range(draw.randint(1, JOIN_MAX)))
    took, without, _ = joined(monkeypatch, draw.randint(2, 3), *after_s)
    assert all(mine <= 1.02 * before for mine, before in zip(took, without, strict=True))
