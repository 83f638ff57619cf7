"""Who is heard when: half a round trip later, one after the other, and not once its process is
gone.
"""

from __future__ import annotations

from dataclasses import replace

import pytest

from tensorhub.coordinator import testimonies
from tensorhub.coordinator.entities import RankPart
from tensorhub.coordinator.refusals import Blame
from tensorhub.messages import Announce, Need, Register, Watch
from tensorhub.testing.flow.coordinated import CORE_ALONE_S, SHELL_S, Coordinated
from tensorhub.testing.flow.run import run_one
from tensorhub.testing.flow.scenario import at_scale, load
from tensorhub.testing.flow.thin import MODEL
from tensorhub.testing.flow.workload import World
from tensorhub.types import VersionInfo

ROUND_TRIP_S = 0.2


@pytest.fixture
def hub() -> Coordinated:
    made = load("standalone")
    return Coordinated(
        World.of(replace(made, links=replace(made.links, round_trip_ms=1000 * ROUND_TRIP_S)))
    )


def rollouts(hub: Coordinated) -> list[str]:
    return [name for name in hub.world.topology.places if name.startswith("rollout")]


def test_calls_at_once_wait_for_one_another(hub: Coordinated) -> None:
    times: list[float] = []
    for name in rollouts(hub):
        rank = hub.peer(hub.world.topology.places[name]).register(name, 0)
        rank.registered = lambda: times.append(hub.world.timeline.now)
    hub.world.timeline.run(2.0)
    assert len(times) == 8
    takes_s = CORE_ALONE_S[Register] + SHELL_S
    assert times[0] >= ROUND_TRIP_S + takes_s
    assert times[-1] - times[0] >= 7 * takes_s * (1 - 1e-9)


def test_who_is_gone_says_and_hears_nothing_more(hub: Coordinated) -> None:
    gone, lives = (hub.peer(hub.world.topology.places[name]) for name in rollouts(hub)[:2])
    hub.world.timeline.run(1.0)
    heard: list[str] = []
    for peer, name in ((gone, "gone"), (lives, "lives")):
        peer.announced = lambda name=name: heard.append(name)  # type: ignore[misc]
    gone.end()
    steps, said = hub.steps, VersionInfo(MODEL, 1, "c" * 32, 1, 1)
    for peer in (gone, lives):
        peer.say(Watch(MODEL))
        peer.hear(Announce(MODEL, said))
    assert heard == ["lives"]
    hub.world.timeline.run(1.0 + ROUND_TRIP_S)
    assert hub.steps == steps + 2, "that its connection has ended, and what the other one says"


def test_of_the_digests_of_a_selection_only_those_hear_who_need_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each rank reads a part of what each of the trainer's ranks has. Everybody looked at
    everything after each answer.
    """
    its = testimonies.Testimonies
    looked, settle_claim = 0, its._settle_claim

    def counted(
        self: testimonies.Testimonies, part: RankPart, need: Need | None, root: bytes
    ) -> Blame | None:
        nonlocal looked
        looked += 1
        return settle_claim(self, part, need, root)

    monkeypatch.setattr(its, "_settle_claim", counted)
    ranks, groups, versions = 16, 2, 2
    row = run_one(at_scale(load("update"), ranks * groups, "70B", ranks), "tensorhub+resharded").row
    assert row.updates.done == groups
    # for each selection, at the claims of the rank that needs it
    assert looked <= versions * groups * ranks**2 * ranks
