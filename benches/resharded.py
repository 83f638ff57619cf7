"""Readers of another layout against readers of the same one: the same bytes, processes and
transports, in turns.

Four ranks of a trainer hold a model cut by rows, as FSDP2 does, and two ranks of a rollout read it:

    same            two of the trainer's ranks hold just what the rollout's two hold: replication, chunk by chunk
    rows            cut by rows, too: each rollout rank takes all of two trainer ranks (runs of whole tensors)
    columns 64 KiB  cut by columns: each rollout rank takes a half of each row of all four, runs of 64 KiB
    columns 4 KiB   the same with shorter rows, runs of 4 KiB
    columns 512 B   the same again

All models are of the same size. Each copy is of a new version, whose digests the publisher makes in
the time; with `--plain` chunks have no digests. The time is from the first rank's start to the last
one's end. Every copy is checked by samples, the first of each kind whole.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import time
from contextlib import AsyncExitStack
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import anyio
import anyio.to_thread
import torch

import tensorhub
from benches.comparison.facts import facts
from benches.one_to_n import spread
from benches.remotes import Commands, Remote, obey
from benches.workers import call_in_thread, coordinator_main, cpu_seconds

SOURCES, READERS = 4, 2
TENSORS = 4
MIB = 2**20


@dataclass(frozen=True, slots=True)
class Case:
    """`row_bytes`: of the global tensors. `by_columns`: how the readers cut them."""

    name: str
    row_bytes: int
    by_columns: bool

    def rows(self, nbytes: int) -> int:
        """Of each of the tensors, which have `nbytes` together."""
        rows = nbytes // TENSORS // self.row_bytes
        return rows - rows % (SOURCES * READERS)


SAME = Case("same", 2**17, by_columns=False)
CASES = (
    SAME,
    Case("rows", 2**17, by_columns=False),
    Case("columns 64 KiB", 2**17, by_columns=True),
    Case("columns 4 KiB", 2**13, by_columns=True),
    Case("columns 512 B", 2**10, by_columns=True),
)


def _content(case: Case, nbytes: int, tensor: int, device: str) -> torch.Tensor:
    """One global tensor, as version 0 has it."""
    rows = (torch.arange(case.rows(nbytes), device=device) * 31 % 251).to(torch.int16)
    columns = (torch.arange(case.row_bytes, device=device) * 7 % 251 + tensor).to(torch.int16)
    return ((rows.unsqueeze(1) + columns.unsqueeze(0)) % 251).to(torch.uint8)


# -----------------------------------------------------------------------------------------------
# inside the processes


@dataclass(frozen=True, slots=True)
class Setting:
    """What all of its processes are told."""

    address: str
    nbytes: int
    transport: str
    device: str
    plain: bool

    def connect(self, name: str) -> contextlib.AbstractAsyncContextManager[tensorhub.Hub]:
        options = tensorhub.Options(integrity=not self.plain)
        return tensorhub.connect(
            self.address, name=name, transports=(self.transport,), options=options
        )


def source_main(pipe: Connection, setting: Setting, rank: int) -> None:
    anyio.run(_source, pipe, setting, rank)


def reader_main(pipe: Connection, setting: Setting, rank: int) -> None:
    anyio.run(_reader, pipe, setting, rank)


async def _source(pipe: Connection, setting: Setting, rank: int) -> None:
    torch.set_num_threads(1)
    async with setting.connect(f"source-{rank}") as hub:
        handles: dict[str, tensorhub.Weights] = {}
        held: dict[str, list[torch.Tensor]] = {}
        for case in CASES:
            ranks = READERS if case is SAME else SOURCES
            if rank >= ranks:
                continue
            tensors, sources = {}, {}
            for number in range(TENSORS):
                whole = _content(case, setting.nbytes, number, setting.device)
                step = whole.shape[0] // ranks
                rows = slice(rank * step, (rank + 1) * step)
                tensors[f"w{number}"] = whole[rows].clone()
                sources[f"w{number}"] = tensorhub.source(f"w{number}", shape=tuple(whole.shape))[
                    rows
                ]
            if setting.transport == "shm":
                shared = tensorhub.shared_empty_like(tensors)
                for name, tensor in tensors.items():
                    shared[name].copy_(tensor)
                tensors = shared
            held[case.name] = list(tensors.values())
            handles[case.name] = await hub.register(
                case.name,
                tensors,
                group="trainer",
                rank=rank,
                world_size=ranks,
                sources=None if case is SAME else sources,
            )

        async def publish(case: str, version: int) -> None:
            if case in handles:
                for tensor in held[case]:  # every byte is another one, as after a step
                    await anyio.to_thread.run_sync(tensor.add_, 1)
                await handles[case].publish(version)

        async def unpublish(case: str) -> None:
            if case in handles:
                await handles[case].unpublish()

        pipe.send((True, None))
        await obey(
            pipe, {"publish": publish, "unpublish": unpublish, "cpu": call_in_thread(cpu_seconds)}
        )


async def _reader(pipe: Connection, setting: Setting, rank: int) -> None:
    torch.set_num_threads(1)
    async with AsyncExitStack() as stack:
        hub = await stack.enter_async_context(setting.connect(f"reader-{rank}"))
        handles: dict[str, tensorhub.Weights] = {}
        held: dict[str, dict[str, torch.Tensor]] = {}
        parts: dict[str, tuple[slice, slice]] = {}
        for case in CASES:
            tensors, sources = {}, {}
            rows, columns = case.rows(setting.nbytes), case.row_bytes
            every = slice(0, rows), slice(0, columns)
            if case.by_columns:
                part = every[0], slice(rank * columns // READERS, (rank + 1) * columns // READERS)
            else:
                part = slice(rank * rows // READERS, (rank + 1) * rows // READERS), every[1]
            shape = tuple(its.stop - its.start for its in part)
            for number in range(TENSORS):
                tensors[f"w{number}"] = torch.zeros(shape, dtype=torch.uint8, device=setting.device)
                sources[f"w{number}"] = tensorhub.source(f"w{number}")[part]
            held[case.name], parts[case.name] = tensors, part
            handles[case.name] = await hub.register(
                case.name,
                tensors,
                group="rollout",
                rank=rank,
                world_size=READERS,
                sources=None if case is SAME else sources,
            )

        async def fetch(case: str, version: int) -> tuple[float, float]:
            start = time.monotonic()
            await handles[case].replicate(version)
            return start, time.monotonic()

        def is_right(name: str, version: int, whole: bool) -> bool:
            case = next(each for each in CASES if each.name == name)
            for number, tensor in enumerate(held[name].values()):
                expected = (
                    _content(case, setting.nbytes, number, setting.device)[parts[name]]
                    if whole
                    else None
                )
                if expected is not None:
                    if not tensor.equal(expected.add(version)):
                        return False
                    continue
                for row, column in ((0, 0), (tensor.shape[0] // 3, tensor.shape[1] // 2), (-1, -1)):
                    at = (
                        range(parts[name][0].start, parts[name][0].stop)[row],
                        range(*parts[name][1].indices(2**40))[column],
                    )
                    value = ((at[0] * 31 % 251) + (at[1] * 7 % 251) + number) % 251
                    if int(tensor[row, column]) != (value + version) % 256:
                        return False
            return True

        async def unpublish(case: str) -> None:
            await handles[case].unpublish()

        pipe.send((True, None))
        commands: Commands = {"fetch": fetch, "unpublish": unpublish}
        commands |= {"is_right": call_in_thread(is_right), "cpu": call_in_thread(cpu_seconds)}
        await obey(pipe, commands)


# --------------------------------------------------------------------------------------------------
# the benchmark


class Cluster:
    """The processes, and one copy at a time between them."""

    def __init__(self, mib: int, transport: str, device: str, *, plain: bool) -> None:
        self._versions = {case.name: 0 for case in CASES}
        self._coordinator = Remote("coordinator", coordinator_main)
        setting = Setting(self._coordinator.hear(), mib * MIB, transport, device, plain)
        self._sources = [Remote(f"source-{n}", source_main, setting, n) for n in range(SOURCES)]
        self._readers = [Remote(f"reader-{n}", reader_main, setting, n) for n in range(READERS)]
        for remote in (*self._sources, *self._readers):
            remote.hear()

    def end(self) -> None:
        for remote in (*self._readers, *self._sources, self._coordinator):
            remote.end()

    def copy(self, case: Case, *, whole: bool = False) -> tuple[float, float]:
        """Seconds, and CPU seconds of all processes, of one new version's copy to both readers."""
        self._versions[case.name] += 1
        version = self._versions[case.name]
        _ask_all(self._sources, "publish", case.name, version)
        before = self._cpu_s()
        spans = _ask_all(self._readers, "fetch", case.name, version)
        cpu_s = self._cpu_s() - before
        if not all(_ask_all(self._readers, "is_right", case.name, version, whole)):
            raise RuntimeError(f"{case.name}: a reader holds other bytes than were published")
        _ask_all(self._sources, "unpublish", case.name)
        _ask_all(self._readers, "unpublish", case.name)
        return max(end for _, end in spans) - min(start for start, _ in spans), cpu_s

    def _cpu_s(self) -> float:
        return float(sum(_ask_all([*self._sources, *self._readers], "cpu")))


def _ask_all(remotes: list[Remote], command: str, *arguments: object) -> list[Any]:
    for remote in remotes:
        remote.tell(command, *arguments)
    return [remote.hear() for remote in remotes]


def compare(
    mib: int, transport: str, device: str, rounds: int, *, plain: bool = False
) -> list[dict[str, tuple[float, float]]]:
    """Of each round: by case, seconds and CPU seconds of a copy."""
    cluster = Cluster(mib, transport, device, plain=plain)
    try:
        for case in CASES:
            cluster.copy(case, whole=True)
        return [
            {case.name: cluster.copy(case) for case in (CASES if number % 2 else CASES[::-1])}
            for number in range(rounds)
        ]
    finally:
        cluster.end()


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benches resharded", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--transports", nargs="+", default=["tcp", "cma", "shm"])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--mib", type=int, default=256, help="of each model")
    parser.add_argument("--plain", action="store_true", help="without digests")
    parser.add_argument(
        "--device", default="cpu", help="of all tensors: cpu, or cuda (for cuda_ipc and tcp)"
    )
    parser.add_argument("--json", type=Path, metavar="FILE")
    options = parser.parse_args(arguments)
    if min(options.rounds, options.mib) < 1:
        parser.error("give at least 1 round and 1 MiB")
    for name, value in facts().items():
        print(f"{name}: {value}")
    kept = []
    for transport in options.transports:
        rounds = compare(
            options.mib, transport, options.device, options.rounds, plain=options.plain
        )
        print(
            f"\n{transport}: {options.mib} MiB on {options.device}, {SOURCES} sources to a group "
            f"of {READERS}"
        )
        print(f"{'':16}{'GiB/s':>24}{'speed of same':>24}{'CPU s/GiB':>24}")
        for case in CASES:
            mine = [each[case.name] for each in rounds]
            rates = spread([options.mib / 1024 / seconds for seconds, _ in mine])
            ratios = spread([each[SAME.name][0] / each[case.name][0] for each in rounds])
            cpu = spread([cpu_s / options.mib * 1024 for _, cpu_s in mine])
            print(
                f"{case.name:16}"
                + "".join(
                    "{:>9.3f} [{:.2f}-{:.2f}]".format(*each).rjust(24)
                    for each in (rates, ratios, cpu)
                )
            )
            kept.append(
                {
                    "transport": transport,
                    "case": case.name,
                    "GiB/s": rates,
                    "of same": ratios,
                    "CPU s/GiB": cpu,
                }
            )
        print(
            f"load now {os.getloadavg()[0]:.1f}; {options.rounds} rounds; median [least-largest], "
            f"ratios within a round"
        )
    if options.json is not None:
        options.json.write_text(
            json.dumps(
                {"machine": facts(), "mib": options.mib, "plain": options.plain, "rows": kept}
            )
        )
    return 0
