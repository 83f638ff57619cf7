"""One run: a network, a system's processes in it, and the workload's loops; what they wrote is its
result.

Every wait has a deadline, and nothing is left, however the run ends: processes end with their
input, and a network with its last process. Who comes and goes when is the scenario's
(`tensorhub.testing.flow.timetable`).
"""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, Final

from benches.child_processes import Failed, Pending, Process
from benches.comparison import environments
from benches.testbed.network import Host, Network, Wan
from benches.testbed.systems.base import Setting
from benches.testbed.ways import Way
from tensorhub.testing.flow import timetable
from tensorhub.testing.flow.scenario import Scenario, in_groups
from tensorhub.testing.flow.timetable import Presence

MODULE: Final = "benches.testbed.process"
START_S: Final = 120.0
AHEAD_S: Final = 2.0  # a process is started so long before it joins
GENERATIONS: Final = 500
TOKEN: Final = {"TENSORHUB_TOKEN": "of this run"}


@dataclass(frozen=True, slots=True)
class Result:
    """Times in `events` are seconds since the first publication was due. `floor_s`: what one copy
    takes into a rollout over its own link; `far_floor_s`: over the WAN. `cpu`, `machine`: of all
    cores, what the workers and what everything took.
    """

    way: str
    events: list[dict[str, Any]]
    floor_s: float
    far_floor_s: float | None
    wall_s: float
    cpu: float
    machine: float

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


class Run:
    def __init__(
        self, scenario: Scenario, way: Way, scratch: Path, file: Path | None = None
    ) -> None:
        """`file`: with the versions' bytes, one after the other; else they are made up."""
        self.way, self._scratch, self._file = way, scratch, file
        self._group_size = int(way.options.get("ranks", 1))
        scenario = self.scenario = in_groups(scenario, self._group_size)
        self._stack = ExitStack()
        self._log = scratch / "events.jsonl"
        self._sites = {name: hosts.site for name, hosts in timetable.rollouts(scenario)}
        self._slow = {name: hosts.slow for name, hosts in timetable.rollouts(scenario)}
        self._spot = {name for name, hosts in timetable.rollouts(scenario) if hosts.spot}
        self._lengths = {
            host: timetable.generations(scenario, name)
            for name in self._sites
            for host in self._ranks_of(name)
        }
        self._ranks = {"trainer": 0} | {name: rank for rank, name in enumerate(self._sites, 1)}
        self._hosts = {host.name: host for host in self._all_hosts()}
        # by rollout, and which of its lives it is
        self._lives: dict[tuple[str, int], tuple[Process, Pending]] = {}
        self._workers: list[Process] = []
        self._gone_cpu_s = 0.0
        self._ends: list[dict[str, Any]] = []  # events of those that could not write them
        self._life = 0

    def _all_hosts(self) -> list[Host]:
        home, mbit = self.scenario.sites[0], self.scenario.links.nic_mbit_per_s
        trainer = next(kind for kind in self.scenario.hosts if kind.role == "trainer")
        hosts = [Host(name, home, mbit / trainer.slow) for name in self._ranks_of("trainer")]
        hosts += [Host(name, home, mbit) for name in ("coordinator", "store")]
        for group, site in self._sites.items():
            hosts += [Host(name, site, mbit / self._slow[group]) for name in self._ranks_of(group)]
        seeds = [
            kind for kind in self.scenario.hosts if kind.role == "seed" for _ in range(kind.count)
        ]
        return hosts + [
            Host(f"seed-{number}", kind.site, mbit / kind.slow) for number, kind in enumerate(seeds)
        ]

    def _ranks_of(self, group: str) -> list[str]:
        """The hosts of a group, one for each rank."""
        return [group, *(f"{group}.{rank}" for rank in range(1, self._group_size))]

    def run(self) -> Result:
        links = self.scenario.links
        wan = None
        if len(self.scenario.sites) > 1:
            wan = Wan(links.wan_mbit_per_s, links.wan_round_trip_ms, seed=self.scenario.seed)
        self._wan_s = 0.0 if wan is None else self.scenario.rank_bytes * 8 / (wan.mbit * 1e6)
        with self._stack:
            self._network = self._stack.enter_context(Network(list(self._hosts.values()), wan))
            return self._run()

    # ----------------------------------------------------------------------------------------------
    # processes

    def _process(self, host: str) -> Process:
        packages = []
        if self.way.environment is not None:
            directory = environments.default_directory() / self.way.environment
            packages = [str(next(directory.glob("lib/python*/site-packages")))]
        errors = self._scratch / f"{host}.stderr"
        process = Process(
            host, MODULE, self._network.path(host), *packages, environment=TOKEN, errors=errors
        )
        self._stack.callback(process.close)
        return process

    def _join(self, process: Process, role: str, *, opens: bool = True) -> Pending:
        """Become a side of the system. `opens`: at once; a rollout that comes later does in its
        first attempt.
        """
        host = process.name
        group, _, rank = host.partition(".")
        self._life += 1
        scratch = self._scratch / f"{host}.{self._life}"
        scratch.mkdir()
        setting = Setting(
            role=role,
            name=f"{host}+{self._life}" if role == "rollout" else host,
            host=host,
            group=group,
            group_rank=int(rank or 0),
            group_size=self._group_size if role in ("trainer", "rollout") else 1,
            site=self._hosts[host].site,
            rank=self._ranks.get(host, -1),
            workers=len(self._ranks),
            nbytes=self.scenario.rank_bytes,
            chunk_bytes=self.scenario.chunk_bytes,
            wan_s=self._wan_s,
            addresses={name: self._network.address(name) for name in self._hosts},
            scratch=str(scratch),
            options={
                **self.way.options,
                "spot": host in self._spot,
                "file": "" if self._file is None else str(self._file),
            },
        )
        return process.begin(
            "join", system=self.way.module, setting=asdict(setting), log=str(self._log), opens=opens
        )

    def _servers(self) -> list[Process]:
        """What the system needs besides trainer and rollouts, but for seeds, which follow a
        trainer.
        """
        servers = [self._process(role) for role in self.way.roles if role != "seed"]
        for server in servers:
            self._join(server, server.name).result(START_S)
        return servers

    # ----------------------------------------------------------------------------------------------
    # the run

    def _run(self) -> Result:
        absent = {} if self.way.is_fixed else timetable.presences(self.scenario)
        there = [name for name in self._sites if absent.get(name, [_ALWAYS])[0].begin_s == 0.0]
        first = {host: self._process(host) for name in there for host in self._ranks_of(name)}
        trainers = [self._process(host) for host in self._ranks_of("trainer")]
        floor_s, far_floor_s = self._floors()
        servers = self._servers()
        joining = [self._join(process, "trainer") for process in trainers]
        joining += [self._join(process, "rollout") for process in first.values()]
        for pending in joining:
            pending.result(START_S)
        if "seed" in self.way.roles:
            for host in self._hosts:
                if host.startswith("seed-"):
                    servers.append(self._process(host))
                    self._join(servers[-1], "seed").result(START_S)
        self._workers = [*trainers, *first.values(), *servers]
        counted_s, cpu_s, machine_s = time.monotonic(), self._cpu_s(), _machine_s()
        began_s = counted_s + 0.5
        every_s = self.scenario.every_copies * self.scenario.copy_s
        told = {"versions": self.scenario.versions, "at_s": began_s, "every_s": every_s}
        training = [trainer.begin("train", **told) for trainer in trainers]
        for name, process in first.items():
            self._lives[name, 0] = process, self._roll(process, began_s)
        self._come_and_go(
            absent,
            began_s,
            training,
            self.scenario.versions * max(every_s, 20 * floor_s) * 3 + START_S,
        )
        for pending in training:
            pending.result(1.0)
        self._finish(every_s)
        ended_s = time.monotonic()
        cores = len(os.sched_getaffinity(0)) * (ended_s - counted_s)
        cpu, machine = (self._cpu_s() - cpu_s) / cores, (_machine_s() - machine_s) / cores
        return Result(
            self.way.name,
            self._events(began_s, ended_s),
            floor_s,
            far_floor_s,
            ended_s - began_s,
            cpu,
            machine,
        )

    def _roll(self, process: Process, at_s: float) -> Pending:
        drawn = islice(self._lengths[process.name], GENERATIONS)
        lengths = [round(seconds, 4) for seconds in drawn]
        return process.begin(
            "roll",
            generations_s=lengths,
            until=self.scenario.versions,
            pauses=self.way.pauses,
            at_s=at_s,
        )

    def _come_and_go(
        self,
        absent: Mapping[str, list[Presence]],
        began_s: float,
        training: Sequence[Pending],
        limit_s: float,
    ) -> None:
        """Do what is due, until the trainer has published all."""
        due: list[tuple[float, Callable[[], None]]] = []
        for name, presences in absent.items():
            for number, each in enumerate(presences):
                life = name, number
                if each.begin_s > 0.0:
                    due.append(
                        (
                            each.begin_s - AHEAD_S,
                            partial(self._come, life, began_s + each.begin_s),
                        )
                    )
                if each.notice_s is not None:
                    due.append((each.notice_s, lambda life=life: self._notice(life)))  # type: ignore[misc]
                due.append((each.end_s, lambda life=life: self._go(life)))  # type: ignore[misc]
        due.sort(key=lambda each: each[0])
        while not all(pending.is_over for pending in training):
            now_s = time.monotonic() - began_s
            if now_s > limit_s:
                raise TimeoutError(
                    f"{self.way.name}: the trainer has not published everything after {now_s:.0f} s"
                )
            self._check()
            while due and due[0][0] <= now_s:
                due.pop(0)[1]()
            time.sleep(0.02)

    def _check(self) -> None:
        """A rollout whose loop has failed ends the run."""
        for (name, _), (_, pending) in self._lives.items():
            if pending.is_over:
                try:
                    pending.result(1.0)
                except Failed as failed:
                    raise RuntimeError(f"{self.way.name}: {name}: {failed}") from failed

    def _come(self, life: tuple[str, int], at_s: float) -> None:
        process = self._process(life[0])
        self._join(process, "rollout", opens=False)
        self._workers.append(process)
        self._lives[life] = process, self._roll(process, at_s)

    def _notice(self, life: tuple[str, int]) -> None:
        self._lives[life][0].begin("leave")

    def _go(self, life: tuple[str, int]) -> None:
        process, _ = self._lives.pop(life)
        self._workers.remove(process)
        self._gone_cpu_s += _cpu_s(process.pid)
        process.kill()
        self._ends.append({"who": life[0], "kind": "gone", "began_s": time.monotonic()})

    def _finish(self, every_s: float) -> None:
        """The last version has as long as any other; a fixed group has it already."""
        deadline_s = time.monotonic() + every_s
        while time.monotonic() < deadline_s and not all(
            pending.is_over for _, pending in self._lives.values()
        ):
            self._check()
            time.sleep(0.02)

    def _floors(self) -> tuple[float, float | None]:
        """Seconds of one copy over one link, and over the WAN: plain sockets, the least of
        several.
        """
        home = self._hosts["trainer"].site
        fastest_first = sorted(self._sites, key=self._slow.__getitem__)
        away = [name for name in fastest_first if self._sites[name] != home]
        near = [name for name in fastest_first if self._sites[name] == home]
        pair = ("trainer", near[0]) if near else (away[0], away[1] if len(away) > 1 else away[0])
        return self._floor(*pair, 3), self._floor("trainer", away[0], 2) if away else None

    def _floor(self, sender: str, receiver: str, count: int) -> float:
        """Of processes of their own, which end with it."""
        with contextlib.ExitStack() as stack:
            ends = [
                Process(name, MODULE, self._network.path(name), environment=TOKEN)
                for name in (sender, receiver)
            ]
            for process in ends:
                stack.callback(process.close)
            where = {
                "host": self._network.address(sender),
                "nbytes": self.scenario.rank_bytes,
                "count": count,
            }
            sending, receiving = (
                ends[0].begin("probe_send", **where),
                ends[1].begin("probe_receive", **where),
            )
            seconds = receiving.result(START_S)
            sending.result(START_S)
        return float(min(seconds))

    def _cpu_s(self) -> float:
        """What the processes have used that are there, and those that have gone."""
        return self._gone_cpu_s + sum(_cpu_s(process.pid) for process in self._workers)

    def _events(self, began_s: float, ended_s: float) -> list[dict[str, Any]]:
        events = [json.loads(line) for line in self._log.read_text().splitlines()] + self._ends
        for event in events:
            for name in ("began_s", "ended_s"):
                if name in event:
                    event[name] -= began_s
        ends = {"who": "", "kind": "end", "began_s": ended_s - began_s}
        return [*sorted(events, key=lambda event: float(event["began_s"])), ends]


_ALWAYS: Final = Presence(0.0, float("inf"), None)


def _cpu_s(pid: int) -> float:
    with contextlib.suppress(FileNotFoundError):
        user, system = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[11:13]
        return (int(user) + int(system)) / os.sysconf("SC_CLK_TCK")
    return 0.0


def _machine_s() -> float:
    """CPU seconds that all of the machine has worked."""
    user, nice, system, _, _, irq, softirq, *_ = map(
        int, Path("/proc/stat").read_text().split("\n")[0].split()[1:]
    )
    return (user + nice + system + irq + softirq) / os.sysconf("SC_CLK_TCK")
