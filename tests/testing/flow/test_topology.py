"""Where workers are, which links a flow crosses, and how far it is behind: against what can be
counted by hand.
"""

from __future__ import annotations

from dataclasses import replace

import pytest

from tensorhub.testing.flow.scenario import Hosts, Links, Scenario, load
from tensorhub.testing.flow.topology import HOP_S, Topology

MBIT = 125_000  # bytes
LINKS = Links(
    nic_mbit_per_s=100.0,
    round_trip_ms=1.0,
    rack_mbit_per_s=50.0,
    wan_mbit_per_s=10.0,
    wan_round_trip_ms=100.0,
    local_mbit_per_s=400.0,
    host_copy_mbit_per_s=800.0,
)
EAST = Hosts("rollout", "east", 2)


def scenario(*hosts: Hosts, **fields: object) -> Scenario:
    """Groups of three ranks, two workers on a host, two hosts in a rack: two racks for each trainer
    or kind of rollouts.
    """
    made = {
        "ranks": 3,
        "gpus_per_host": 2,
        "hosts_per_rack": 2,
        "rank_bytes": 10**9,
        "chunk_bytes": 10**6,
        **fields,
    }
    there = (Hosts("trainer", "west", 1), *(hosts or (Hosts("rollout", "west", 1), EAST)))
    return replace(load("standalone"), links=LINKS, hosts=there, **made)  # type: ignore[arg-type]


def path(topology: Topology, source: str, reader: str) -> list[str]:
    return [
        topology.names[link]
        for link in topology.path(topology.places[source], topology.places[reader])
    ]


def test_workers_fill_hosts_and_hosts_fill_racks_and_each_kind_begins_on_a_host_of_its_own() -> (
    None
):
    places = Topology(scenario()).places
    assert [(name, each.location.host, each.location.rack) for name, each in places.items()] == [
        ("trainer-0/0", "host-0", "rack-0"),
        ("trainer-0/1", "host-0", "rack-0"),
        ("trainer-0/2", "host-1", "rack-0"),
        ("rollout-0/0", "host-2", "rack-1"),
        ("rollout-0/1", "host-2", "rack-1"),
        ("rollout-0/2", "host-3", "rack-1"),
        ("rollout-1/0", "host-4", "rack-2"),
        ("rollout-1/1", "host-4", "rack-2"),
        ("rollout-1/2", "host-5", "rack-2"),
        ("rollout-2/0", "host-5", "rack-2"),
        ("rollout-2/1", "host-6", "rack-3"),
        ("rollout-2/2", "host-6", "rack-3"),
        ("store-0/0", "host-7", "rack-3"),
        ("store-0/1", "host-7", "rack-3"),
        ("store-0/2", "host-8", "rack-4"),
    ]
    assert [name for name, each in places.items() if each.location.site == "east"] == [
        f"rollout-{number}/{rank}" for number in (1, 2) for rank in range(3)
    ]


def test_a_flow_crosses_what_is_between_two_workers_in_its_own_direction() -> None:
    topology = Topology(scenario())
    assert path(topology, "trainer-0/0", "trainer-0/0") == ["trainer-0/0 copy"]
    assert path(topology, "trainer-0/0", "trainer-0/1") == [
        "trainer-0/0 to its host",
        "trainer-0/1 from its host",
    ]
    assert path(topology, "trainer-0/0", "trainer-0/2") == ["trainer-0/0 out", "trainer-0/2 in"]
    assert path(topology, "trainer-0/0", "rollout-0/0") == [
        "trainer-0/0 out",
        "rack-0 of west out",
        "rack-1 of west in",
        "rollout-0/0 in",
    ]
    assert path(topology, "trainer-0/0", "rollout-1/0") == [
        "trainer-0/0 out",
        "rack-0 of west out",
        "wan out of west",
        "wan into east",
        "rack-2 of east in",
        "rollout-1/0 in",
    ]
    assert path(topology, "rollout-1/0", "trainer-0/0")[2:4] == ["wan out of east", "wan into west"]


def test_racks_of_two_sites_are_not_one() -> None:
    """The store, in the west, goes on in the rack that the east's last rollouts have begun."""
    topology = Topology(scenario())
    assert path(topology, "rollout-2/1", "store-0/0") == [
        "rollout-2/1 out",
        "rack-3 of east out",
        "wan out of east",
        "wan into west",
        "rack-3 of west in",
        "store-0/0 in",
    ]


def test_without_uplinks_a_flow_crosses_nics_alone() -> None:
    topology = Topology(replace(scenario(), links=replace(LINKS, rack_mbit_per_s=float("inf"))))
    assert path(topology, "trainer-0/0", "rollout-0/0") == ["trainer-0/0 out", "rollout-0/0 in"]


def test_each_link_carries_what_is_said_of_its_kind() -> None:
    topology = Topology(scenario())
    of = dict(zip(topology.names, topology.capacities, strict=True))
    said = {
        "trainer-0/0 out": 100,
        "rollout-1/0 in": 100,
        "rack-0 of west out": 50,
        "wan into east": 10,
    }
    said |= {
        "trainer-0/0 to its host": 400,
        "trainer-0/0 from its host": 400,
        "trainer-0/0 copy": 800,
    }
    assert {name: of[name] for name in said} == {name: mbit * MBIT for name, mbit in said.items()}


def test_a_slow_host_has_a_slow_nic() -> None:
    topology = Topology(scenario(Hosts("rollout", "west", 1, slow=4.0)))
    of = dict(zip(topology.names, topology.capacities, strict=True))
    slow = next(name for name in topology.places if name.startswith("rollout")).partition("/")[0]
    assert {of[f"{slow}/0 out"], of[f"{slow}/0 in"]} == {25 * MBIT}
    assert of["trainer-0/0 out"] == 100 * MBIT
    assert of[f"{slow}/0 to its host"] == 400 * MBIT


def test_a_reader_is_a_chunk_and_a_hop_behind_a_source_that_fills() -> None:
    """By the narrowest link of the way, the one into the source included; never more than all."""
    topology = Topology(scenario())
    places = topology.places
    near = 10**6 + (HOP_S + 0.0005) * 100 * MBIT  # half a round trip of 1 ms
    assert topology.lag(places["trainer-0/0"], places["trainer-0/2"]) == pytest.approx(near)
    # its source's NIC
    assert topology.lag(places["trainer-0/0"], places["trainer-0/1"]) == pytest.approx(near)
    far = 10**6 + (HOP_S + 0.05) * 10 * MBIT
    assert topology.lag(places["trainer-0/0"], places["rollout-1/0"]) == pytest.approx(far)
    small = Topology(scenario(rank_bytes=1000))
    assert small.lag(small.places["trainer-0/0"], small.places["rollout-1/0"]) == 1000


def test_to_open_a_source_takes_three_round_trips_of_its_way() -> None:
    topology = Topology(scenario())
    places = topology.places
    assert topology.opening_s(places["trainer-0/0"], places["trainer-0/1"]) == pytest.approx(
        0.003 + HOP_S
    )
    assert topology.opening_s(places["trainer-0/0"], places["rollout-1/0"]) == pytest.approx(
        0.3 + HOP_S
    )
