"""One publisher to one and to several receivers over TCP, against bare sockets that copy the same bytes.

All ways run in the same processes, between the same tensors, in turns (A B C D, D C B A, ...): a slow minute of the
machine hits all alike, and a ratio compares neighbours of one round. Every round publishes a content that was never
read before, so the digests are made anew. See README.md.
"""

import argparse
import json
import statistics
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any

from benches.mixes import Mix
from benches.remotes import Remote
from benches.workers import coordinator_main, publisher_main, receiver_main
from tensorhub.cli.bench.bare import CONGESTION_CONTROL
from tensorhub.cli.bench.facts import facts

GIB = 2**30


@dataclass(frozen=True, slots=True)
class Way:
    """One way to copy. `model`: TensorHub's, by the publisher's setting of `integrity`; None: bare sockets."""

    name: str
    model: str | None
    digests: bool


BARE = Way("bare sockets", None, False)
BARE_DIGESTED = Way("bare sockets + XXH3", None, True)
WAYS = (
    Way("TensorHub", "digested", True),
    BARE_DIGESTED,
    Way("TensorHub, integrity=False", "plain", False),
    BARE,
)


@dataclass(frozen=True, slots=True)
class Figure:
    """One copy to `receivers` receivers: seconds from the first start to the last end, CPU seconds of all processes."""

    way: str
    receivers: int
    round: int
    seconds: float
    cpu_s: float


class Cluster:
    """The processes, and one copy at a time between them."""

    def __init__(self, mix: Mix, receivers: int) -> None:
        self._versions = count(1)
        self.coordinator = Remote("coordinator", coordinator_main)
        self._all = [self.coordinator]
        address = self.coordinator.hear()
        self.publisher = Remote("publisher", publisher_main, address, mix)
        self.receivers = [Remote(f"receiver-{n}", receiver_main, address, mix, f"receiver-{n}") for n in range(receivers)]
        self._all += [self.publisher, *self.receivers]
        (self.tensors,) = {remote.hear() for remote in self._all[1:]}

    def end(self) -> None:
        for remote in reversed(self._all):
            remote.end()

    def copy(self, way: Way, receivers: int, number: int, *, verify: bool = False) -> Figure:
        """A new content, copied and checked: by its changing bytes, or (`verify`) all of it into cleared memory."""
        readers = self.receivers[:receivers]
        self.publisher.ask("change")
        if verify:
            _ask_all(readers, "clear")
        spans, cpu_s = self._bare(way, readers) if way.model is None else self._hub(way.model, readers)
        check = "sha256" if verify else "sample"
        expected = self.publisher.ask(check)
        if any(found != expected for found in _ask_all(readers, check)):
            raise RuntimeError(f"{way.name}: a receiver holds other bytes than the publisher")
        seconds = max(end for _, end in spans) - min(start for start, _ in spans)
        return Figure(way.name, receivers, number, seconds, cpu_s)

    def _hub(self, model: str, readers: list[Remote]) -> tuple[list[tuple[float, float]], float]:
        version = next(self._versions)
        self.publisher.ask("publish", model, version)
        before = self._cpu_s()
        spans = _ask_all(readers, "fetch", model, version)
        cpu_s = self._cpu_s() - before
        _ask_all([self.publisher, *readers], "unpublish", model)
        return spans, cpu_s

    def _bare(self, way: Way, readers: list[Remote]) -> tuple[list[tuple[float, float]], float]:
        port = self.publisher.ask("listen")
        before = self._cpu_s()
        self.publisher.tell("send", len(readers), way.digests)
        spans = _ask_all(readers, "receive", port, way.digests)
        self.publisher.hear()
        return spans, self._cpu_s() - before

    def _cpu_s(self) -> float:
        return float(sum(_ask_all(self._all, "cpu")))


def _ask_all(remotes: Sequence[Remote], command: str, *arguments: object) -> list[Any]:
    """All answers to one command that all get at once."""
    for remote in remotes:
        remote.tell(command, *arguments)
    return [remote.hear() for remote in remotes]


@contextmanager
def cluster(mix: Mix, receivers: int) -> Iterator[Cluster]:
    made = Cluster(mix, receivers)
    try:
        yield made
    finally:
        made.end()


def measure(made: Cluster, fans: Sequence[int], rounds: int) -> list[Figure]:
    """One verified copy of each kind that does not count; then the rounds, every other one backwards."""
    figures = []
    for fan in fans:
        for way in WAYS:
            made.copy(way, fan, 0, verify=True)
        for number in range(1, rounds + 1):
            for way in WAYS if number % 2 else reversed(WAYS):
                figures.append(made.copy(way, fan, number))
            print(f"  1 -> {fan}: round {number} of {rounds}", flush=True)
    return figures


# ------------------------------------------------------------------------------------------------------------- report


def ratios(figures: Sequence[Figure], way: Way, baseline: Way, fan: int) -> list[float]:
    """Of each round: the baseline's seconds by this way's, i.e. this way's speed as a part of the baseline's."""

    def seconds(name: str) -> list[float]:
        return [figure.seconds for figure in figures if (figure.way, figure.receivers) == (name, fan)]

    return [base / mine for base, mine in zip(seconds(baseline.name), seconds(way.name), strict=True)]


def table(figures: Sequence[Figure], fans: Sequence[int], nbytes: int) -> list[dict[str, object]]:
    """One row for each fan-out and way: medians, and the least and the largest value of all rounds."""
    rows: list[dict[str, object]] = []
    for fan in fans:
        for way in WAYS:
            mine = [figure for figure in figures if (figure.way, figure.receivers) == (way.name, fan)]
            seconds = [figure.seconds for figure in mine]
            cpu_s = [figure.cpu_s / (fan * nbytes / GIB) for figure in mine]
            row: dict[str, object] = {
                "receivers": fan,
                "way": way.name,
                "seconds": spread(seconds),
                "GiB/s": spread([fan * nbytes / GIB / value for value in seconds]),
                "CPU s/GiB": spread(cpu_s),
            }
            for title, baseline in (("speed of bare", BARE), ("of bare + XXH3", BARE_DIGESTED)):
                row[title] = spread(ratios(figures, way, baseline, fan))
            rows.append(row)
    return rows


def spread(values: list[float]) -> list[float]:
    """Median, least, largest."""
    return [round(value, 4) for value in (statistics.median(values), min(values), max(values))]


def show(rows: list[dict[str, object]]) -> None:
    print(f"\n{'':7}{'':28}" + "".join(f"{title:>22}" for title in list(rows[0])[2:]))
    for row in rows:
        cells = [value for value in row.values() if isinstance(value, list)]
        texts = "".join(f"{f'{mid:.3f} [{low:.2f}-{high:.2f}]':>22}" for mid, low, high in cells)
        print(f"1 -> {row['receivers']:<2} {row['way']:<28}{texts}")
    print("\nMedian [least-largest] of the rounds. A ratio is taken within each round; above 1 is faster.")


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benches one_to_n", description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--mib", type=int, default=1024, help="bytes of the model, in MiB (every process holds them)")
    Mix.add_options(parser)
    parser.add_argument("--receivers", type=int, nargs="+", default=[1, 4], help="the fan-outs")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write facts, rows and every single figure")
    options = parser.parse_args(arguments)
    if min(options.rounds, options.mib - 1, *options.receivers) < 1:
        parser.error("give at least 1 round, 2 MiB and 1 receiver")
    mix = Mix.of(options)
    nbytes = sum(mix.sizes())
    known = facts() | {"congestion control of bare sockets": CONGESTION_CONTROL.decode()}
    for name, value in known.items():
        print(f"{name}: {value}")
    with cluster(mix, max(options.receivers)) as made:
        print(
            f"{made.tensors} tensors ({mix}), {nbytes / 2**20:.0f} MiB, tcp on loopback; each way verified once by SHA-256"
        )
        figures = measure(made, options.receivers, options.rounds)
    rows = table(figures, options.receivers, nbytes)
    show(rows)
    if options.json is not None:
        single = [{name: getattr(figure, name) for name in Figure.__slots__} for figure in figures]
        options.json.write_text(
            json.dumps({"machine": known, "mib": options.mib, "mix": str(mix), "rows": rows, "figures": single})
        )
    return 0
