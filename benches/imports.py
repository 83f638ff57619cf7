"""How long a process takes until TensorHub is imported, and until `tensorhub --help` is printed.

Each program is an interpreter of its own, timed from its start to its end. The programs take turns,
and an empty program is the yardstick beside them. See README.md.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from benches.comparison.facts import facts
from benches.one_to_n import spread

EMPTY = "empty program"
PROGRAMS = {
    EMPTY: ("-c", "pass"),
    "import tensorhub": ("-c", "import tensorhub"),
    "tensorhub --help": ("-m", "tensorhub", "--help"),
    "tensorhub.connect": ("-c", "import tensorhub; tensorhub.connect"),
    "tensorhub.serve": ("-c", "import tensorhub; tensorhub.serve"),
    "import tensorhub.sync": ("-c", "import tensorhub.sync"),
}
AIM_MS = {"import tensorhub": 150, "tensorhub --help": 250}  # over the empty program
TIMEOUT_S = 120.0
Figures = dict[str, list[float]]  # seconds of each round, by program


def measure(rounds: int) -> Figures:
    """Seconds from the start of each program to its end; the round that writes the bytecode does
    not count.
    """
    figures: Figures = {name: [] for name in PROGRAMS}
    with tempfile.TemporaryDirectory() as bytecode:
        environment = os.environ | {"PYTHONPYCACHEPREFIX": bytecode}
        environment.pop("PYTHONDONTWRITEBYTECODE", None)
        for round_ in range(rounds + 1):
            for name, arguments in PROGRAMS.items():
                command = [sys.executable, *arguments]
                started = time.perf_counter()
                subprocess.run(
                    command,
                    check=True,
                    env=environment,
                    stdout=subprocess.DEVNULL,
                    timeout=TIMEOUT_S,
                )
                if round_:
                    figures[name].append(time.perf_counter() - started)
    return figures


def table(figures: Figures) -> list[dict[str, object]]:
    """One row for each program: milliseconds, milliseconds over the empty program of the same
    round, and their ratio.
    """
    rows: list[dict[str, object]] = []
    for name, seconds in figures.items():
        pairs = list(zip(seconds, figures[EMPTY], strict=True))
        over = spread([1000 * (mine - empty) for mine, empty in pairs])
        row = {
            "program": name,
            "ms": spread([1000 * second for second in seconds]),
            "ms over the empty one": over,
        }
        rows.append(
            row
            | {
                "of the empty one": spread([mine / empty for mine, empty in pairs]),
                "aim": AIM_MS.get(name),
            }
        )
    return rows


def show(rows: list[dict[str, object]]) -> None:
    print(
        f"\n{'program':<24}{'ms':>24}{'ms over the empty one':>26}{'of the empty one':>24}{'aim':>8}"
    )
    for row in rows:
        cells = [
            "{:,.1f} [{:,.1f}-{:,.1f}]".format(*value)
            for value in row.values()
            if isinstance(value, list)
        ]
        print(
            f"{row['program']:<24}{cells[0]:>24}{cells[1]:>26}{cells[2]:>24}{row['aim'] or '':>8}"
        )
    print(
        "\nMedian [least-largest] of the rounds. An aim is of the "
        "milliseconds over the empty program."
    )


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benches imports", description=__doc__)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write facts and rows")
    options = parser.parse_args(arguments)
    if options.rounds < 1:
        parser.error("give at least 1 round")
    known = facts()
    for name, value in known.items():
        print(f"{name}: {value}")
    rows = table(measure(options.rounds))
    show(rows)
    if options.json is not None:
        options.json.write_text(json.dumps({"machine": known, "rows": rows}))
    return 0
