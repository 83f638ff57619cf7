"""The processes' addresses over loopback, and the faults on the ways between them, by relays.

Each process has a loopback address of its own, named after the run's process id, so that ports are
fixed and meet nobody. A worker reaches each coordinator through a control path of its own, and its
readers reach it through its own data path (`Options.advertise`). A coordinator reaches each member
of etcd through a path of its own; members reach each other without one.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Protocol, Self

from benches.chaos.engine import ALONE, CLIENT_PORT, Engine, url_of
from benches.chaos.plan import KINDS, Fault
from benches.chaos.relay import Address, Path, Relay, Weather

PORT: Final = 7000
CONTROL_PORT: Final = (
    7010  # of the relay to the first coordinator, or member of etcd; then the next
)
HELD: Final[Mapping[str, tuple[str, ...]]] = {
    "partition": ("up", "down"),
    "deaf": ("down",),
    "mute": ("up",),
}


class Network(Protocol):
    """What stands between the processes: where each of them is, and what faults make of its
    links.
    """

    kinds: Sequence[str]  # of fault that it can do
    engine: Engine
    coordinators: Mapping[str, tuple[str, int]]  # where each listens

    @property
    def bytes_passed(self) -> int: ...
    @property
    def failure(self) -> BaseException | None: ...
    def prefix(self, name: str) -> list[str]: ...
    def host(self, name: str) -> str: ...
    def ha(self, name: str) -> str | None: ...
    def location(self, name: str) -> str | None: ...
    def address(self, name: str) -> str: ...
    def options(self, name: str) -> dict[str, Any]: ...
    def cap(self, bits_per_s: float) -> None: ...
    def begin(self, fault: Fault) -> None: ...
    def end(self, fault: Fault) -> None: ...
    def heal(self) -> None: ...


@dataclass(frozen=True, slots=True)
class End:
    """What stands at an end of a path: a plane of a process's connections; `is_far`: it listens."""

    process: str
    plane: str
    is_far: bool = False

    def meets(self, fault: Fault) -> bool:
        return fault.process == self.process and (
            fault.plane == self.plane or "both" in (fault.plane, self.plane)
        )


class Relays:
    """What stands between the processes, as relays; ends with its `with` block."""

    kinds: Sequence[str] = tuple(KINDS)

    def __init__(self, workers: Sequence[str], engine: Engine = ALONE) -> None:
        self._relay = Relay()
        self._workers = workers
        names = (*workers, *engine.coordinators, *engine.members)
        self._numbers = {name: number for number, name in enumerate(names, 1)}
        self._paths: list[tuple[Path, tuple[End, ...]]] = []
        self._faults: list[Fault] = []
        self._lock = threading.Lock()
        self._cap: float | None = None
        self.engine = engine
        self.coordinators: Mapping[str, tuple[str, int]] = {
            name: (self.host(name), PORT) for name in engine.coordinators
        }

    def __enter__(self) -> Self:
        self._relay.__enter__()
        # of a coordinator: what it asks etcd for, and the other way
        asks, is_asked = ("control", "data") if self.engine.members else ("", "both")
        for name in self._workers:
            host = self.host(name)
            for number, (coordinator, there) in enumerate(self.coordinators.items()):
                ends = End(name, "control"), End(coordinator, is_asked, is_far=True)
                self._add((host, CONTROL_PORT + number), there, *ends)
            self._add((host, PORT + 1), (host, PORT + 2), End(name, "data", is_far=True))
        for name in self.coordinators:
            for number, member in enumerate(self.engine.members):
                there = self.host(member), CLIENT_PORT
                self._add((self.host(name), CONTROL_PORT + number), there, End(name, asks))
        return self

    def _add(self, listen: Address, target: Address, *ends: End) -> None:
        self._paths.append((self._relay.add(listen, target), ends))

    def __exit__(self, *stack: object) -> None:
        self._relay.__exit__(*stack)

    def host(self, name: str) -> str:
        """The process's own address."""
        return f"127.{100 + os.getpid() % 100}.{os.getpid() // 100 % 250}.{self._numbers[name]}"

    @property
    def bytes_passed(self) -> int:
        return sum(path.bytes_passed for path, _ in self._paths)

    @property
    def failure(self) -> BaseException | None:
        return self._relay.failure

    def prefix(self, name: str) -> list[str]:
        """What runs a command where this process is."""
        return []

    def location(self, name: str) -> str | None:
        return None

    def address(self, name: str) -> str:
        """Where this worker reaches the coordinators."""
        ports = range(CONTROL_PORT, CONTROL_PORT + len(self.coordinators))
        return ",".join(f"tcp://{self.host(name)}:{port}" for port in ports)

    def ha(self, name: str) -> str | None:
        """What this coordinator is elected by."""
        ports = range(CONTROL_PORT, CONTROL_PORT + len(self.engine.members))
        return url_of(self.engine, (f"{self.host(name)}:{port}" for port in ports))

    def options(self, name: str) -> dict[str, Any]:
        """Where it listens for its readers, and what they are told."""
        host = self.host(name)
        return {"listen_host": host, "listen_port": PORT + 2, "advertise": f"{host}:{PORT + 1}"}

    def cap(self, bits_per_s: float) -> None:
        """From now on, no connection to a worker's data carries more, either way."""
        self._cap = bits_per_s / 8
        self.heal()

    def begin(self, fault: Fault) -> None:
        with self._lock:
            if fault.kind == "cut":
                for path in self._concerned(fault):
                    path.cut(reset=fault.reset)
                return
            self._faults.append(fault)
            self._set()
            if fault.kind == "refuse":
                for path in self._concerned(fault):
                    path.cut(reset=True)

    def end(self, fault: Fault) -> None:
        with self._lock:
            if fault in self._faults:
                self._faults.remove(fault)
                self._set()

    def heal(self) -> None:
        """No fault is left."""
        with self._lock:
            self._faults.clear()
            self._set()

    def _concerned(self, fault: Fault) -> list[Path]:
        return [path for path, ends in self._paths if any(end.meets(fault) for end in ends)]

    def _set(self) -> None:
        for path, ends in self._paths:
            path.set(weather(self._faults, ends, self._cap if ends[0].is_far else None))


def weather(faults: Sequence[Fault], ends: Sequence[End], cap: float | None = None) -> Weather:
    """What all faults together make of a path with these ends. `cap`: bytes per second without a
    fault. What goes to the process at the far end goes up.
    """
    met = [(fault, end.is_far) for end in ends for fault in faults if end.meets(fault)]
    held = {
        {"up": "down", "down": "up"}[direction] if is_far else direction
        for fault, is_far in met
        for direction in HELD.get(fault.kind, ())
    }
    here = [fault for fault, _ in met]
    rates = [fault.bytes_per_s for fault in here if fault.bytes_per_s is not None]
    if cap is not None:
        rates.append(cap)
    return Weather(
        hold=frozenset(held),  # type: ignore[arg-type] # the two directions
        refuse=any(fault.kind == "refuse" for fault in here),
        bytes_per_s=min(rates, default=None),
        delay_s=max((fault.delay_s for fault in here), default=0.0),
    )
