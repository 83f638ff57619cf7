"""What examples/async_grpo.py and examples/async_grpo_sync.py share beside the task: the processes
of the rollouts, the steps of the trainer, and what is told and drawn of them.
"""

import argparse
import multiprocessing
import signal
import statistics
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Self
from xml.sax.saxutils import escape

import torch

from examples.grpo import Group
from tensorhub import Stamp

PATIENCE_S = 120.0

# --------------------------------------------------------------------------------------------------
# the rollouts' processes

Stall = tuple[float, dict[str, float]]  # seconds of an update, and of its phases
Rollout = Callable[[str, str, Connection], None]  # its name, the coordinator's address, its pipe


@dataclass
class Batch:
    groups: list[Group]
    stalls: list[Stall]  # since the batch before


def hand_over(pipe: Connection, batch: Batch) -> bool:
    """Send a batch to the trainer as soon as it has taken the one before; False: it has ended."""
    try:
        pipe.recv()
        pipe.send(batch)
    except (EOFError, OSError):
        return False
    return True


def _child(rollout: Rollout, name: str, address: str, pipe: Connection, seed: int) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # it ends with its pipe
    torch.set_num_threads(1)
    torch.manual_seed(seed)
    rollout(name, address, pipe)


class Rollouts:
    """Processes of rollouts, each with a pipe to this one. One that dies is started again."""

    def __init__(self, rollout: Rollout, address: str, names: Iterable[str], seed: int) -> None:
        self._rollout, self._address, self._seed = rollout, address, seed
        self._running: dict[str, tuple[multiprocessing.process.BaseProcess, Connection]] = {}
        self._silent = set[str]()  # no batch came from it since it was started
        self.away = set[str]()  # died, and has sent no batch since
        self._news = list[str]()
        for name in names:
            self._start(name)

    def _start(self, name: str) -> None:
        self._seed += 1
        ours, its = multiprocessing.Pipe()
        arguments = (self._rollout, name, self._address, its, self._seed)
        process = multiprocessing.get_context("spawn").Process(target=_child, args=arguments)
        process.start()
        its.close()  # so that the pipe ends with the process
        ours.send("the first batch may come")
        self._running[name] = process, ours
        self._silent.add(name)

    def kill(self, name: str) -> None:
        self._running[name][0].kill()  # SIGKILL; `take` will notice that its pipe has ended
        self.away.add(name)
        self._news.append(f"{name} killed")

    def news(self) -> list[str]:
        """What has happened since the last call."""
        told, self._news = self._news, []
        return told

    def take(self) -> list[tuple[str, Batch]]:
        """The batches that are there; waits for one. RuntimeError: a rollout ended before its first
        batch. TimeoutError: none came.
        """
        names = {pipe: name for name, (_, pipe) in self._running.items()}
        ready = wait(list(names), PATIENCE_S)
        if not ready:
            raise TimeoutError(f"no rollout has sent a batch for {PATIENCE_S:.0f} s")
        found = []
        for pipe in ready:
            assert isinstance(pipe, Connection)
            name = names[pipe]
            try:
                found.append((name, pipe.recv()))
                pipe.send("the next batch may come")
            except (EOFError, OSError):
                self._end(name)
                if name in self._silent:
                    raise RuntimeError(f"{name} ended before its first batch") from None
                self._start(name)
                self.away.add(name)
                continue
            if name in self.away & self._silent:
                self.away.remove(name)
                self._news.append(f"{name} back")
            self._silent.discard(name)
        return found

    def _end(self, name: str) -> None:
        process, pipe = self._running.pop(name)
        pipe.close()  # it notices, and leaves
        process.join(10)
        process.kill()
        process.join()
        process.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for name in [*self._running]:
            self._end(name)


# --------------------------------------------------------------------------------------------------
# what came of it


@dataclass
class Step:
    """One step of the trainer; step N makes version N + 1 of version N."""

    number: int
    groups: list[Group] = field(default_factory=list)
    ages: list[int] = field(default_factory=list)  # versions that each group is behind the trainer
    refused: int = 0  # groups that were too old
    rollouts: set[str] = field(default_factory=set)  # that made the groups
    stalls: list[Stall] = field(default_factory=list)
    reward: float = 0.0
    news: list[str] = field(default_factory=list)

    def admit(self, name: str, batch: Batch, recent: Mapping[str, int]) -> None:
        """Take the samples of recent versions alone. `recent`: the numbers of these versions, by
        content id. (A number is not enough: after a rollback it is used again.)
        """
        self.stalls += batch.stalls
        for group in batch.groups:
            version = recent.get(Stamp.parse(group.stamp).content_id)
            if version is None:
                self.refused += 1
            else:
                self.groups.append(group)
                self.ages.append(self.number - version)
                self.rollouts.add(name)

    def __str__(self) -> str:
        longest = max((seconds for seconds, _ in self.stalls), default=0.0)
        told = [
            f"step {self.number:3}: reward {self.reward:.2f}",
            f"{len(self.groups)} groups from {len(self.rollouts)} of the rollouts",
            f"{min(self.ages)} to {max(self.ages)} versions old",
            f"{self.refused} refused",
            f"longest update {longest * 1e3:.0f} ms",
            *self.news,
        ]
        return "; ".join(told)


def tell(log: Sequence[Step], plot: str) -> None:
    """Print what came of the run, and draw it."""
    tenth = max(1, len(log) // 10)
    first, last = (
        statistics.mean(step.reward for step in part) for part in (log[:tenth], log[-tenth:])
    )
    print(f"reward: {first:.2f} in the first tenth of the steps, {last:.2f} in the last tenth")
    ages = Counter(age for step in log for age in step.ages)
    told = ", ".join(f"{ages[age]} groups {age} versions old" for age in sorted(ages))
    print(f"staleness: {told}; {sum(step.refused for step in log)} groups refused")
    seconds, phases = list[float](), Counter[str]()
    for step in log:
        for stall, of_phases in step.stalls:
            seconds.append(stall)
            phases.update(of_phases)
    of_all = ", ".join(f"{name} {part / sum(seconds):.0%}" for name, part in phases.most_common())
    median_ms, longest_ms = statistics.median(seconds) * 1e3, max(seconds) * 1e3
    print(f"stalls: {len(seconds)} updates, median {median_ms:.1f} ms, longest {longest_ms:.1f} ms")
    print(f"of all stalls: {of_all}")
    Path(plot).write_text(drawn(log), encoding="utf-8")
    print(f"drawn in {plot}")


def drawn(log: Sequence[Step]) -> str:
    """The run as an SVG: reward, age of the oldest samples, and stalls, by step."""
    numbers = [step.number for step in log]
    longest_ms = [max((s for s, _ in step.stalls), default=0.0) * 1e3 for step in log]
    curves = [
        ("mean reward", [step.reward for step in log], 1.0),
        ("oldest sample, versions", [float(max(step.ages)) for step in log], 0.0),
        ("longest update, ms", longest_ms, 0.0),
    ]
    parts = []
    for place, (title, values, least_top) in enumerate(curves):
        top, bottom = max(least_top, *values) or 1.0, 170 + 170 * place
        points = " ".join(
            f"{60 + 620 * number / numbers[-1]:.1f},{bottom - 120 * value / top:.1f}"
            for number, value in zip(numbers, values, strict=True)
        )
        parts += [
            f'<text x="60" y="{bottom - 130}">{title}</text>',
            f'<text x="52" y="{bottom - 112}" text-anchor="end">{top:.3g}</text>',
            f'<text x="52" y="{bottom}" text-anchor="end">0</text>',
            f'<path d="M60 {bottom - 120}V{bottom}H680" stroke="#999"/>',
            f'<polyline points="{points}" stroke="#06c"/>',
        ]
    for step in log:
        x = 60 + 620 * step.number / numbers[-1]
        for text in step.news:
            parts += [
                f'<path d="M{x:.1f} 30V510" stroke="#c00" stroke-dasharray="4"/>',
                f'<text x="{x + 3:.1f}" y="{26 if "back" in text else 14}">{escape(text)}</text>',
            ]
    parts.append(f'<text x="680" y="528" text-anchor="end">step {numbers[-1]}</text>')
    return (
        '<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 760 540" fill="none" '
        'font-family="sans-serif" font-size="12"><rect width="760" height="540" fill="#fff"/>'
        "<style>text{fill:#333}</style>" + "".join(parts) + "</svg>\n"
    )


def arguments(plot: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--plot", default=plot, metavar="SVG")
    parser.add_argument("--bound", type=int, default=2, help="versions that a sample may be behind")
    return parser.parse_args()
