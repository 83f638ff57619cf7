"""Each process in a network namespace of its own, on one bridge: faults are those of real links.
For root, on Linux.

Links go down (`partition`), lose what goes one way (`deaf`, `mute`) or are slow; delay needs the
kernel's netem. Nothing stands between the processes, so no connection is cut or refused from
outside. Every name carries the run's process id: the next run removes what a killed one has left.
"""

from __future__ import annotations

import os
import re
import subprocess
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final, Self

from benches.chaos.engine import ALONE, CLIENT_PORT, Engine, url_of
from benches.chaos.plan import PROCESS_KINDS, Fault

PORT: Final = 7000
# of namespaces: this, the process id, "-" and the name of the process in the run
SPACE: Final = "thchaos"
LINK: Final = "thc"  # of the bridge, and with "." and a number of its ports; 15 characters at most
# drops whatever is longer than its burst
NOTHING: Final = ("tbf", "rate", "8bit", "burst", "8", "limit", "8")
ROOM_S: Final = 10.0  # for one command


class Namespaces:
    """What stands between the processes, as links; ends with its `with` block. It takes the place
    of `network.Relays`.
    """

    def __init__(self, workers: Sequence[str], engine: Engine = ALONE) -> None:
        self.engine = engine
        names = (*engine.coordinators, *workers, *engine.members)
        self._numbers = {name: number for number, name in enumerate(names, 1)}
        self._faults: dict[str, list[Fault]] = {name: [] for name in self._numbers}
        self._lock = threading.Lock()
        self._usual: tuple[str, ...] = ()
        self._pid = os.getpid()
        self.coordinators: Mapping[str, tuple[str, int]] = {
            name: (self.host(name), PORT) for name in engine.coordinators
        }
        self.kinds: Sequence[str] = (*PROCESS_KINDS, "partition", "deaf", "mute", "slow")

    def __enter__(self) -> Self:
        remove_leftovers()
        try:
            _ip("link", "add", f"{LINK}{self._pid}", "type", "bridge")
            _ip("link", "set", f"{LINK}{self._pid}", "up")
            for name in self._numbers:
                self._add(name)
            if _has_netem(self._port(self.engine.coordinators[0])):
                self.kinds = (*self.kinds, "delay")
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        remove(self._pid)

    def _add(self, name: str) -> None:
        space, port = self._space(name), self._port(name)
        _ip("netns", "add", space)
        _ip("link", "add", port, "type", "veth", "peer", "name", "eth0", "netns", space)
        _ip("link", "set", port, "master", f"{LINK}{self._pid}", "up")
        _ip("-n", space, "address", "add", f"{self.host(name)}/24", "dev", "eth0")
        _ip("-n", space, "link", "set", "lo", "up")
        _ip("-n", space, "link", "set", "eth0", "up")

    def _space(self, name: str) -> str:
        return f"{SPACE}{self._pid}-{name}"

    def _port(self, name: str) -> str:
        return f"{LINK}{self._pid}.{self._numbers[name]}"

    def host(self, name: str) -> str:
        """The process's own address."""
        # of a bridge that leads nowhere: it meets nobody's
        return f"10.213.7.{self._numbers[name]}"

    @property
    def bytes_passed(self) -> int:
        """What the processes' links have carried to them."""
        counters = (
            Path(f"/sys/class/net/{self._port(name)}/statistics/tx_bytes") for name in self._numbers
        )
        return sum(int(counter.read_text()) for counter in counters)

    @property
    def failure(self) -> BaseException | None:
        return None

    def prefix(self, name: str) -> list[str]:
        """What runs a command where this process is."""
        return ["ip", "netns", "exec", self._space(name)]

    def location(self, name: str) -> str | None:
        """Another host for each: they share no memory."""
        return self._space(name)

    def address(self, name: str) -> str:
        """Where workers reach the coordinators, or ask for them."""
        listed = ",".join(f"tcp://{host}:{port}" for host, port in self.coordinators.values())
        return (self.ha(name) if self.engine.members else None) or listed

    def ha(self, name: str) -> str | None:
        """What this coordinator is elected by."""
        members = (f"{self.host(each)}:{CLIENT_PORT}" for each in self.engine.members)
        return url_of(self.engine, members)

    def options(self, name: str) -> dict[str, Any]:
        return {}

    def cap(self, bits_per_s: float) -> None:
        """From now on, no link carries more, either way."""
        self._usual = ("tbf", "rate", f"{int(bits_per_s)}bit", "burst", "64kb", "latency", "50ms")
        self.heal()

    def begin(self, fault: Fault) -> None:
        with self._lock:
            self._faults[fault.process].append(fault)
            self._set(fault.process)

    def end(self, fault: Fault) -> None:
        with self._lock:
            if fault in self._faults[fault.process]:
                self._faults[fault.process].remove(fault)
                self._set(fault.process)

    def heal(self) -> None:
        """No fault is left."""
        with self._lock:
            for name, faults in self._faults.items():
                faults.clear()
                self._set(name)

    def _set(self, name: str) -> None:
        """Make the process's link what its faults make of it. All of them are of the whole link."""
        faults = self._faults[name]
        kinds = {fault.kind for fault in faults}
        _ip("link", "set", self._port(name), "down" if "partition" in kinds else "up")
        usual = shape(faults) or self._usual
        _shape((), self._port(name), NOTHING if "deaf" in kinds else usual)
        _shape(("-n", self._space(name)), "eth0", NOTHING if "mute" in kinds else usual)


def shape(faults: Sequence[Fault]) -> tuple[str, ...]:
    """The queueing discipline that slows or delays as these faults say; none: ()."""
    rates = [fault.bytes_per_s for fault in faults if fault.bytes_per_s is not None]
    if rates:
        return ("tbf", "rate", f"{int(min(rates) * 8)}bit", "burst", "16kb", "latency", "400ms")
    delay_s = max((fault.delay_s for fault in faults), default=0.0)
    return ("netem", "delay", f"{delay_s * 1000:.0f}ms") if delay_s else ()


def why_not() -> str | None:
    """Why namespaces cannot be had here; None if they can."""
    if os.geteuid() != 0:
        return "network namespaces need the rights of root"
    try:
        _ip("netns", "add", f"{SPACE}{os.getpid()}-probe")
        _ip("netns", "del", f"{SPACE}{os.getpid()}-probe")
    except (OSError, RuntimeError) as error:
        return f"network namespaces cannot be made here: {error}"
    return None


def remove_leftovers() -> None:
    """Remove what runs have left whose process is gone."""
    found = {int(pid) for pid in re.findall(rf"^{SPACE}(\d+)-", _ip("netns", "list"), re.MULTILINE)}
    found |= {
        int(pid)
        for pid in re.findall(rf"^\d+: {LINK}(\d+)[.:@]", _ip("-o", "link", "show"), re.MULTILINE)
    }
    for pid in found:
        if pid != os.getpid() and not Path(f"/proc/{pid}").exists():
            remove(pid)


def remove(pid: int) -> None:
    """Remove the namespaces and links of that run, as far as there are any. A namespace's link goes
    with it.
    """
    for space in re.findall(rf"^{SPACE}{pid}-\S+", _ip("netns", "list"), re.MULTILINE):
        _ip("netns", "del", space)
    for link in re.findall(
        rf"^\d+: ({LINK}{pid}(?:\.\d+)?)[:@]", _ip("-o", "link", "show"), re.MULTILINE
    ):
        # one that is just going with its namespace
        _run(["ip", "link", "del", link], is_needed=False)


def _has_netem(link: str) -> bool:
    found = (
        _run(
            ["tc", "qdisc", "replace", "dev", link, "root", "netem", "delay", "1ms"],
            is_needed=False,
        )
        is not None
    )
    _shape((), link, ())
    return found


def _shape(where: Sequence[str], link: str, discipline: Sequence[str]) -> None:
    if discipline:
        _run(["tc", *where, "qdisc", "replace", "dev", link, "root", *discipline])
    else:
        # none is there to be removed
        _run(["tc", *where, "qdisc", "del", "dev", link, "root"], is_needed=False)


def _ip(*arguments: str) -> str:
    return _run(["ip", *arguments]) or ""


def _run(command: Sequence[str], *, is_needed: bool = True) -> str | None:
    """Its output. RuntimeError if it fails, or None if that does not matter."""
    environment: Mapping[str, str] = os.environ | {"LC_ALL": "C"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=ROOM_S, env=environment)
    if done.returncode == 0:
        return done.stdout
    if is_needed:
        raise RuntimeError(f"{' '.join(command)}: {done.stderr.strip()}")
    return None
