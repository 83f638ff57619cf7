"""Hosts as network namespaces, on one bridge per site, with capped links; two sites are joined by a
WAN. For root, on Linux.

Responsible for the links, and that none is left: no namespace has a name. This process holds each
by a descriptor, and so do the processes in it. When they have ended, however that happened, the
kernel removes the namespace and its links. Not responsible for what runs there: `prefix` says how
to start something in a host.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Self

from benches.child_processes import ROOT

# at the most: so that a WAN's relay, and the shaping, have few packets to look at
MTU: Final = 9000
# more than the 64 KiB that the kernel sends at once, which tbf would else cut into packets
BURST_BYTES: Final = 128 * 1024
QUEUE_S: Final = 0.05  # the most that a link delays
WAN_DEVICE: Final = "wan0"
COMMAND_S: Final = 20.0
_CLONE_NEWNET: Final = 0x40000000


@dataclass(frozen=True, slots=True)
class Host:
    """`mbit`: what its link carries, either way."""

    name: str
    site: str
    mbit: float


@dataclass(frozen=True, slots=True)
class Wan:
    """What joins two sites. `loss`: the share of packets that are lost, by `seed`."""

    mbit: float
    round_trip_ms: float
    loss: float = 0.0
    seed: int = 0


class Network:
    """All hosts and links; they end with the `with` block."""

    def __init__(
        self,
        hosts: Sequence[Host],
        wan: Wan | None = None,
        congestion: str = "cubic",
        mtu: int = MTU,
    ) -> None:
        """`congestion`: the congestion control of all sockets."""
        self._hosts = {host.name: host for host in hosts}
        self._sites = list(dict.fromkeys(host.site for host in hosts))
        if len(self._hosts) < len(hosts):
            raise ValueError("two hosts have one name")
        if len(self._sites) > 2 or (len(self._sites) == 2) != (wan is not None):
            raise ValueError(
                f"a WAN joins two sites; here are {len(self._sites)}, "
                f"and {'a' if wan else 'no'} WAN"
            )
        self._wan = wan
        self._congestion, self._mtu = congestion, mtu
        self._stack = ExitStack()
        self._spaces: dict[str, int] = {}  # descriptors, by host, and by site for its bridge
        self._addresses = {
            host.name: f"10.213.{number}.{place}"
            for number, site in enumerate(self._sites)
            for place, host in enumerate([host for host in hosts if host.site == site], 1)
        }

    def __enter__(self) -> Self:
        try:
            for number, site in enumerate(self._sites):
                self._add_site(site, number)
            if self._wan is not None:
                self._add_wan(self._wan)
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def prefix(self, host: str) -> list[str]:
        """What runs a command there."""
        return ["nsenter", f"--net={self.path(host)}"]

    def address(self, host: str) -> str:
        return self._addresses[host]

    def set_mbit(self, host: str, mbit: float) -> None:
        """From now on its link carries so much, either way: a machine that has become slow."""
        site = self._hosts[host].site
        _batch(self.prefix(site), "tc", _classes(self._port(host), mbit, len(self._hosts)))
        _batch(self.prefix(host), "tc", _classes("eth0", mbit, len(self._hosts)))

    def path(self, name: str) -> str:
        """The host's namespace, as a file."""
        return f"/proc/{os.getpid()}/fd/{self._spaces[name]}"

    def _port(self, host: str) -> str:
        return f"to-{list(self._hosts).index(host)}"

    def _add_space(self, name: str) -> None:
        descriptor = _new_space()
        self._stack.callback(os.close, descriptor)
        self._spaces[name] = descriptor
        settings = "echo 1 >ip_forward; echo 1 >../ipv6/conf/default/disable_ipv6"
        _run([*self.prefix(name), "sh", "-c", f"cd /proc/sys/net/ipv4 && {settings}"])

    def _add_site(self, site: str, number: int) -> None:
        self._add_space(site)
        gateway = f"10.213.{number}.254"
        lines = [
            f"link add bridge0 mtu {self._mtu} type bridge",
            f"address add {gateway}/24 dev bridge0",
            "link set bridge0 up",
        ]
        hosts = [host for host in self._hosts.values() if host.site == site]
        for host in hosts:
            self._add_space(host.name)
            port, inside = (
                self._port(host.name),
                f"peer name eth0 mtu {self._mtu} netns {self.path(host.name)}",
            )
            lines += [
                f"link add {port} mtu {self._mtu} type veth {inside}",
                f"link set {port} master bridge0 up",
            ]
        _batch(self.prefix(site), "ip", lines)
        addresses = list(self._addresses.values())
        for host in hosts:
            _batch(
                self.prefix(site), "tc", _limit(self._port(host.name), host.mbit, "src", addresses)
            )
        for host in hosts:
            lines = [
                "link set lo up",
                f"address add {self._addresses[host.name]}/24 dev eth0 noprefixroute",
            ]
            # By routes: a namespace's default can only be what everybody may choose, and cubic is
            # not where that is bbr.
            lines += [
                "link set eth0 up",
                f"route add 10.213.{number}.0/24 dev eth0 congctl {self._congestion}",
            ]
            lines.append(f"route add default via {gateway} congctl {self._congestion}")
            _batch(self.prefix(host.name), "ip", lines)
            _batch(self.prefix(host.name), "tc", _limit("eth0", host.mbit, "dst", addresses))

    def _add_wan(self, wan: Wan) -> None:
        """A relay between a TUN device in each site; it ends with its standard input, and its
        devices with it.
        """
        ends = [self.path(site) for site in self._sites]
        options = [str(value) for value in (*ends, wan.mbit, wan.round_trip_ms, wan.loss, wan.seed)]
        relay = subprocess.Popen(
            [sys.executable, "-m", "benches.testbed.wan", *options],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            cwd=ROOT,
            start_new_session=True,
        )
        self._stack.callback(_end, relay)
        assert relay.stdout is not None
        if relay.stdout.readline().strip() != b"ready":
            raise RuntimeError("the WAN's relay has not started; its reason is above")
        for number, site in enumerate(self._sites):
            lines = [
                f"address add 10.213.254.{number + 1}/30 dev {WAN_DEVICE}",
                f"link set {WAN_DEVICE} mtu {self._mtu} up",
            ]
            lines.append(f"route add 10.213.{1 - number}.0/24 dev {WAN_DEVICE}")
            _batch(self.prefix(site), "ip", lines)


def why_not() -> str | None:
    """Why there can be no such network here; None if there can."""
    if sys.platform != "linux":
        return "network namespaces are Linux's"
    if os.geteuid() != 0:
        return "network namespaces need the rights of root"
    missing = [name for name in ("ip", "tc", "nsenter") if shutil.which(name) is None]
    if missing:
        return f"not installed: {', '.join(missing)} (Debian: apt-get install iproute2 util-linux)"
    if not Path("/dev/net/tun").exists():
        return "there is no /dev/net/tun, which a WAN needs"
    try:
        with Network([Host("probe", "here", 100.0)]):
            return None
    except (OSError, RuntimeError) as error:
        return f"network namespaces cannot be made here: {error}"


def _new_space() -> int:
    """A descriptor of a new network namespace; a thread that makes it its own opens it, and
    ends.
    """
    found: list[int | OSError] = []

    def open_one() -> None:
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.unshare(_CLONE_NEWNET) != 0:
            found.append(OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno())))
        else:
            found.append(os.open("/proc/thread-self/ns/net", os.O_RDONLY | os.O_CLOEXEC))

    thread = threading.Thread(target=open_one, name="new-namespace")
    thread.start()
    thread.join()
    if isinstance(found[0], OSError):
        raise found[0]
    return found[0]


def _limit(device: str, mbit: float, by: str, addresses: Sequence[str]) -> list[str]:
    """It sends so much, in equal shares to (`by` "dst") or from ("src") these addresses, as far as
    they use them: as the fair queue does that Linux distributions have. With one queue for all, who
    came first keeps several times as much.
    """
    lines = [
        f"qdisc add dev {device} root handle 1: htb default 2",
        *_classes(device, mbit, len(addresses)),
    ]
    queue_bytes = max(BURST_BYTES, int(mbit * 1e6 / 8 * QUEUE_S))
    for number, address in enumerate(addresses, 3):
        lines.append(f"qdisc add dev {device} parent 1:{number:x} bfifo limit {queue_bytes}")
        lines.append(
            f"filter add dev {device} parent 1: protocol ip u32 match ip {by} {address} flowid "
            f"1:{number:x}"
        )
    return lines


def _classes(device: str, mbit: float, count: int) -> list[str]:
    """One for whatever is no such address' (ARP), and one for each."""
    ceil = f"ceil {int(mbit * 1e6)}bit burst {BURST_BYTES} cburst {BURST_BYTES}"
    lines = [
        f"class replace dev {device} parent 1: classid 1:1 htb rate {int(mbit * 1e6)}bit {ceil}"
    ]
    for number in range(2, count + 3):
        share = f"rate {int(mbit * 1e6 / (count + 1))}bit {ceil} quantum {BURST_BYTES}"
        lines.append(f"class replace dev {device} parent 1:1 classid 1:{number:x} htb {share}")
    return lines


def _batch(prefix: Sequence[str], program: str, lines: Sequence[str]) -> None:
    _run([*prefix, program, "-batch", "-"], "".join(f"{line}\n" for line in lines))


def _run(command: Sequence[str], text: str = "") -> None:
    environment: Mapping[str, str] = os.environ | {"LC_ALL": "C"}
    done = subprocess.run(
        command, input=text, capture_output=True, text=True, timeout=COMMAND_S, env=environment
    )
    if done.returncode != 0:
        raise RuntimeError(f"{' '.join(command)}: {done.stderr.strip()}")


def _end(relay: subprocess.Popen[bytes]) -> None:
    for pipe in (relay.stdin, relay.stdout):
        assert pipe is not None
        pipe.close()
    with contextlib.suppress(subprocess.TimeoutExpired):
        relay.wait(5)
    relay.kill()
    relay.wait()
