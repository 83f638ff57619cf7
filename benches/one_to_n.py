"""One publisher to one and to several receivers of one host, against bare copies of the same bytes
by the same means.

All ways run in the same processes, between the same tensors, in turns (A B C D, D C B A, ...): a
slow minute of the machine hits all alike, and a ratio compares neighbours of one round. Every copy
is of a content that was never published before, so its digests are made anew; or (`again`) they
were made when the same receivers fetched it before. See README.md.
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

from benches.comparison.bare import CONGESTION_CONTROL
from benches.comparison.facts import facts
from benches.memory_use import Sampler, available_bytes
from benches.remotes import Remote
from benches.size_profiles import SizeProfile
from benches.workers import MODELS, coordinator_main, publisher_main, receiver_main

GIB = 2**30
MEMORY_PART = 0.8  # of what is available: the rest is for the programs themselves


@dataclass(frozen=True, slots=True)
class Way:
    """One way to copy. `model`: TensorHub's, by the publisher's setting of `integrity`; None: a
    bare copy.
    """

    name: str
    model: str | None
    digests: bool
    is_again: bool = False


BARE = Way("bare", None, False)
BARE_DIGESTED = Way("bare + XXH3", None, True)
WAYS = (
    Way("TensorHub", "digested", True),
    Way("TensorHub, again", "digested", True, is_again=True),
    BARE_DIGESTED,
    Way("TensorHub, integrity=False", "plain", False),
    BARE,
)
BARE_COPIES = {
    "tcp": "sockets",
    "cma": "process_vm_readv by one thread and by two, the better one",
    "shm": "memmove out of a mapping by one thread and by two, the better one",
}
Spans = list[tuple[float, float]]


@dataclass(frozen=True, slots=True)
class Figure:
    """One copy to `receivers` receivers: seconds from the first start to the last end, CPU seconds
    of all processes.
    """

    way: str
    receivers: int
    round: int
    seconds: float
    cpu_s: float


class Cluster:
    """The processes, and one copy at a time between them."""

    def __init__(self, profile: SizeProfile, receivers: int, transport: str = "tcp") -> None:
        self._versions = count(1)
        self._transport = transport
        self.coordinator = Remote("coordinator", coordinator_main)
        self._all = [self.coordinator]
        address, to_all = self.coordinator.hear(), (MODELS, transport)
        self.publisher = Remote("publisher", publisher_main, address, profile, *to_all)
        names = [f"receiver-{n}" for n in range(receivers)]
        self.receivers = [
            Remote(name, receiver_main, address, profile, name, *to_all) for name in names
        ]
        self._all += [self.publisher, *self.receivers]
        (self.tensors,) = {remote.hear() for remote in self._all[1:]}
        self.extra_mib: dict[tuple[str, int], tuple[float, float]] = {}
        """By way and receivers: anonymous memory that the verified copy added, of the publisher and
        of a receiver.
        """

    def end(self) -> None:
        for remote in reversed(self._all):
            remote.end()

    def copy(self, way: Way, receivers: int, number: int, *, verify: bool = False) -> Figure:
        """A new content, copied and checked: by its changing bytes, or (`verify`) all of it into
        cleared memory.
        """
        readers = self.receivers[:receivers]
        self.publisher.ask("change")
        if verify:
            _ask_all(readers, "clear")
            sampler = Sampler(remote.pid for remote in (self.publisher, *readers))
        spans, cpu_s = (
            self._bare(way, readers) if way.model is None else self._hub(way, way.model, readers)
        )
        if verify:
            sampler.end()
            most = max(sampler.more_mib(reader.pid) for reader in readers)
            self.extra_mib[way.name, receivers] = sampler.more_mib(self.publisher.pid), most
        check = "sha256" if verify else "sample"
        expected = self.publisher.ask(check)
        if any(found != expected for found in _ask_all(readers, check)):
            raise RuntimeError(f"{way.name}: a receiver holds other bytes than the publisher")
        return Figure(way.name, receivers, number, _seconds(spans), cpu_s)

    def _hub(self, way: Way, model: str, readers: list[Remote]) -> tuple[Spans, float]:
        version = next(self._versions)
        self.publisher.ask("publish", model, version)
        if way.is_again:
            _ask_all(readers, "fetch", model, version)
            _ask_all(readers, "unpublish", model)
            _ask_all(readers, "change")
        before = self._cpu_s()
        spans = _ask_all(readers, "fetch", model, version)
        cpu_s = self._cpu_s() - before
        _ask_all([self.publisher, *readers], "unpublish", model)
        return spans, cpu_s

    def _bare(self, way: Way, readers: list[Remote]) -> tuple[Spans, float]:
        if self._transport != "tcp":
            there, known = (
                self.publisher.ask("lie"),
                self.publisher.ask("digests") if way.digests else None,
            )
            return min(
                (self._read(readers, there, n, known) for n in (1, 2)),
                key=lambda copied: _seconds(copied[0]),
            )
        port = self.publisher.ask("listen")
        before = self._cpu_s()
        self.publisher.tell("send", len(readers), way.digests)
        spans = _ask_all(readers, "receive", port, way.digests)
        self.publisher.hear()
        return spans, self._cpu_s() - before

    def _read(self, readers: list[Remote], *order: object) -> tuple[Spans, float]:
        before = self._cpu_s()
        return _ask_all(readers, "read", self._transport, *order), self._cpu_s() - before

    def _cpu_s(self) -> float:
        return float(sum(_ask_all(self._all, "cpu")))


def _seconds(spans: Spans) -> float:
    """From the first start to the last end."""
    return max(end for _, end in spans) - min(start for start, _ in spans)


def _ask_all(remotes: Sequence[Remote], command: str, *arguments: object) -> list[Any]:
    """All answers to one command that all get at once."""
    for remote in remotes:
        remote.tell(command, *arguments)
    return [remote.hear() for remote in remotes]


@contextmanager
def cluster(profile: SizeProfile, receivers: int, transport: str = "tcp") -> Iterator[Cluster]:
    made = Cluster(profile, receivers, transport)
    try:
        yield made
    finally:
        made.end()


def measure(made: Cluster, fans: Sequence[int], rounds: int) -> list[Figure]:
    """One verified copy of each kind that does not count; then the rounds, every other one
    backwards.
    """
    figures = []
    for fan in fans:
        for way in WAYS:
            made.copy(way, fan, 0, verify=True)
        for number in range(1, rounds + 1):
            for way in WAYS if number % 2 else reversed(WAYS):
                figures.append(made.copy(way, fan, number))
            print(f"  1 -> {fan}: round {number} of {rounds}", flush=True)
    return figures


# --------------------------------------------------------------------------------------------------
# report


def _of(figures: Sequence[Figure], way: Way, fan: int) -> list[float]:
    return [
        figure.seconds for figure in figures if (figure.way, figure.receivers) == (way.name, fan)
    ]


def ratios(figures: Sequence[Figure], way: Way, baseline: Way, fan: int) -> list[float]:
    """Of each round: the baseline's seconds by this way's, i.e. this way's speed as a part of the
    baseline's.
    """
    pairs = zip(_of(figures, baseline, fan), _of(figures, way, fan), strict=True)
    return [base / mine for base, mine in pairs]


def table(figures: Sequence[Figure], fans: Sequence[int], nbytes: int) -> list[dict[str, object]]:
    """One row for each fan-out and way: medians, and the least and the largest value of all
    rounds.
    """
    rows: list[dict[str, object]] = []
    for fan in fans:
        bare = _of(figures, BARE, fan)
        for way in WAYS:
            seconds = _of(figures, way, fan)
            mine = [
                figure for figure in figures if (figure.way, figure.receivers) == (way.name, fan)
            ]
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
            row["ms"] = spread([1000 * value for value in seconds])
            row["ms over 2 x bare"] = spread(
                [1000 * (value - 2 * base) for value, base in zip(seconds, bare, strict=True)]
            )
            rows.append(row)
    return rows


def spread(values: list[float]) -> list[float]:
    """Median, least, largest."""
    return [round(value, 4) for value in (statistics.median(values), min(values), max(values))]


def show(rows: list[dict[str, object]]) -> None:
    # `ms` says it
    titles = [title for title in rows[0] if title not in ("receivers", "way", "seconds")]
    print(f"\n{'':7}{'':28}" + "".join(f"{title:>24}" for title in titles))
    for row in rows:
        print(
            f"1 -> {row['receivers']:<2} {row['way']:<28}"
            + "".join(f"{_cell(row[title]):>24}" for title in titles)
        )
    print(
        "\nMedian [least-largest] of the rounds. A ratio is taken "
        "within each round; above 1 is faster."
    )


def _cell(value: object) -> str:
    return "{:.3f} [{:.2f}-{:.2f}]".format(*value) if isinstance(value, list) else str(value)


def one_size(options: argparse.Namespace, mib: int) -> tuple[list[dict[str, object]], list[Figure]]:
    """Measure, and show, as many of the fan-outs as there is memory for."""
    profile = (
        SizeProfile(mib * 2**20, each=mib * 2**20)
        if options.one_tensor
        else SizeProfile.of(options, mib)
    )
    nbytes = sum(profile.sizes())
    fans = [
        fan for fan in options.receivers if (1 + fan) * nbytes < MEMORY_PART * available_bytes()
    ]
    if fans != options.receivers:
        print(f"\n{mib} MiB: there is memory for these numbers of receivers only: {fans or 'none'}")
    if not fans:
        return [], []
    with cluster(profile, max(fans), options.transport) as made:
        print(
            f"\n{made.tensors} tensors ({profile}), {nbytes / 2**20:.0f} MiB, {options.transport}; "
            f"each verified (SHA-256)"
        )
        figures = measure(made, fans, options.rounds)
    rows = table(figures, fans, nbytes)
    for row in rows:
        key = str(row["way"]), int(str(row["receivers"]))
        row["publisher's extra MiB"], row["receiver's extra MiB"] = made.extra_mib[key]
    show(rows)
    return [{"mib": mib, **row} for row in rows], figures


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benches one_to_n", description=__doc__)
    parser.add_argument(
        "--transport",
        choices=tuple(BARE_COPIES),
        default="tcp",
        help="of TensorHub and of the bare copy",
    )
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument(
        "--mib",
        type=int,
        nargs="+",
        default=[1024],
        help="bytes of the model, in MiB (each process has them)",
    )
    parser.add_argument("--one-tensor", action="store_true", help="all of it is one tensor")
    SizeProfile.add_options(parser)
    parser.add_argument("--receivers", type=int, nargs="+", default=[1, 4], help="the fan-outs")
    parser.add_argument(
        "--json", type=Path, metavar="FILE", help="also write facts, rows and every single figure"
    )
    options = parser.parse_args(arguments)
    if min(options.rounds, *options.mib, *options.receivers) < 1:
        parser.error("give at least 1 round, 1 MiB and 1 receiver")
    known = facts() | {
        "transport": options.transport,
        "a bare copy": BARE_COPIES[options.transport],
    }
    if options.transport == "tcp":
        known["congestion control of bare sockets"] = CONGESTION_CONTROL.decode()
    for name, value in known.items():
        print(f"{name}: {value}")
    rows: list[dict[str, object]] = []
    single: list[dict[str, object]] = []
    for mib in options.mib:
        found, figures = one_size(options, mib)
        rows += found
        single += [
            {"mib": mib, **{name: getattr(figure, name) for name in Figure.__slots__}}
            for figure in figures
        ]
    if options.json is not None:
        kept = {
            "machine": known,
            "mib": options.mib,
            "profile": str(SizeProfile.of(options, 0)),
            "rows": rows,
            "figures": single,
        }
        options.json.write_text(json.dumps(kept))
    return 0
