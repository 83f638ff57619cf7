"""What a scenario's seed decides: how long each generation takes, when spot hosts come and go, when
rollouts are killed.

Everything is drawn here, and by name, so that every system, and the testbed of real processes,
meets equal chances. Times are in seconds from the first publication on.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import exp
from random import Random

from tensorhub.testing.flow.scenario import Hosts, Scenario


@dataclass(frozen=True, slots=True)
class Presence:
    """A rollout is there from `begin_s` to `end_s`. `notice_s`: when it is told of the end; None:
    it is not told.
    """

    begin_s: float
    end_s: float
    notice_s: float | None


def rollouts(scenario: Scenario) -> Iterator[tuple[str, Hosts]]:
    """The name of each rollout, and which hosts it is of."""
    number = 0
    for hosts in scenario.hosts:
        if hosts.role == "rollout":
            for _ in range(hosts.count):
                yield f"rollout-{number}", hosts
                number += 1


def generations(scenario: Scenario, rollout: str) -> Iterator[float]:
    """How many seconds each generation of this rollout takes, one by one, through all its lives."""
    random, sigma = Random(f"{scenario.seed}/generations/{rollout}"), scenario.generate_sigma
    mean_s = scenario.generate_mean_copies * scenario.copy_s
    while True:
        yield mean_s * exp(sigma * random.gauss(0.0, 1.0) - sigma * sigma / 2)


def presences(scenario: Scenario) -> dict[str, list[Presence]]:
    """When each rollout is there, of those that are not always there."""
    found = {name: list(_spot(scenario, name)) for name, hosts in rollouts(scenario) if hosts.spot}
    if scenario.kills is not None:
        _kill(scenario, found)
    return found


def _spot(scenario: Scenario, name: str) -> Iterator[Presence]:
    spot, copy_s = scenario.spot, scenario.copy_s
    assert spot is not None
    random = Random(f"{scenario.seed}/spot/{name}")

    def about(copies: float) -> float:
        return copies * copy_s * random.uniform(1 - spot.spread, 1 + spot.spread)

    now = about(spot.off_copies) * random.random()
    while now < scenario.ends_s:
        end = now + about(spot.on_copies)
        told = (
            max(now, end - spot.notice_copies * copy_s)
            if random.random() < spot.notice_share
            else None
        )
        yield Presence(now, end, told)
        now = end + about(spot.off_copies)


def _kill(scenario: Scenario, found: dict[str, list[Presence]]) -> None:
    """Reliable rollouts are killed one by one; a rollout that is away is not."""
    kills, copy_s = scenario.kills, scenario.copy_s
    assert kills is not None
    random = Random(f"{scenario.seed}/kills")
    reliable = [name for name, hosts in rollouts(scenario) if not hosts.spot]
    begun, now = dict.fromkeys(reliable, 0.0), 0.0
    while True:
        now += random.expovariate(1 / (kills.every_copies * copy_s))
        if now >= scenario.ends_s:
            break
        name = random.choice(reliable)
        if now > begun[name]:
            found.setdefault(name, []).append(Presence(begun[name], now, None))
            begun[name] = now + kills.back_copies * copy_s
    for name in found.keys() & begun.keys():
        found[name].append(Presence(begun[name], float("inf"), None))
