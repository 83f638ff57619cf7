"""`tensorhub bench --cluster RANK/SIZE`: links between machines by bare sockets, then TensorHub over
those links.

Each machine runs the same command with a rank of its own. Rank 0 is the source of all weights; it
orders each step, and reports. The ranks talk through the cluster itself: each has a model, whose
versions are its lines. The report names no machine, address or secret: machines have their ranks.
"""

from __future__ import annotations

import contextlib
import json
import re
import secrets
import statistics
import sys
from collections.abc import Awaitable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import anyio
import torch

import tensorhub
from tensorhub.cli.common import FAILED, usage
from tensorhub.errors import ProtocolError, TensorHubError, VersionUnavailable

from .cluster_report import Found
from .party import LANES, MEETING, Party, Wanted, cpu_s, host_of, machine, scrubbed

LINE_BYTES = 2**16
MEET_S = 900.0  # until each machine's command runs, and for rank 0 between two steps
FAREWELL_S = 5.0
PROBE_MIB = 64
COPY_S = 10.0  # that one copy may take, by what the slowest link gave
RANKS_MAX = 64
BROKEN_OFF = "the rest"


class StepFailed(Exception):
    """A step failed on some rank; the text says where and why."""


class RankGone(StepFailed):
    """A rank does not answer: the run is broken off."""


def rank_and_size(text: str) -> tuple[int, int]:
    """Of "0/4"; a usage error if it is none."""
    match = re.fullmatch(r"(\d{1,3})/(\d{1,3})", text)
    rank, size = (int(match[1]), int(match[2])) if match else (0, 0)
    if not (2 <= size <= RANKS_MAX and rank < size):
        raise usage(
            f"--cluster {text[:40]!r}: give RANK/SIZE, as 0/4 on the first of four machines and 3/4 "
            f"on the last one (2 to {RANKS_MAX} machines)"
        )
    return rank, size


# --------------------------------------------------------------------------------------------------
# what the ranks say to each other


class Lines:
    """Lines of JSON, as versions of one model per rank."""

    def __init__(self, hub: tensorhub.Hub, run: str, rank: int) -> None:
        self._hub, self._run, self._rank = hub, run, rank
        self._memory = torch.zeros(LINE_BYTES, dtype=torch.uint8)
        self._weights: tensorhub.Weights | None = None
        self._said = 0

    def model(self, rank: int) -> str:
        return f"{MEETING}/{self._run}/{rank}"

    async def say(self, line: object, model: str | None = None, number: int | None = None) -> None:
        """Publish a line, under this rank's model or another one; the last line stays readable."""
        text = json.dumps(line).encode()
        if len(text) > LINE_BYTES:
            raise StepFailed(f"a line has {len(text)} bytes")
        if self._weights is None:
            self._weights = await self._hub.register(
                model or self.model(self._rank), {"line": self._memory}
            )
        self._said = number or self._said + 1
        async with self._weights.mutate(self._said):
            self._memory.copy_(
                torch.frombuffer(bytearray(text.ljust(LINE_BYTES)), dtype=torch.uint8)
            )

    async def heard(self, rank: int, number: int, timeout_s: float) -> None:
        """Wait until the rank has said the line of that number."""
        await self._hub.wait_for(self.model(rank), at_least=number, timeout=timeout_s)

    async def hear(self, rank: int, number: int, timeout_s: float) -> Any:
        """The line of that number, once the rank has said it."""
        await self.heard(rank, number, timeout_s)
        return await _line_of(self._hub, self.model(rank), number, timeout_s)


async def _line_of(hub: tensorhub.Hub, name: str, version: int | str, timeout_s: float) -> Any:
    memory = torch.zeros(LINE_BYTES, dtype=torch.uint8)  # a longer line is refused
    weights = await hub.register(name, {"line": memory}, spot=True)
    try:
        await weights.update(version, timeout=timeout_s)
    finally:
        await weights.close(abandon=True)
    try:
        return _printable(json.loads(bytes(memory.numpy())))
    except (ValueError, RecursionError) as error:
        raise ProtocolError(f"{name} says no line of JSON") from error


def _printable(value: Any) -> Any:
    """A rank's line, as it may come to a terminal."""
    match value:
        case str():
            return "".join(each if each.isprintable() else "?" for each in value)
        case list():
            return [_printable(each) for each in value]
        case dict():
            return {_printable(key): _printable(each) for key, each in value.items()}
    return value


# --------------------------------------------------------------------------------------------------
# the run


async def run(wanted: Wanted) -> int:
    """Take part as this rank; the exit code."""
    async with wanted.connect(name=f"bench-{wanted.rank}-lines") as hub:
        if wanted.rank:
            return await _obey(wanted, hub)
        newest = 0
        with contextlib.suppress(VersionUnavailable):
            info = await hub.describe(MEETING, limit=0)
            newest = info.mark or 0
            if any(version.state == "available" for version in info.versions):
                raise usage("--cluster: another rank 0 runs in this cluster; stop it first")
        name = secrets.token_hex(4)
        plan = {"run": name, "size": wanted.size}
        meeting = Lines(hub, name, 0)
        await meeting.say(plan, MEETING, newest + 1)
        host = await host_of(hub, MEETING)
        bench = Bench(wanted, Lines(hub, name, 0), Party(wanted, name, host), host)
        return await bench.run()


async def _obey(wanted: Wanted, hub: tensorhub.Hub) -> int:
    _tell(wanted, "waiting for rank 0")
    plan = await _line_of(hub, MEETING, "available", MEET_S)
    match plan:
        case {"run": str() as run, "size": int() as size}:
            pass
        case _:
            raise ProtocolError("rank 0 says no plan")
    if size != wanted.size:
        raise usage(f"--cluster: rank 0 says that there are {size} machines, not {wanted.size}")
    lines = Lines(hub, run, wanted.rank)
    await lines.say({})
    host = await host_of(hub, lines.model(wanted.rank))
    party = Party(wanted, run, host)
    await lines.say({"host": host, "machine": machine(host)})
    number = 0
    try:
        while True:
            number += 1
            parts = await lines.hear(0, number, MEET_S)
            if parts is None:
                await lines.say({})
                return 0
            try:
                step = parts.get(str(wanted.rank), [])
                done = await party.do(*step) if step else {}
            except (AttributeError, TypeError):
                raise ProtocolError("rank 0 says what is no step") from None
            await lines.say(done)
    finally:
        party.stop_listening()
        with anyio.move_on_after(FAREWELL_S, shield=True):
            await party.close()


def _tell(wanted: Wanted, text: str) -> None:
    if not wanted.quiet:
        print(text, file=sys.stderr, flush=True)


@dataclass
class Bench:
    """Rank 0: what is measured, in which order, and what has come of it."""

    wanted: Wanted
    lines: Lines
    party: Party
    host: str
    number: int = 0  # of the last step
    hosts: dict[int, str] = field(default_factory=dict)
    found: Found = field(default_factory=Found)

    async def run(self) -> int:
        try:
            await self._meet()
            await self._measure()
        except StepFailed as error:
            self.found.reasons[BROKEN_OFF] = str(error)
        finally:
            self.party.stop_listening()
            with anyio.move_on_after(FAREWELL_S, shield=True), contextlib.suppress(TensorHubError):
                await self.party.close()
                await self.lines.say(None)
                for rank in range(1, len(self.found.machines)):
                    await self.lines.heard(rank, self.number + 3, FAREWELL_S)
            self._report()
        return FAILED if BROKEN_OFF in self.found.reasons or not self.found.copies else 0

    async def _meet(self) -> None:
        self.hosts[0] = self.host
        self.found.machines.append(machine(self.host))
        for rank in range(1, self.wanted.size):
            _tell(self.wanted, f"waiting for rank {rank} of {self.wanted.size}")
            try:
                hello = await self.lines.hear(rank, 2, MEET_S)
            except TensorHubError as error:
                raise StepFailed(f"rank {rank} has not come: {scrubbed(str(error))}") from None
            match hello:
                case {
                    "host": str() as host,
                    "machine": {"loopback": bool(), "transports": dict()} as facts,
                }:
                    self.hosts[rank] = host
                    self.found.machines.append(facts)
                case _:
                    raise StepFailed(f"rank {rank} does not say what its machine is")
        loopback = [rank for rank, each in enumerate(self.found.machines) if each["loopback"]]
        if loopback and len(loopback) < self.wanted.size:
            raise StepFailed(
                f"rank {loopback[0]} reaches the coordinator over loopback, so that no other machine "
                f"can read from it: give it the --address that the other ranks have"
            )

    async def step(self, parts: Mapping[int, Sequence[Any]]) -> dict[int, dict[str, Any]]:
        """What each of these ranks answers; StepFailed if one of them failed or is gone."""
        await self.lines.say({str(rank): part for rank, part in parts.items()})
        self.number += 1
        answers = {0: await self.party.do(*parts[0])} if 0 in parts else {}
        for rank in range(1, self.wanted.size):
            try:
                answer = await self.lines.hear(rank, self.number + 2, 3 * self.wanted.timeout_s)
            except TensorHubError as error:
                raise RankGone(f"rank {rank} is gone: {scrubbed(str(error))}") from None
            if not isinstance(answer, dict):
                raise RankGone(f"rank {rank} answers with what is no answer")
            answers |= {rank: answer} if rank in parts else {}
        failed = [
            f"rank {rank}: {each['failed']}" for rank, each in answers.items() if "failed" in each
        ]
        if failed:
            raise StepFailed("; ".join(failed))
        return answers

    async def all(self, *part: Any) -> dict[int, dict[str, Any]]:
        return await self.step(dict.fromkeys(range(self.wanted.size), part))

    async def _measure(self) -> None:
        size = self.wanted.size
        await self.all("allocate", min(self.wanted.mib, PROBE_MIB))
        pairs = [(0, to) for to in range(1, size)] + [(at, at + 1) for at in range(1, size - 1)]
        for source, reader in pairs:
            await self._guard(f"link {source} -> {reader}", self._link(source, reader))
        slowest = min((link["gbit/s"]["4"] for link in self.found.links), default=0.0)
        bound = int(slowest * 1e9 / 8 * COPY_S / (size - 1)) // 2**20
        self.found.mib = max(2, min(self.wanted.mib, bound))
        await self.all("allocate", self.found.mib)
        ways = [[to] for to in range(1, size)] + ([list(range(1, size))] if size > 2 else [])
        for number in range(1, self.wanted.rounds + 1):
            means = [*(f"bare-{lanes}" for lanes in LANES), *self._transports()]
            for mean in means[:: 1 if number % 2 else -1]:
                if mean not in self.found.reasons:
                    await self._guard(mean, self._visit(mean, ways, number))

    async def _guard(self, what: str, work: Awaitable[None]) -> None:
        """A way that fails is left out of the rest of the run, and its reason reported."""
        _tell(self.wanted, what)
        try:
            await work
        except RankGone:
            raise
        except StepFailed as error:
            self.found.reasons[what] = str(error)
            await self.all("close")

    def _transports(self) -> Iterator[str]:
        for name in self.found.machines[0]["transports"]:
            if not self.wanted.allows(name):
                continue
            faults = [
                f"rank {rank}: {fault}"
                for rank, each in enumerate(self.found.machines)
                if (fault := each["transports"].get(name, "this machine does not know it"))
            ]
            if faults:
                self.found.reasons[name] = "; ".join(faults)
            else:
                yield name

    async def _link(self, source: int, reader: int) -> None:
        ports = (await self.step({source: ["listen"]}))[source]["value"]
        where = [self.hosts[source], ports]
        answers = await self.step({source: ["echo"], reader: ["ping", *where]})
        trips = sorted(answers[reader]["value"])
        link: dict[str, Any] = {
            "from": source,
            "to": reader,
            "round trip us": {
                "median": statistics.median(trips) * 1e6,
                "p99": trips[len(trips) * 99 // 100] * 1e6,
            },
            "gbit/s": {},
        }
        gbits = min(self.wanted.mib, PROBE_MIB) * 2**20 * 8 / 1e9
        for lanes in LANES:
            done = await self.step(
                {source: ["give", 1, lanes], reader: ["take_bare", *where, lanes]}
            )
            link["gbit/s"][str(lanes)] = gbits / done[reader]["value"]
        self.found.links.append(link)

    async def _visit(self, mean: str, ways: Sequence[Sequence[int]], round_: int) -> None:
        lanes = int(mean.removeprefix("bare-")) if mean.startswith("bare-") else 0
        if lanes:
            ports = (await self.step({0: ["listen"]}))[0]["value"]
        else:
            await self.all("open", mean)
        names = {f"bench-{rank}": rank for rank in range(self.wanted.size)}
        version = (round_ - 1) * len(ways) * (self.wanted.copies + 1)  # a number is used once
        for readers in ways:
            for copy in range(self.wanted.copies + 1):  # the first one is not timed
                offered_s, version = 0.0, version + 1
                if lanes:
                    parts = {
                        0: ["give", len(readers), lanes],
                        **{to: ["take_bare", self.hosts[0], ports, lanes] for to in readers},
                    }
                else:
                    offered_s = (await self.step({0: ["publish", version]}))[0]["value"]
                    parts = {to: ["take", version, names] for to in readers}
                before_s = cpu_s()
                answers = await self.step(parts)
                done: dict[str, Any] = {
                    "round": round_,
                    "by": mean,
                    "to": readers,
                    "offered_s": offered_s,
                    "source_cpu_s": cpu_s() - before_s,
                    "reader_cpu_s": [answers[to]["cpu_s"] for to in readers],
                    "readers": [answers[to]["value"] for to in readers],
                }
                done["seconds"] = max(
                    each if lanes else each["seconds"] for each in done["readers"]
                )
                what = "sample" if copy else "digest"
                values = await self.step({rank: ["check", what] for rank in (0, *readers)})
                if len({each["value"] for each in values.values()}) > 1:
                    raise StepFailed(
                        f"copy {copy} to ranks {readers} has other bytes than the source"
                    )
                if copy:
                    self.found.copies.append(done)
        if not lanes:
            await self.all("close")

    def _report(self) -> None:
        document = json.dumps(self.found.document(), indent=None if self.wanted.as_json else 1)
        if self.wanted.results is not None:
            self.wanted.results.write_text(document + "\n")
        print(document if self.wanted.as_json else self.found.markdown(), flush=True)
