"""Readers in another site, with deltas and without: bytes over the line, and time. For root.

Two trainers and a coordinator are in one site, readers of each trainer in the other one, all of
them processes behind an emulated line (`benches.testbed.wan`). One trainer and its readers have
deltas switched off. The model is the one of `benches.deltas`: two neighbouring steps, which each
trainer publishes in turns. A trainer's readers read at once, and from one another; then come the
other's. The first versions, at which a source begins to keep what deltas need, do not count. Bytes
are those that the line brought into the readers' site, headers included; the time is that of the
last reader. Every read is compared whole, by a digest.

`--mbit 0`: without a line, on links of `--lan-mbit`. There deltas may gain nothing, and must not
lose.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from itertools import count
from pathlib import Path
from typing import Any, Final

from benches.child_processes import Process
from benches.comparison.facts import facts
from benches.deltas import STEPS, pairs_of
from benches.testbed.network import MTU, WAN_DEVICE, Host, Network, Wan, why_not

MODULE: Final = "benches.delta_process"
PORT: Final = 7070
WAIT_S: Final = 300.0
WARM_UP: Final = 3  # versions


@dataclass(frozen=True, slots=True)
class Figure:
    """One version, read by all. `codec_s`: of a reader's threads, with deltas."""

    lr: float
    round: int
    nbytes: int
    full_bytes: int
    delta_bytes: int
    full_s: float
    delta_s: float
    codec_s: float


def save_pair(lr: float, steps: int, directory: Path) -> tuple[Path, Path, int]:
    """The two versions as files, and the bytes of one."""
    import numpy as np

    tensors = pairs_of(lr, ["bf16"], steps)["bf16"].tensors
    files = directory / f"{lr}-before.npz", directory / f"{lr}-after.npz"
    for at, file in enumerate(files):
        named = {f"t{n}": np.frombuffer(each[at], np.uint16) for n, each in enumerate(tensors)}
        np.savez(file, **named)  # type: ignore[arg-type]  # of savez's other arguments
    return *files, sum(new.nbytes for _, new in tensors)


def measure(
    lr: float, steps: int, wan: Wan | None, lan_mbit: float, readers: int, rounds: int
) -> list[Figure]:
    figures: list[Figure] = []
    far = "near" if wan is None else "far"
    hosts = [
        Host("coordinator", "near", lan_mbit),
        Host("trainer", "near", lan_mbit),
        *[Host(f"reader-{number}", far, lan_mbit) for number in range(readers)],
    ]
    with ExitStack() as stack:
        network = stack.enter_context(Network(hosts, wan, "cubic", MTU))
        scratch = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="tensorhub-wan-")))
        before, after, nbytes = save_pair(lr, steps, scratch)

        def start(name: str, host: str) -> Process:
            environment = {"TENSORHUB_TOKEN": "of this run"}
            process = Process(name, MODULE, prefix=network.prefix(host), environment=environment)
            stack.callback(process.end)
            return process

        host = network.address("coordinator")
        start("coordinator", "coordinator").do(
            "serve", host=host, port=PORT, state_dir=str(scratch / "state")
        )
        told = {"address": f"tcp://{host}:{PORT}", "file": str(before)}
        groups: dict[str, tuple[Process, list[Process]]] = {}
        for each in ("off", "auto"):  # a model for each: else one reader would read from the other
            trainer = start(f"trainer-{each}", "trainer")
            its = [start(f"{host.name}-{each}", host.name) for host in hosts[2:]]
            groups[each] = trainer, its
            for process in (trainer, *its):
                site = "near" if process is trainer else "far"
                room = 2 * nbytes if process is trainer else nbytes // 2
                said = {"name": process.name, "site": site, "room": room}
                process.do("join", model=each, deltas=each, **said, **told)
        versions = count(1)
        for number in range(rounds + WARM_UP):
            version = next(versions)
            done: dict[str, Any] = {}
            for each in ("off", "auto") if number % 2 else ("auto", "off"):
                trainer, its = groups[each]
                trainer.do("mutate", version=version, file=str(after if version % 2 else before))
                came = 0 if wan is None else _bytes_into(network, far)
                reading = [reader.begin("update", version=version) for reader in its]
                reports = [one.result(WAIT_S) for one in reading]
                if {report["digest"] for report in reports} != {trainer.do("digest")}:
                    raise RuntimeError(f"a reader does not hold version {version}")
                whole = sum(report["bytes_read"] for report in reports)
                done[each] = {
                    "bytes": whole if wan is None else _bytes_into(network, far) - came,
                    "seconds": max(report["seconds"] for report in reports),
                    "codec_s": max(report["codec_s"] for report in reports),
                }
            if number >= WARM_UP:
                full, made = done["off"], done["auto"]
                sizes = nbytes, full["bytes"], made["bytes"]
                times = full["seconds"], made["seconds"], made["codec_s"]
                figures.append(Figure(lr, number - WARM_UP + 1, *sizes, *times))
    return figures


def _bytes_into(network: Network, site: str) -> int:
    """That the WAN has brought there."""
    command = [*network.prefix(site), "cat", "/proc/net/dev"]
    said = subprocess.run(command, capture_output=True, text=True, check=True, timeout=20).stdout
    (line,) = (line for line in said.splitlines() if line.strip().startswith(f"{WAN_DEVICE}:"))
    return int(line.partition(":")[2].split()[0])


def table(figures: Sequence[Figure]) -> list[str]:
    lines = [
        f"{'lr':>8}{'MB':>8}{'fewer bytes':>26}{'less time':>26}{'full s':>10}{'delta s':>10}{'codec s':>10}"
    ]
    for lr in dict.fromkeys(figure.lr for figure in figures):
        mine = [figure for figure in figures if figure.lr == lr]
        fewer = [figure.full_bytes / figure.delta_bytes for figure in mine]
        less = [figure.full_s / figure.delta_s for figure in mine]
        cells = [
            f"{statistics.median(each):.1f} [{min(each):.1f}-{max(each):.1f}]"
            for each in (fewer, less)
        ]
        seconds = [
            statistics.median([figure.full_s for figure in mine]),
            statistics.median([figure.delta_s for figure in mine]),
            statistics.median([figure.codec_s for figure in mine]),
        ]
        lines.append(
            f"{lr:>8g}{mine[0].nbytes / 1e6:>8.1f}{cells[0]:>26}{cells[1]:>26}"
            + "".join(f"{each:>10.3f}" for each in seconds)
        )
    return lines


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benches delta_reads", description=__doc__)
    parser.add_argument("--lr", type=float, nargs="+", default=[1e-6, 3e-6, 1e-5])
    parser.add_argument(
        "--mbit", type=float, default=50, help="of the WAN, either way; 0: there is none"
    )
    parser.add_argument("--lan-mbit", type=float, default=1000, help="of each host's link")
    parser.add_argument("--round-trip-ms", type=float, default=20)
    parser.add_argument("--readers", type=int, default=1, help="of each trainer")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=STEPS, help="of training, before the pair")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write facts and figures")
    options = parser.parse_args(arguments)
    if options.mbit < 0:
        parser.error(f"--mbit {options.mbit:g}: give 0 or more")
    for name in ("rounds", "readers", "lan_mbit"):
        if (given := getattr(options, name)) < 1:
            parser.error(f"--{name.replace('_', '-')} {given:g}: give 1 or more")
    if (reason := why_not()) is not None:
        print(f"skipped: {reason}")
        return 0
    known: dict[str, Any] = facts() | {
        "WAN": f"{options.mbit:g} Mbit/s, round trip {options.round_trip_ms:g} ms, {options.readers} readers",
        "LAN": f"{options.lan_mbit:g} Mbit/s",
    }
    for name, value in known.items():
        print(f"{name}: {value}")
    figures: list[Figure] = []
    for lr in options.lr:
        wan = Wan(options.mbit, options.round_trip_ms, 0.0, 1) if options.mbit else None
        found = measure(lr, options.steps, wan, options.lan_mbit, options.readers, options.rounds)
        print(table(found)[1], file=sys.stderr, flush=True)
        figures += found
    print("\nWithout deltas against with them, of the same version: median [least-largest]\n")
    print(*table(figures), sep="\n")
    if options.json is not None:
        options.json.write_text(
            json.dumps({"machine": known, "figures": [asdict(figure) for figure in figures]}) + "\n"
        )
    return 0
