"""Where each worker is, and which links a flow crosses.

Every link carries so much in each direction. Workers of one host reach each other without their
NICs; racks of one site share the links above them; sites share the WAN.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import inf

from tensorhub.testing.flow.scenario import Scenario
from tensorhub.types import Location

HOP_S = 0.0005  # that software takes to pass a chunk on, beside the way itself
OPENING_ROUND_TRIPS = 3  # to connect, prove oneself, and ask


@dataclass(frozen=True, slots=True)
class Place:
    """One worker's. `up`, `down`: the numbers of its NIC's two directions; `out`, `into`: within
    its host.
    """

    name: str
    location: Location
    up: int
    down: int
    out: int
    into: int
    copy: int  # between its host's memory and its own


class Topology:
    """`names`: of the links, by number; `capacities`: bytes per second."""

    def __init__(self, scenario: Scenario) -> None:
        self._scenario = scenario
        self.names: list[str] = []
        self.capacities: list[float] = []
        self.places: dict[str, Place] = {}  # by worker
        self._racks: dict[tuple[str, str], tuple[int, int]] = {}  # their uplinks, both directions
        self._sites: dict[str, tuple[int, int]] = {}
        links = scenario.links
        if len(scenario.sites) > 1:
            for site in scenario.sites:
                self._sites[site] = self._link(
                    f"wan out of {site}", links.wan_mbit_per_s, f"wan into {site}"
                )
        hosts = 0  # so far; a trainer, a seed and each kind of rollouts begin on hosts of their own
        for group, site, slow in _groups(scenario):
            if group.endswith(":"):
                hosts = -(-hosts // scenario.gpus_per_host) * scenario.gpus_per_host
                continue
            for rank in range(scenario.ranks):
                self._place(worker_name(group, rank, scenario.ranks), site, hosts, slow)
                hosts += 1

    def _place(self, name: str, site: str, number: int, slow: float) -> None:
        scenario, links = self._scenario, self._scenario.links
        host = number // scenario.gpus_per_host
        location = Location(site, f"rack-{host // scenario.hosts_per_rack}", f"host-{host}")
        up, down = self._link(f"{name} out", links.nic_mbit_per_s / slow, f"{name} in")
        out, into = self._link(
            f"{name} to its host", links.local_mbit_per_s, f"{name} from its host"
        )
        copy, _ = self._link(f"{name} copy", links.host_copy_mbit_per_s, "")
        self.places[name] = Place(name, location, up, down, out, into, copy)
        rack = (site, location.rack)
        if rack not in self._racks and links.rack_mbit_per_s < inf:
            where = f"{location.rack} of {site}"
            self._racks[rack] = self._link(f"{where} out", links.rack_mbit_per_s, f"{where} in")

    def _link(self, name: str, mbit_per_s: float, other: str) -> tuple[int, int]:
        first = len(self.names)
        self.names += [name, other]
        self.capacities += [mbit_per_s * 125_000] * 2
        return first, first + 1

    def path(self, source: Place, reader: Place) -> tuple[int, ...]:
        """The links that a flow crosses."""
        a, b = source.location, reader.location
        if a.host == b.host and a.site == b.site:
            return (source.copy,) if source is reader else (source.out, reader.into)
        if (a.site, a.rack) == (b.site, b.rack):
            return (source.up, reader.down)
        up, down = self._racks.get((a.site, a.rack)), self._racks.get((b.site, b.rack))
        path = [source.up, *(up[:1] if up else ())]
        if a.site != b.site:
            path += [self._sites[a.site][0], self._sites[b.site][1]]
        return (*path, *(down[1:] if down else ()), reader.down)

    def round_trip_s(self, a: str, b: str) -> float:
        """Between two sites."""
        links = self._scenario.links
        return (links.round_trip_ms if a == b else links.wan_round_trip_ms) / 1000

    def lag(self, source: Place, reader: Place) -> float:
        """How many bytes a reader is behind a source that fills: a chunk, and what comes during a
        hop.
        """
        links = (source.down, *self.path(source, reader))  # what fills comes over a NIC
        rate = min(self.capacities[link] for link in links)
        hop_s = HOP_S + self.round_trip_s(source.location.site, reader.location.site) / 2
        return min(self._scenario.chunk_bytes + hop_s * rate, float(self._scenario.rank_bytes))

    def opening_s(self, source: Place, reader: Place) -> float:
        """Until the first byte of a source that has it is on its way."""
        return (
            OPENING_ROUND_TRIPS * self.round_trip_s(source.location.site, reader.location.site)
            + HOP_S
        )


def worker_name(group: str, rank: int, ranks: int) -> str:
    return group if ranks == 1 else f"{group}/{rank}"


def _groups(scenario: Scenario) -> Iterator[tuple[str, str, float]]:
    """The name and the site of each group, and how slow it is, in the order of the file; before
    each kind, a name that ends in a colon.
    """
    counts: dict[str, int] = {}
    for hosts in scenario.hosts:
        yield f"{hosts.role}:", hosts.site, hosts.slow
        for _ in range(hosts.count):
            number = counts[hosts.role] = counts.get(hosts.role, -1) + 1
            yield f"{hosts.role}-{number}", hosts.site, hosts.slow
    yield "store:", scenario.sites[0], 1.0
    yield "store-0", scenario.sites[0], 1.0
