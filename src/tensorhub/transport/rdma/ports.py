"""The parts of RDMA that need no device: which ports there are, which of them reach each other, how
reads are cut into work requests, and what an error means.

A *port* is one way into the fabric: a device's port with one entry of its GID table. Ports are
found in sysfs, so that a machine without pyverbs can still be told what it has and what it lacks
(`tensorhub doctor`).

Responsible for these decisions, and for naming obstacles and remedies. Not responsible for queue
pairs and registered memory (`verbs`), nor for messages between workers (`transport.rdma.reader`).
"""

from __future__ import annotations

import errno
import ipaddress
import os
import re
import resource
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NamedTuple

from tensorhub.errors import StateError, TransportUnavailable
from tensorhub.transport.base import ReadFailure, Reason
from tensorhub.transport.generation_words import order_fault
from tensorhub.transport.rdma.messages import GID_BYTES, PORTS_MAX, RdmaPort

PIECE_BYTES = 2**20  # of one work request
PORTS_VARIABLE = "TENSORHUB_RDMA_PORTS"
# entries of a GID table in a row, behind which no other one is looked for: tables have up to 1024
EMPTY_MAX = 32
SYSFS = Path("/sys/class/infiniband")
NODES = Path("/dev/infiniband")
_CAP_IPC_LOCK = 14
_NO_GID = bytes(GID_BYTES)

Link = Literal["ethernet", "infiniband"]

# --------------------------------------------------------------------------------------------------
# ports


@dataclass(frozen=True, slots=True)
class Port:
    """One port of a device, with the GID by which it would be used. `fault`: why it cannot be used,
    and what to do.
    """

    device: str
    number: int
    link: Link
    gid_index: int
    gid: bytes  # GID_BYTES
    gbits: float  # per second
    state: str  # as the kernel says it, e.g. "ACTIVE"
    fault: str = ""

    def __str__(self) -> str:
        return f"{self.device}:{self.number}:{self.gid_index} ({gid_text(self.gid)})"


def gid_text(gid: bytes) -> str:
    """A GID as people know it: as an IPv4 address, where it is one."""
    address = ipaddress.IPv6Address(gid)
    return str(address.ipv4_mapped or address)


def find_ports(wanted: str | None = None, sysfs: Path = SYSFS, nodes: Path = NODES) -> list[Port]:
    """All ports of this machine, each with the best of its GIDs, or those that are wanted, in that
    order.

    `wanted`: DEVICE[:PORT[:GID_INDEX]], several with commas between them. StateError if it is not
    that.
    """
    if wanted is None:
        return [
            port
            for device in _listed(sysfs)
            for port in _ports_of(sysfs / device, nodes, None, None)
        ]
    found: list[Port] = []
    for each in wanted.split(","):
        match = re.fullmatch(r"\s*([\w.-]+)(?::(\d{1,3}))?(?::(\d{1,4}))?\s*", each)
        if match is None:
            raise StateError(
                f"{each!r} is no RDMA port: give DEVICE[:PORT[:GID_INDEX]], several with commas "
                f"between them"
            )
        device, number, index = match[1], match[2], match[3]
        ports = _ports_of(
            sysfs / device, nodes, int(number) if number else None, int(index) if index else None
        )
        found += ports or [_absent(device, int(number or 1), int(index or 0))]
    return found


def usable_ports(
    wanted: str | None = None, sysfs: Path = SYSFS, nodes: Path = NODES
) -> tuple[Port, ...]:
    """Those that can be used, PORTS_MAX at most. `wanted` as of `find_ports`; None: as
    TENSORHUB_RDMA_PORTS says, else all.

    Raises TransportUnavailable, which names the obstacle of each port.
    """
    if (fault := order_fault()) is not None:
        raise TransportUnavailable(fault)
    ports = find_ports(
        wanted if wanted is not None else os.environ.get(PORTS_VARIABLE) or None, sysfs, nodes
    )
    usable = tuple(port for port in ports if not port.fault)
    if not ports:
        raise TransportUnavailable(
            "this machine has no RDMA device (nothing is in /sys/class/infiniband)"
        )
    if not usable:
        raise TransportUnavailable(
            "; ".join(f"{port.device}:{port.number}: {port.fault}" for port in ports)
        )
    return usable[:PORTS_MAX]


def _listed(directory: Path) -> list[str]:
    """Names in a directory; numbers in them count as numbers."""
    try:
        names = os.listdir(directory)
    except OSError:
        return []
    return sorted(
        names,
        key=lambda name: [
            int(part) if part.isdigit() else part for part in re.split(r"(\d+)", name)
        ],
    )


def _said(path: Path) -> str:
    """What a file of sysfs says; nothing if it cannot be read, as an empty entry of a table
    cannot.
    """
    try:
        return path.read_text().strip()
    except OSError:
        return ""


def _absent(device: str, number: int, index: int) -> Port:
    fault = f"there is no such port here: {', '.join(_listed(SYSFS)) or 'no RDMA device'}"
    return Port(device, number, "ethernet", index, _NO_GID, 0.0, "absent", fault)


def _ports_of(device: Path, nodes: Path, number: int | None, index: int | None) -> list[Port]:
    numbers = [int(name) for name in _listed(device / "ports") if name.isdigit()]
    return [_port(device, each, nodes, index) for each in numbers if number in (None, each)]


def _port(device: Path, number: int, nodes: Path, index: int | None) -> Port:
    port = device / "ports" / str(number)
    link: Link = "infiniband" if _said(port / "link_layer") == "InfiniBand" else "ethernet"
    state = _said(port / "state").partition(": ")[2] or "unknown"
    rate = re.match(r"[\d.]+", _said(port / "rate"))
    gbits = float(rate[0]) if rate else 0.0
    chosen = _best_gid(port, link) if index is None else index
    gid = _as_gid(_said(port / "gids" / str(chosen)))
    fault = _port_fault(device, state, nodes) or _gid_fault(gid, _kind(port, chosen), link, chosen)
    return Port(device.name, number, link, chosen, gid, gbits, state, fault)


def _port_fault(device: Path, state: str, nodes: Path) -> str:
    if _said(device / "node_type").endswith("RNIC"):
        return "it is iWARP, which is connected in another way"
    if state != "ACTIVE":
        return (
            f"the port is {state}: check its cable, its switch and (Ethernet) that its "
            f"interface is up"
        )
    node = next(
        (
            name
            for name in _listed(device.parent.parent / "infiniband_verbs")
            if _is_of(device, name)
        ),
        None,
    )
    if node is None:
        return "it has no device node: load the kernel module ib_uverbs"
    if not os.access(nodes / node, os.R_OK | os.W_OK):
        return (
            f"{nodes / node} cannot be opened: give the container /dev/infiniband, or the user "
            f"the right to it"
        )
    return ""


def _is_of(device: Path, node: str) -> bool:
    return _said(device.parent.parent / "infiniband_verbs" / node / "ibdev") == device.name


def _best_gid(port: Path, link: Link) -> int:
    """The GID table's best entry: of RoCE v2 an IPv4 address, then a global one, then a link's; of
    InfiniBand the first.
    """
    if link == "infiniband":
        return 0
    best: tuple[int, int] | None = None
    index = empty = 0
    while empty < EMPTY_MAX:
        gid = _as_gid(_said(port / "gids" / str(index)))
        empty = empty + 1 if gid == _NO_GID else 0
        if gid != _NO_GID and _kind(port, index) == "RoCE v2":
            address = ipaddress.IPv6Address(gid)
            found = (
                0 if address.ipv4_mapped is not None else 2 if address.is_link_local else 1,
                index,
            )
            best = found if best is None else min(best, found)
        index += 1
    return 0 if best is None else best[1]


def _as_gid(text: str) -> bytes:
    """An entry of the GID table; zeros if it is empty, or there is none."""
    try:
        return ipaddress.IPv6Address(text).packed
    except ValueError:
        return _NO_GID


def _kind(port: Path, index: int) -> str:
    return _said(port / "gid_attrs" / "types" / str(index))


def _gid_fault(gid: bytes, kind: str, link: Link, index: int) -> str:
    if gid == _NO_GID:
        hint = (
            "give its interface an IP address"
            if link == "ethernet"
            else "is a subnet manager running?"
        )
        return f"entry {index} of its GID table is empty: {hint}"
    if link == "ethernet" and kind != "RoCE v2":
        return (
            f"entry {index} of its GID table is of {kind or 'no known type'}, not of RoCE v2: "
            f"choose another one"
        )
    return ""


def said_of(ports: Iterable[Port]) -> tuple[RdmaPort, ...]:
    """What readers are told of these ports."""
    return tuple([RdmaPort(port.link, port.gid, port.gbits) for port in ports])


def pairs(mine: Sequence[Port], theirs: Sequence[RdmaPort], turn: int = 0) -> list[tuple[int, int]]:
    """Which of my ports may reach which of theirs, as pairs of indexes. The nearest pair is first
    (the longest common prefix of the addresses), then the fastest. Pairs that are as good as the
    first take `turn`s, so that links spread over ports.
    """
    found: list[tuple[int, float, int, int]] = []
    for here, port in enumerate(mine):
        for there, other in enumerate(theirs):
            if _may_reach(port, other):
                common = 128 - (int.from_bytes(port.gid) ^ int.from_bytes(other.gid)).bit_length()
                found.append((-common, -min(port.gbits, other.gbits), here, there))
    found.sort()
    best = [each for each in found if each[:2] == found[0][:2]]
    turn = turn % len(best) if best else 0
    return [(here, there) for *_, here, there in best[turn:] + best[:turn] + found[len(best) :]]


def _may_reach(mine: Port, theirs: RdmaPort) -> bool:
    if mine.link != theirs.link or len(theirs.gid) != len(mine.gid):
        return False
    if mine.link == "infiniband":
        return mine.gid[:8] == theirs.gid[:8]  # the subnet's prefix
    # RoCE v2 is routed; but there is no way between IPv4 and IPv6, nor out of a link.
    return _family(mine.gid) == _family(theirs.gid)


def _family(gid: bytes) -> str:
    address = ipaddress.IPv6Address(gid)
    return (
        "IPv4" if address.ipv4_mapped is not None else "link" if address.is_link_local else "IPv6"
    )


def apart(mine: Sequence[Port], theirs: Sequence[RdmaPort]) -> str:
    """What to say where `pairs` finds none."""
    here = ", ".join(str(port) for port in mine)
    there = ", ".join(
        gid_text(port.gid) if len(port.gid) == len(_NO_GID) else "nonsense" for port in theirs
    )
    advice = f"choose ports that reach each other (Options.rdma_ports, {PORTS_VARIABLE})"
    return f"no RDMA port here ({here}) is on one network with one of its ({there}): {advice}"


# -------------------------------------------------------------------------------------------------
# registered memory


def memlock_fault(nbytes: int, status: Path = Path("/proc/self/status")) -> str | None:
    """Why so many bytes more cannot be registered, and what to do; None if nothing is known to be
    in the way.
    """
    said = status.read_text()
    limit = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    capable = re.search(r"^CapEff:\s+([0-9a-f]+)", said, re.MULTILINE)
    if limit == resource.RLIM_INFINITY or (capable and int(capable[1], 16) >> _CAP_IPC_LOCK & 1):
        return None
    found = re.search(r"^VmPin:\s+(\d+) kB", said, re.MULTILINE)
    pinned = int(found[1]) * 1024 if found else 0
    return None if pinned + nbytes <= limit else memlock_text(nbytes, limit)


def memlock_note() -> str | None:
    """What to tell about the limit beforehand; None: it does not apply to this process."""
    limit = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    if memlock_fault(2**40) is None:
        return None
    return (
        f"RLIMIT_MEMLOCK is {limit} bytes, and all memory that is published or filled counts: "
        f"raise it by {_RAISING}"
    )


_RAISING = (
    "`ulimit -l unlimited`, LimitMEMLOCK=infinity (systemd) or --ulimit memlock=-1 (containers)"
)


def memlock_text(nbytes: int, limit: int) -> str:
    """What to say where memory cannot be registered for want of a limit."""
    return (
        f"{nbytes} bytes cannot be registered under RLIMIT_MEMLOCK, which is {limit} bytes: "
        f"raise it by {_RAISING}"
    )


def is_of_limit(fault: str) -> bool:
    """Whether the fault is of `memlock_text`: a mistake of set-up, which deserves a warning."""
    return "RLIMIT_MEMLOCK" in fault


def registration_fault(error: OSError, nbytes: int) -> str:
    """What it means that so many bytes could not be registered, and what to do."""
    match error.errno:
        case errno.ENOMEM:
            limit = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
            if limit != resource.RLIM_INFINITY:
                return memlock_text(nbytes, limit)
            return (
                f"{nbytes} bytes cannot be registered: the device, or "
                "the machine, has no room for more"
            )
        case errno.EFAULT | errno.EOPNOTSUPP:
            return (
                "its memory cannot be registered: a file's mapping cannot, nor a device's "
                "without peer memory"
            )
        case _:
            return f"{nbytes} bytes cannot be registered ({error.strerror})"


# --------------------------------------------------------------------------------------------------
# reading


class Move(NamedTuple):
    """Bytes to read from a registered address at the source to one here."""

    here: int
    here_key: int
    there: int
    there_key: int
    nbytes: int


def cut(moves: Iterable[Move], piece_bytes: int = PIECE_BYTES) -> Iterator[Move]:
    """The reads as work requests, of at most `piece_bytes`. Neighbours under equal keys are one."""
    for move in _joined(moves):
        for offset in range(0, move.nbytes, piece_bytes):
            size = min(piece_bytes, move.nbytes - offset)
            yield Move(move.here + offset, move.here_key, move.there + offset, move.there_key, size)


def _joined(moves: Iterable[Move]) -> Iterator[Move]:
    last: Move | None = None
    for move in moves:
        if last is not None and move == (
            last.here + last.nbytes,
            last.here_key,
            last.there + last.nbytes,
            last.there_key,
            move.nbytes,
        ):
            last = last._replace(nbytes=last.nbytes + move.nbytes)
            continue
        if last is not None:
            yield last
        last = move
    if last is not None:
        yield last


_SILENT = (
    "the source does not answer over RDMA: its process or its port is gone, or there is no way to "
    "it (routing between the "
    "two networks, a firewall for UDP 4791, MTU); Options.rdma_ports chooses other ports"
)
_MEANINGS: dict[int, tuple[Reason, str]] = {
    # ibv_wc_status: (reason, what it means)
    4: ("lost", "this process' own memory is not registered for it (any more)"),
    5: ("lost", "the queue pair is in its error state"),
    9: ("lost", "the source's device refuses the request"),
    10: ("refused", "the source's memory is not registered (any more) where it was said to be"),
    11: ("lost", "the source's device failed"),
    12: ("lost", _SILENT),
    13: ("lost", "the source's queue pair is not ready"),
}


def failure_of(status: int) -> ReadFailure:
    """What a work request's completion with this status (not 0) means."""
    reason, text = _MEANINGS.get(status, ("lost", "the read failed"))
    return ReadFailure(reason, f"{text} (completion status {status})")
