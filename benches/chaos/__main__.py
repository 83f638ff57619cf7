"""`python -m benches.chaos --minutes 10 --seed 1`: chaos, and whether it was survived."""

from __future__ import annotations

import argparse
import faulthandler
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from benches.chaos.drivers import WORKERS
from benches.chaos.network import Relays
from benches.chaos.plan import draw
from benches.chaos.run import Result, run

GRACE_S = 300.0  # after the chaos: healing, liveness, leaving; then the run is ended by force
AROUND_S = 12.0  # of the log, before a violation


def main(arguments: Sequence[str]) -> int:
    """0: clean; 1: a guarantee was broken; 2: usage."""
    parser = argparse.ArgumentParser(prog="python -m benches.chaos", description=__doc__)
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json", type=Path, help="the figures, as a file")
    parser.add_argument("--log", type=Path, help="all events, as a file")
    parser.add_argument("--plan", action="store_true", help="print what would come, and do nothing")
    given = parser.parse_args(arguments)
    plan = draw(given.seed, given.minutes * 60, ["coordinator", *WORKERS])
    print(f"seed {given.seed}: {len(plan)} faults in {given.minutes:g} minutes", flush=True)
    if given.plan:
        print(*plan, sep="\n")
        return 0
    faulthandler.dump_traceback_later(given.minutes * 60 + GRACE_S, exit=True)
    with Relays(WORKERS) as network:
        result = run(given.seed, given.minutes * 60, network)
    faulthandler.cancel_dump_traceback_later()
    if given.log:
        given.log.write_text("".join(f"{event}\n" for event in result.events))
    if given.json:
        given.json.write_text(json.dumps(result.as_json(), indent=2) + "\n")
    print(_report(result, f"python -m benches.chaos --minutes {given.minutes:g} --seed {given.seed}"))
    return 0 if result.is_clean else 1


def _report(result: Result, command: str) -> str:
    lines = [f"{name}: {value}" for name, value in result.as_json().items() if name != "violations"]
    for at, text in result.ledger.violations:
        lines += ["", f"VIOLATION at {at:.2f} s: {text}", "what happened before:"]
        lines += [f"  {event}" for event in result.events if at - AROUND_S <= event.at_s <= at + 1]
    lines.append(f"{'clean' if result.is_clean else 'BROKEN, repeat with'}: {command}")
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
