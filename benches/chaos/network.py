"""The processes' addresses over loopback, and the faults on the ways between them, by relays.

Each process has a loopback address of its own, named after the run's process id, so that ports are
fixed and meet nobody. A worker reaches the coordinator through its own control path, and its
readers reach it through its own data path (`Options.advertise`).
"""

from __future__ import annotations

import os
import threading
from collections.abc import Mapping, Sequence
from typing import Any, Final, Protocol, Self

from benches.chaos.plan import KINDS, Fault
from benches.chaos.relay import Path, Relay, Weather

PORT: Final = 7000
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
    coordinator: tuple[str, int]  # where the coordinator listens

    @property
    def bytes_passed(self) -> int: ...
    @property
    def failure(self) -> BaseException | None: ...
    def prefix(self, name: str) -> list[str]: ...
    def location(self, name: str) -> str | None: ...
    def address(self, name: str) -> str: ...
    def options(self, name: str) -> dict[str, Any]: ...
    def cap(self, bits_per_s: float) -> None: ...
    def begin(self, fault: Fault) -> None: ...
    def end(self, fault: Fault) -> None: ...
    def heal(self) -> None: ...


class Relays:
    """What stands between the processes, as relays; ends with its `with` block."""

    kinds: Sequence[str] = tuple(KINDS)

    def __init__(self, workers: Sequence[str]) -> None:
        self._relay = Relay()
        self._workers = {name: number for number, name in enumerate(workers, 1)}
        self._paths: dict[str, dict[str, Path]] = {}  # by process, by plane
        self._faults: dict[str, list[Fault]] = {name: [] for name in workers}
        self._lock = threading.Lock()
        self._cap: float | None = None
        self.coordinator = (self._host(200), PORT)

    def __enter__(self) -> Self:
        self._relay.__enter__()
        for name, number in self._workers.items():
            self._paths[name] = {
                "control": self._relay.add((self._host(number), PORT), self.coordinator),
                "data": self._relay.add(
                    (self._host(number), PORT + 1), (self._host(number), PORT + 2)
                ),
            }
        return self

    def __exit__(self, *stack: object) -> None:
        self._relay.__exit__(*stack)

    @staticmethod
    def _host(number: int) -> str:
        return f"127.{100 + os.getpid() % 100}.{os.getpid() // 100 % 250}.{number}"

    @property
    def bytes_passed(self) -> int:
        return sum(path.bytes_passed for paths in self._paths.values() for path in paths.values())

    @property
    def failure(self) -> BaseException | None:
        return self._relay.failure

    def prefix(self, name: str) -> list[str]:
        """What runs a command where this process is."""
        return []

    def location(self, name: str) -> str | None:
        return None

    def address(self, name: str) -> str:
        """Where this worker reaches the coordinator."""
        return f"tcp://{self._host(self._workers[name])}:{PORT}"

    def options(self, name: str) -> dict[str, Any]:
        """Where it listens for its readers, and what they are told."""
        host = self._host(self._workers[name])
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
            self._faults[fault.process].append(fault)
            self._set(fault.process)
            if fault.kind == "refuse":
                for path in self._concerned(fault):
                    path.cut(reset=True)

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

    def _concerned(self, fault: Fault) -> list[Path]:
        return [
            path
            for plane, path in self._paths[fault.process].items()
            if fault.plane in (plane, "both")
        ]

    def _set(self, name: str) -> None:
        for plane, path in self._paths[name].items():
            path.set(weather(self._faults[name], plane, self._cap))


def weather(faults: Sequence[Fault], plane: str, cap: float | None = None) -> Weather:
    """What faults of one process together make of its path of that plane. `cap`: bytes per second
    of a data path without a fault.

    The process is at the near end of its control path, and at the far end of its data path: there
    what goes to it goes up.
    """
    here = [fault for fault in faults if fault.plane in (plane, "both")]
    held = {direction for fault in here for direction in HELD.get(fault.kind, ())}
    if plane == "data":
        held = {"up" if direction == "down" else "down" for direction in held}
    rates = [fault.bytes_per_s for fault in here if fault.bytes_per_s is not None]
    if plane == "data" and cap is not None:
        rates.append(cap)
    return Weather(
        hold=frozenset(held),  # type: ignore[arg-type] # the two directions
        refuse=any(fault.kind == "refuse" for fault in here),
        bytes_per_s=min(rates, default=None),
        delay_s=max((fault.delay_s for fault in here), default=0.0),
    )
