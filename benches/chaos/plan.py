"""Which fault comes when to whom: a function of the seed, the length and the processes' names
alone.

What then happens is up to the kernel.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from random import Random
from typing import Final

GAP_S: Final = 1.8  # between faults, on average

# What happens how often (weights), and for how long (seconds, from and to).
KINDS: Final[Mapping[str, tuple[int, float, float]]] = {
    "kill": (16, 0.2, 5.0),  # SIGKILL; a new process after so long
    "stop": (10, 0.2, 2.0),  # SIGSTOP, shorter than a lease
    "freeze": (6, 4.0, 9.0),  # SIGSTOP, longer than a lease
    "cut": (10, 0.0, 0.0),  # connections end in mid-frame: reset, or ended
    "partition": (9, 0.5, 8.0),  # nothing passes, either way
    "deaf": (4, 0.5, 8.0),  # nothing passes to the process
    "mute": (4, 0.5, 8.0),  # nothing passes from the process
    "refuse": (4, 0.5, 6.0),  # connections are reset, and so are new ones
    "slow": (8, 2.0, 10.0),
    "delay": (6, 2.0, 10.0),
}
PROCESS_KINDS: Final = ("kill", "stop", "freeze")
PLANES: Final = ("control", "data", "both")


@dataclass(frozen=True, slots=True)
class Fault:
    """One fault: `plane` of a process's connections ("both" for what concerns itself); rate and
    delay where they apply.
    """

    at_s: float
    kind: str
    process: str
    duration_s: float
    plane: str = "both"
    bytes_per_s: float | None = None
    delay_s: float = 0.0
    reset: bool = True

    def __str__(self) -> str:
        extra = [f"for {self.duration_s:.1f} s"] if self.duration_s else []
        if self.kind not in PROCESS_KINDS:
            extra.append(self.plane)
        if self.kind == "slow" and self.bytes_per_s is not None:
            extra.append(f"{self.bytes_per_s / 1024:.0f} KiB/s")
        if self.kind == "delay":
            extra.append(f"{self.delay_s * 1000:.0f} ms")
        if self.kind == "cut":
            extra.append("reset" if self.reset else "ended")
        return f"{self.at_s:7.2f} s  {self.kind} {self.process}, {', '.join(extra)}"


def draw(
    seed: int, seconds: float, processes: Sequence[str], kinds: Sequence[str] = tuple(KINDS)
) -> list[Fault]:
    """The faults of a run, in order. `processes`: the coordinators, the workers, members of etcd."""
    chance = Random(f"chaos {seed}")
    faults, at_s = list[Fault](), 0.0
    while True:
        at_s += min(chance.expovariate(1 / GAP_S), 4 * GAP_S)
        if at_s >= seconds:
            return faults
        faults.append(_one(chance, at_s, processes, kinds))


def _one(chance: Random, at_s: float, processes: Sequence[str], kinds: Sequence[str]) -> Fault:
    process = chance.choice(processes)
    # A coordinator without a standby has one listener, behind everybody's control path: only what
    # concerns its process is drawn for it, and for a member of etcd.
    usable = (
        [kind for kind in kinds if kind in PROCESS_KINDS]
        if process == "coordinator" or process.startswith("etcd")
        else list(kinds)
    )
    [kind] = chance.choices(usable, [KINDS[kind][0] for kind in usable])
    _, least, most = KINDS[kind]
    duration_s = round(chance.uniform(least, most), 2)
    plane = chance.choice(PLANES)
    if kind in PROCESS_KINDS:
        return Fault(round(at_s, 2), kind, process, duration_s)
    if kind == "slow":  # the control plane's few messages need no rate to be slow
        rate = (
            chance.choice((64, 256, 1024)) * 1024.0
            if plane == "data"
            else 16 * 1024.0 * chance.choice((1, 4, 16))
        )
        return Fault(round(at_s, 2), kind, process, duration_s, plane, bytes_per_s=rate)
    if kind == "delay":
        return Fault(
            round(at_s, 2),
            kind,
            process,
            duration_s,
            plane,
            delay_s=round(chance.uniform(0.005, 0.4), 3),
        )
    return Fault(round(at_s, 2), kind, process, duration_s, plane, reset=chance.random() < 0.5)
