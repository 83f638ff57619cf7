"""What of a scenario this machine can run: smaller versions over slower links, and fewer of them.

Times in a scenario are in copies, so that it stays what it is. The flow model can be given the same
sizes.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Final

from tensorhub.testing.flow.scenario import Scenario, ScenarioError

WORKERS_PER_CORE: Final = 16  # each takes some 70 MiB, and a core goes round among those that read
CHUNKS: Final = 64  # of one copy, as in the scenario files


@dataclass(frozen=True, slots=True)
class Size:
    """`mb`: of one copy, 10**6 bytes. `nic_mbit`: what each host's link carries; the WAN keeps its
    ratio to it.
    """

    mb: float
    nic_mbit: float
    versions: int
    every_copies: float | None = None  # where the scenario's takes too long here

    @property
    def values(self) -> tuple[Any, ...]:
        return self.mb, self.nic_mbit, self.versions, self.every_copies


SIZES: Final[Mapping[str, Size]] = {
    "standalone": Size(20.0, 200.0, 7),
    "elastic": Size(20.0, 200.0, 9),
    "cross-datacenter": Size(20.0, 500.0, 2),
    "churn": Size(20.0, 200.0, 7),
}


def check(scenario: Scenario) -> Scenario:
    """Raises ScenarioError if it has more workers than this machine can run, or more sites than the
    testbed has.
    """
    workers, most = scenario.count("rollout") + 1, WORKERS_PER_CORE * len(os.sched_getaffinity(0))
    if workers > most:
        raise ScenarioError(
            f"{scenario.name} has {workers} workers, and this machine "
            f"can run {most}: give fewer hosts"
        )
    if len(scenario.sites) > 2:
        raise ScenarioError(
            f"{scenario.name} has {len(scenario.sites)} sites: the testbed has one WAN, between "
            f"two sites"
        )
    if not scenario.generate_mean_copies:
        raise ScenarioError(
            f"{scenario.name} has generate_mean_copies = 0, and "
            "rollouts of the testbed have to generate"
        )
    return scenario


def fitted(scenario: Scenario, size: Size) -> Scenario:
    """That scenario with these sizes."""
    nbytes = int(size.mb * 1e6) // 16 * 16
    links = scenario.links
    wan_mbit = links.wan_mbit_per_s * size.nic_mbit / links.nic_mbit_per_s
    return replace(
        scenario,
        rank_bytes=nbytes,
        chunk_bytes=max(4096, nbytes // CHUNKS // 4096 * 4096),
        versions=size.versions,
        links=replace(links, nic_mbit_per_s=size.nic_mbit, wan_mbit_per_s=wan_mbit),
        every_copies=size.every_copies or scenario.every_copies,
    )


def with_rollouts(scenario: Scenario, count: int) -> Scenario:
    """The same with so many rollouts of its first kind."""
    first = next(hosts for hosts in scenario.hosts if hosts.role == "rollout")
    return replace(
        scenario,
        hosts=tuple(
            replace(each, count=count) if each is first else each for each in scenario.hosts
        ),
    )


def with_slow(scenario: Scenario, slow: float) -> Scenario:
    """The same where the link of the first rollout carries so many times less."""
    at = next(number for number, hosts in enumerate(scenario.hosts) if hosts.role == "rollout")
    first = scenario.hosts[at]
    kinds = [replace(first, count=1, slow=slow), replace(first, count=first.count - 1)]
    return replace(
        scenario,
        hosts=(
            *scenario.hosts[:at],
            *(each for each in kinds if each.count),
            *scenario.hosts[at + 1 :],
        ),
    )


def with_wan(scenario: Scenario, ratio: float) -> Scenario:
    """The same where a host's link carries so many times what the WAN does. Raises ScenarioError if
    there is no WAN.
    """
    if len(scenario.sites) < 2:
        raise ScenarioError(f"{scenario.name} has one site, and no WAN")
    return replace(
        scenario,
        links=replace(scenario.links, wan_mbit_per_s=scenario.links.nic_mbit_per_s / ratio),
    )
