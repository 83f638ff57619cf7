"""`python -m benches.chaos --minutes 10 --seed 1`: chaos, and whether it was survived."""

from __future__ import annotations

import argparse
import contextlib
import faulthandler
import json
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

from benches.chaos import engine, namespaces
from benches.chaos.drivers import WORKERS
from benches.chaos.network import Relays
from benches.chaos.plan import draw
from benches.chaos.plot import draw as draw_plot
from benches.chaos.run import Result, run

GRACE_S = 300.0  # after the chaos: healing, liveness, leaving; then the run is ended by force
MEETINGS = 2.0  # at most so much longer than the chaos alone is a run with its meetings
AROUND_S = 12.0  # of the log, before a violation


def main(arguments: Sequence[str]) -> int:
    """0: clean; 1: a guarantee was broken; 2: usage."""
    parser = argparse.ArgumentParser(prog="python -m benches.chaos", description=__doc__)
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json", type=Path, help="the figures, as a file")
    parser.add_argument("--plot", type=Path, help="a picture of what happened, as an SVG file")
    parser.add_argument("--log", type=Path, help="all events, as a file")
    parser.add_argument(
        "--namespaces",
        action="store_true",
        help="real links between network namespaces; needs root",
    )
    parser.add_argument(
        "--ha",
        choices=engine.ENGINES,
        help="two coordinators; for etcd, three members, which die, too",
    )
    parser.add_argument("--plan", action="store_true", help="print what would come, and do nothing")
    given = parser.parse_args(arguments)
    if given.namespaces and (reason := namespaces.why_not()):
        print(f"skipped: {reason}")
        return 0
    chosen = engine.ENGINES.get(given.ha, engine.ALONE)
    if chosen.members and not Path(engine.ETCD).exists():
        print("skipped: etcd is not installed (Debian: etcd-server)")
        return 0
    with (
        _ended_after(given.minutes * 60 * MEETINGS + GRACE_S),
        _network(given.namespaces, chosen) as network,
    ):
        processes = [*chosen.coordinators, *WORKERS, *chosen.members]
        plan = draw(given.seed, given.minutes * 60, processes, network.kinds)
        print(f"seed {given.seed}: {len(plan)} faults in {given.minutes:g} minutes", flush=True)
        if given.plan:
            print(*plan, sep="\n")
            return 0
        result = run(given.seed, given.minutes * 60, network)
    if given.log:
        given.log.write_text("".join(f"{event}\n" for event in result.events))
    if given.plot:
        given.plot.write_text(_picture(result))
    if given.json:
        given.json.write_text(json.dumps(result.as_json(), indent=2) + "\n")
    print(
        _report(
            result,
            f"python -m benches.chaos --minutes {given.minutes:g} --seed {given.seed}"
            + " --namespaces" * given.namespaces
            + (f" --ha {given.ha}" if given.ha else ""),
        )
    )
    return 0 if result.is_clean else 1


@contextlib.contextmanager
def _ended_after(seconds: float) -> Iterator[None]:
    """The process says where it is and ends, if the block takes longer. Nothing ticks on after the
    block.
    """
    faulthandler.dump_traceback_later(seconds, exit=True, file=2)
    try:
        yield
    finally:
        faulthandler.cancel_dump_traceback_later()


def _network(real_links: bool, chosen: engine.Engine) -> namespaces.Namespaces | Relays:
    return (namespaces.Namespaces if real_links else Relays)(WORKERS, chosen)


def _picture(result: Result) -> str:
    figures = result.as_json()
    minutes, clean = figures["minutes of chaos"], "clean" if result.is_clean else "BROKEN"
    kinds = Counter[str]()
    for kind, count in result.faults.items():
        kinds[kind.partition(" ")[0]] += count
    faults = ", ".join(f"{count} {kind}" for kind, count in kinds.most_common())
    fills, gigabytes = result.results.commits, result.results.bytes_checked / 1e9
    totals = [
        f"{result.faults.total()} faults: {faults}",
        f"{fills} fills, {gigabytes:.1f} GB checked word by word",
    ]
    title = f"Chaos, seed {result.seed}: {minutes:g} minutes, {clean}"
    return draw_plot(result.events, list(result.lives), title, totals)


def _report(result: Result, command: str) -> str:
    lines = [f"{name}: {value}" for name, value in result.as_json().items() if name != "violations"]
    for at, text in result.results.violations:
        lines += ["", f"VIOLATION at {at:.2f} s: {text}", "what happened before:"]
        lines += [f"  {event}" for event in result.events if at - AROUND_S <= event.at_s <= at + 1]
    lines.append(f"{'clean' if result.is_clean else 'BROKEN, repeat with'}: {command}")
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
