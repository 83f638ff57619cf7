"""A reader in another site, by one connection to its source and by several: over lines that lose
packets. For root.

A trainer and a coordinator are in one site, the readers in the other one, each a process that reads
by so many connections (`Options.wan_connections`). The WAN is an emulated one
(`benches.testbed.wan`). Each version is read by one reader, and they take turns. See README.md.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from itertools import count, product
from pathlib import Path
from typing import Any, Final

from benches.child_processes import Process
from benches.comparison.facts import facts
from benches.testbed.network import MTU, Host, Network, Wan, why_not

MODULE: Final = "benches.capped_process"
PORT: Final = 7070
LINK_MBIT: Final = 2000.0  # of each host: the WAN is what limits
WAIT_S: Final = 300.0
CONNECTIONS_MAX: Final = 16  # of `Options.wan_connections`


@dataclass(frozen=True, slots=True)
class Figure:
    """One update. `mbit`: of payload, by the whole time of the call."""

    congestion: str
    loss: float
    connections: int
    round: int
    seconds: float
    mbit: float


def measure(
    congestion: str,
    wan: Wan,
    mtu: int,
    connections: Sequence[int],
    rounds: int,
    nbytes: int,
    chunk_bytes: int,
) -> list[Figure]:
    """The first version, which connects, does not count."""
    figures: list[Figure] = []
    hosts = [
        Host("coordinator", "near", LINK_MBIT),
        Host("trainer", "near", LINK_MBIT),
        Host("reader", "far", LINK_MBIT),
    ]
    with ExitStack() as stack:
        network = stack.enter_context(Network(hosts, wan, congestion, mtu))
        state = stack.enter_context(tempfile.TemporaryDirectory(prefix="tensorhub-wan-"))

        def start(name: str, host: str) -> Process:
            environment = {"TENSORHUB_TOKEN": "of this run"}
            process = Process(name, MODULE, prefix=network.prefix(host), environment=environment)
            stack.callback(process.end)
            return process

        start("coordinator", "coordinator").do(
            "serve", host=network.address("coordinator"), port=PORT, state_dir=state
        )
        told = {
            "address": f"tcp://{network.address('coordinator')}:{PORT}",
            "nbytes": nbytes,
            "chunk_bytes": chunk_bytes,
        }
        trainer = start("trainer", "trainer")
        trainer.do("join", name="trainer", host="trainer", site="near", **told)
        readers = {each: start(f"reader-{each}", "reader") for each in connections}
        for each, process in readers.items():
            process.do(
                "join",
                name=process.name,
                host=process.name,
                site="far",
                wan_connections=each,
                **told,
            )
        versions = count(1)
        for number in range(rounds + 1):
            for each in connections if number % 2 == 0 else reversed(connections):
                version = next(versions)
                trainer.do("mutate", version=version)
                done = readers[each].begin("update").result(WAIT_S)
                if (holds := readers[each].do("holds")) != [version]:
                    raise RuntimeError(f"{readers[each].name} holds {holds}, not {version}")
                if any(source["name"] != "trainer" for source in done["sources"]):
                    raise RuntimeError(
                        f"{readers[each].name} has read within its site: {done['sources']}"
                    )
                seconds = done["ended"] - done["began"]
                if number:
                    figures.append(
                        Figure(congestion, wan.loss, each, number, seconds, nbytes * 8e-6 / seconds)
                    )
    return figures


def table(figures: Sequence[Figure]) -> list[str]:
    """A line for each kind of line: Mbit/s by so many connections, and how often as fast as by one
    (or the fewest).
    """
    connections = sorted({figure.connections for figure in figures})
    lines = [
        f"{'control':<10}{'loss':>8}"
        + "".join(f"{f'{each} connections':>28}" for each in connections)
    ]
    for congestion, loss in dict.fromkeys((figure.congestion, figure.loss) for figure in figures):
        mine = [
            figure for figure in figures if (figure.congestion, figure.loss) == (congestion, loss)
        ]
        by = {
            each: {f.round: f.mbit for f in mine if f.connections == each} for each in connections
        }
        cells = []
        for each in connections:
            ratios = [mbit / by[connections[0]][number] for number, mbit in by[each].items()]
            some = statistics.median(ratios), min(ratios), max(ratios)
            cells.append(
                "{:.0f}, {:.2f} [{:.2f}-{:.2f}]".format(statistics.median(by[each].values()), *some)
            )
        lines.append(f"{congestion:<10}{loss:>8g}" + "".join(f"{cell:>28}" for cell in cells))
    return lines


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benches wan", description=__doc__)
    parser.add_argument(
        "--connections",
        type=int,
        nargs="+",
        default=[1, 2, 4, 8],
        help="one more for each 32 chunks",
    )
    parser.add_argument(
        "--congestion", nargs="+", default=["reno", "cubic", "bbr"], metavar="NAME", help="controls"
    )
    parser.add_argument(
        "--loss", type=float, nargs="+", default=[0.0, 1e-4, 1e-3], help="the share of packets"
    )
    parser.add_argument("--mbit", type=float, default=200, help="of the WAN, either way")
    parser.add_argument("--round-trip-ms", type=float, default=80)
    parser.add_argument(
        "--mtu", type=int, default=MTU, help="bytes of a packet; small ones cost the relay a core"
    )
    parser.add_argument("--mib", type=float, default=128, help="of the version")
    parser.add_argument(
        "--chunk-mib", type=float, default=1, help="as many chunks as 1 GiB has usually"
    )
    parser.add_argument(
        "--rounds", type=int, default=3, help="that count; one before them does not"
    )
    parser.add_argument("--seed", type=int, default=1, help="of what is lost")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write facts and figures")
    options = parser.parse_args(arguments)
    for name in ("rounds", "mbit", "mib"):
        if (given := getattr(options, name)) < 1:
            parser.error(f"--{name} {given:g}: give 1 or more")
    for each in options.connections:
        if not 1 <= each <= CONNECTIONS_MAX:
            parser.error(
                f"--connections {each}: give 1 to {CONNECTIONS_MAX}, as Options.wan_connections"
            )
    for share in options.loss:
        if not 0 <= share < 1:
            parser.error(
                f"--loss {share:g}: give a share of the packets, 0 or more and less than 1"
            )
    if (reason := why_not()) is not None:
        print(f"skipped: {reason}")
        return 0
    known: dict[str, Any] = facts() | {
        "WAN": f"{options.mbit:g} Mbit/s, round trip {options.round_trip_ms:g} ms, MTU "
        f"{options.mtu}"
    }
    known |= {"MiB": options.mib, "MiB a chunk": options.chunk_mib, "rounds": options.rounds}
    for name, value in known.items():
        print(f"{name}: {value}")
    nbytes, chunk_bytes = (int(mib * 2**20) // 16 * 16 for mib in (options.mib, options.chunk_mib))
    figures: list[Figure] = []
    for congestion, loss in product(options.congestion, options.loss):
        wan = Wan(options.mbit, options.round_trip_ms, loss, options.seed)
        found = measure(
            congestion, wan, options.mtu, options.connections, options.rounds, nbytes, chunk_bytes
        )
        print(table(found)[1], file=sys.stderr, flush=True)
        figures += found
    print(
        "\nMbit/s (median), and the speed of the fewest connections' in the same round: median "
        "[least-largest]\n"
    )
    print(*table(figures), sep="\n")
    if options.json is not None:
        options.json.write_text(
            json.dumps({"machine": known, "figures": [asdict(figure) for figure in figures]}) + "\n"
        )
    return 0
