"""What is decided about RDMA without a device: ports as sysfs shows them, who reaches whom, work
requests, and errors.
"""

from __future__ import annotations

import errno
import random
import resource
from pathlib import Path
from typing import Any

import pytest

from tensorhub.errors import StateError, TransportUnavailable
from tensorhub.transport.rdma import ports as rdma
from tensorhub.transport.rdma.messages import RdmaPort
from tensorhub.transport.rdma.ports import (
    Move,
    Port,
    cut,
    find_ports,
    gid_text,
    pairs,
    usable_ports,
)

EMPTY = "0000:0000:0000:0000:0000:0000:0000:0000"
LINK = "fe80:0000:0000:0000:74e5:9fff:fede:c213"
IPV4 = "0000:0000:0000:0000:0000:ffff:0a63:0001"
IPV6 = "2001:0db8:0000:0000:0000:0000:0000:0001"


class Machine:
    """A sysfs as the kernel would show it."""

    def __init__(self, root: Path) -> None:
        self.sysfs, self.nodes = root / "infiniband", root / "dev"
        self._verbs = root / "infiniband_verbs"
        for each in (self.sysfs, self.nodes, self._verbs):
            each.mkdir()

    def add(
        self,
        device: str,
        gids: dict[int, tuple[str, str]],
        *,
        number: int = 1,
        link: str = "Ethernet",
        state: str = "4: ACTIVE",
        rate: str = "100 Gb/sec (4X EDR)",
        kind: str = "1: CA",
        node: bool = True,
    ) -> None:
        port = self.sysfs / device / "ports" / str(number)
        (port / "gids").mkdir(parents=True)
        (port / "gid_attrs" / "types").mkdir(parents=True)
        for name, text in (("link_layer", link), ("state", state), ("rate", rate)):
            (port / name).write_text(f"{text}\n")
        for index in range(max(gids, default=0) + 3):
            gid, gid_kind = gids.get(index, (EMPTY, ""))
            (port / "gids" / str(index)).write_text(f"{gid}\n")
            if gid_kind:  # reading the type of an empty entry fails
                (port / "gid_attrs" / "types" / str(index)).write_text(f"{gid_kind}\n")
        (self.sysfs / device / "node_type").write_text(f"{kind}\n")
        if node:
            name = f"uverbs{len(list(self._verbs.iterdir()))}"
            (self._verbs / name).mkdir()
            (self._verbs / name / "ibdev").write_text(f"{device}\n")
            (self.nodes / name).touch()

    def find(self, wanted: str | None = None) -> list[Port]:
        return find_ports(wanted, self.sysfs, self.nodes)

    def usable(self, wanted: str | None = None) -> tuple[Port, ...]:
        return usable_ports(wanted, self.sysfs, self.nodes)


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Machine:
    monkeypatch.setattr(rdma, "order_fault", lambda: None)
    monkeypatch.delenv(rdma.PORTS_VARIABLE, raising=False)
    return Machine(tmp_path)


V2, V1 = "RoCE v2", "IB/RoCE v1"


@pytest.mark.parametrize(
    ("gids", "index"),
    [
        ({0: (LINK, V1), 1: (LINK, V2), 2: (IPV4, V1), 3: (IPV4, V2)}, 3),
        ({0: (LINK, V2), 1: (IPV6, V2)}, 1),
        ({0: (LINK, V1), 1: (LINK, V2)}, 1),
        ({0: (LINK, V2), 7: (IPV4, V2), 9: (IPV4, V2)}, 7),
    ],
)
def test_the_best_gid_is_one_of_roce_v2_with_an_address(
    machine: Machine, gids: dict[int, tuple[str, str]], index: int
) -> None:
    machine.add("mlx5_0", gids)
    (port,) = machine.usable()
    assert (port.gid_index, port.fault, port.gbits, port.state, port.link) == (
        index,
        "",
        100.0,
        "ACTIVE",
        "ethernet",
    )


@pytest.mark.parametrize(
    ("changes", "gids", "text"),
    [
        ({"state": "1: DOWN"}, {0: (IPV4, V2)}, "the port is DOWN: check its cable"),
        ({"kind": "4: RNIC"}, {0: (IPV4, V2)}, "it is iWARP"),
        ({"node": False}, {0: (IPV4, V2)}, "no device node: load the kernel module ib_uverbs"),
        ({}, {}, "entry 0 of its GID table is empty: give its interface an IP address"),
        (
            {},
            {0: (IPV4, V1)},
            "entry 0 of its GID table is of IB/RoCE v1, not of RoCE v2: choose another one",
        ),
        ({"link": "InfiniBand"}, {}, "is a subnet manager running"),
    ],
)
def test_what_is_in_the_way_of_a_port_is_named(
    machine: Machine, changes: dict[str, Any], gids: dict[int, tuple[str, str]], text: str
) -> None:
    machine.add("mlx5_0", gids, **changes)
    with pytest.raises(TransportUnavailable, match=text):
        machine.usable()
    assert len(machine.find()) == 1  # shown by `doctor` all the same


def test_a_node_that_may_not_be_opened(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    machine.add("mlx5_0", {0: (IPV4, V2)})
    monkeypatch.setattr("os.access", lambda path, mode: False)
    with pytest.raises(
        TransportUnavailable, match=r"uverbs0 cannot be opened: give the container /dev/infiniband"
    ):
        machine.usable()


def test_a_machine_without_devices(machine: Machine, tmp_path: Path) -> None:
    with pytest.raises(TransportUnavailable, match="no RDMA device"):
        machine.usable()
    with pytest.raises(TransportUnavailable, match="no RDMA device"):
        usable_ports(None, tmp_path / "nowhere", tmp_path)


def test_ports_may_be_named(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    machine.add("mlx5_0", {0: (LINK, V2), 3: (IPV4, V2)})
    machine.add("mlx5_1", {0: (IPV4, V2)})
    assert [(port.device, port.gid_index) for port in machine.usable("mlx5_1, mlx5_0:1:0")] == [
        ("mlx5_1", 0),
        ("mlx5_0", 0),
    ]
    monkeypatch.setenv(rdma.PORTS_VARIABLE, "mlx5_1")
    assert [port.device for port in machine.usable()] == ["mlx5_1"]
    assert [port.device for port in machine.usable("mlx5_0")] == ["mlx5_0"]
    with pytest.raises(TransportUnavailable, match="entry 2 of its GID table is empty"):
        machine.usable("mlx5_0:1:2")
    with pytest.raises(TransportUnavailable, match="mlx5_0:2: there is no such port here"):
        machine.usable("mlx5_0:2")
    for wrong in ("", ":1", "mlx5_0:x", "a b", "mlx5_0:1:2:3", "../etc"):
        with pytest.raises(StateError, match="is no RDMA port"):
            find_ports(wrong, machine.sysfs)


def port(address: str, link: rdma.Link = "ethernet", gbits: float = 100.0) -> Port:
    import ipaddress

    parsed = ipaddress.ip_address(address)
    gid = parsed.packed if parsed.version == 6 else bytes(10) + b"\xff\xff" + parsed.packed
    return Port("d", 1, link, 0, gid, gbits, "ACTIVE")


def theirs(*ports: Port) -> tuple[RdmaPort, ...]:
    return rdma.said_of(ports)


def test_who_is_nearest_is_read_through() -> None:
    mine = [port("10.1.0.1"), port("10.2.0.1"), port("fe80::1")]
    others = theirs(
        port("10.2.0.9"),
        port("10.1.0.9"),
        port("192.168.0.1"),
        port("2001:db8::1"),
        port("fe80::2"),
    )
    found = pairs(mine, others)
    assert found[:3] == [(2, 4), (0, 1), (1, 0)]
    assert sorted(found) == [(0, 0), (0, 1), (0, 2), (1, 0), (1, 1), (1, 2), (2, 4)]
    assert gid_text(mine[0].gid) == "10.1.0.1"


def test_equal_ways_take_turns_and_faster_ones_come_first() -> None:
    mine = [port("10.0.0.1"), port("10.0.0.1"), port("10.0.0.1", gbits=400)]
    assert pairs(mine, theirs(port("10.0.0.2", gbits=400)))[0] == (2, 0)
    assert [pairs(mine[:2], theirs(port("10.0.0.2")), turn)[0] for turn in range(3)] == [
        (0, 0),
        (1, 0),
        (0, 0),
    ]


def test_infiniband_is_one_subnet() -> None:
    mine = [port("fe80::1", "infiniband")]
    assert pairs(mine, theirs(port("fe80::2", "infiniband"))) == [(0, 0)]
    assert pairs(mine, theirs(port("fec0::2", "infiniband"), port("fe80::2"))) == []
    text = rdma.apart(mine, theirs(port("10.0.0.1")))
    assert "d:1:0 (fe80::1)" in text
    assert "10.0.0.1" in text
    assert "Options.rdma_ports" in text


def test_ports_that_are_nonsense_are_reached_by_nobody() -> None:
    assert (
        pairs(
            [port("10.0.0.1")], [RdmaPort("ethernet", b"short", 1.0), RdmaPort("x", bytes(16), 1.0)]
        )
        == []
    )
    assert "nonsense" in rdma.apart([port("10.0.0.1")], [RdmaPort("ethernet", b"short", 1.0)])


# -------------------------------------------------------------------------------------------------
# registered memory


def limits(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, soft: int, capabilities: int, pinned_kib: int
) -> Path:
    monkeypatch.setattr(resource, "getrlimit", lambda kind: (soft, soft))
    status = tmp_path / "status"
    status.write_text(f"Name:\tx\nVmPin:\t{pinned_kib:8} kB\nCapEff:\t{capabilities:016x}\n")
    return status


def test_what_fits_under_the_limit(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    status = limits(monkeypatch, tmp_path, 2**20, 0, 512)
    assert rdma.memlock_fault(2**19, status) is None
    text = rdma.memlock_fault(2**19 + 1, status)
    assert text is not None
    assert "524289 bytes cannot be registered under RLIMIT_MEMLOCK, which is 1048576 bytes" in text
    assert "ulimit -l unlimited" in text


def test_who_is_above_the_limit(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    # CAP_IPC_LOCK
    assert rdma.memlock_fault(2**40, limits(monkeypatch, tmp_path, 65536, 1 << 14, 0)) is None
    assert (
        rdma.memlock_fault(2**40, limits(monkeypatch, tmp_path, resource.RLIM_INFINITY, 0, 0))
        is None
    )
    assert (
        rdma.memlock_fault(1, limits(monkeypatch, tmp_path, 0, ~(1 << 14) & 2**40 - 1, 0))
        is not None
    )


@pytest.mark.parametrize(
    ("limit", "code", "text"),
    [
        (65536, errno.ENOMEM, "RLIMIT_MEMLOCK, which is 65536 bytes"),
        (resource.RLIM_INFINITY, errno.ENOMEM, "has no room for more"),
        (0, errno.EFAULT, "a file's mapping cannot"),
        (0, errno.EOPNOTSUPP, "nor a device's without peer memory"),
        (0, errno.EINVAL, r"7 bytes cannot be registered \(Invalid argument\)"),
    ],
)
def test_why_memory_cannot_be_registered(
    monkeypatch: pytest.MonkeyPatch, limit: int, code: int, text: str
) -> None:
    import os
    import re

    monkeypatch.setattr(resource, "getrlimit", lambda kind: (limit, limit))
    assert re.search(text, rdma.registration_fault(OSError(code, os.strerror(code)), 7))


# --------------------------------------------------------------------------------------------------
# reading


def test_every_byte_is_read_once_wherever_it_is() -> None:
    chance = random.Random(1)
    for _ in range(50):
        moves, here = [], 0
        for _ in range(chance.randrange(1, 9)):
            here += chance.choice((0, 0, 3))
            size = chance.randrange(1, 40)
            moves.append(
                Move(
                    here,
                    chance.randrange(2),
                    here * 2 + 5000 if chance.random() < 0.3 else 9000 + here,
                    7,
                    size,
                )
            )
            here += size
        wanted = {
            (m.here + n, m.here_key, m.there + n, m.there_key)
            for m in moves
            for n in range(m.nbytes)
        }
        pieces = list(cut(moves, 16))
        got = [
            (m.here + n, m.here_key, m.there + n, m.there_key)
            for m in pieces
            for n in range(m.nbytes)
        ]
        assert len(got) == len(wanted)
        assert set(got) == wanted
        assert max(piece.nbytes for piece in pieces) <= 16
