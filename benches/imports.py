"""How long a process takes until TensorHub is imported, and until `tensorhub --help` is printed.

Each program is an interpreter of its own, timed from its start to its end. The programs take turns,
and an empty program is the yardstick beside them. On a busy machine read the CPU's milliseconds.
"""

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
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
VERDICTS = {True: "reached", False: "MISSED"}
TIMEOUT_S = 120.0


@dataclass(frozen=True, slots=True)
class Run:
    """One process, in ms: from its start to its end, and what of the CPU it used."""

    ms: float
    cpu_ms: float


Figures = dict[str, list[Run]]  # of each round, by program


def measure(rounds: int) -> Figures:
    """The programs in turn; the round that writes the bytecode does not count."""
    figures: Figures = {name: [] for name in PROGRAMS}
    with tempfile.TemporaryDirectory() as bytecode:
        environment = os.environ | {"PYTHONPYCACHEPREFIX": bytecode}
        environment.pop("PYTHONDONTWRITEBYTECODE", None)
        for round_ in range(rounds + 1):
            for name, arguments in PROGRAMS.items():
                run = _run([sys.executable, *arguments], environment)
                if round_:
                    figures[name].append(run)
    return figures


def _run(command: list[str], environment: dict[str, str]) -> Run:
    before, started = _children_cpu_s(), time.perf_counter()
    subprocess.run(
        command, check=True, env=environment, stdout=subprocess.DEVNULL, timeout=TIMEOUT_S
    )
    ended = time.perf_counter()
    return Run(1000 * (ended - started), 1000 * (_children_cpu_s() - before))


def _children_cpu_s() -> float:
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def table(figures: Figures) -> list[dict[str, object]]:
    """One row for each program: milliseconds; milliseconds, and those of the CPU, over the empty
    program of the same round; their ratio; and whether the median reached the aim.
    """
    rows: list[dict[str, object]] = []
    for name, runs in figures.items():
        pairs = list(zip(runs, figures[EMPTY], strict=True))
        over = spread([mine.ms - empty.ms for mine, empty in pairs])
        aim = AIM_MS.get(name)
        rows.append(
            {
                "program": name,
                "ms": spread([run.ms for run in runs]),
                "ms over the empty one": over,
                "CPU ms over it": spread([mine.cpu_ms - empty.cpu_ms for mine, empty in pairs]),
                "of the empty one": spread([mine.ms / empty.ms for mine, empty in pairs]),
                "aim": aim,
                "reached": None if aim is None else over[0] < aim,
            }
        )
    return rows


def show(rows: list[dict[str, object]]) -> None:
    titles = [title for title, value in rows[0].items() if isinstance(value, list)]
    print(f"\n{'program':<24}" + "".join(f"{title:>26}" for title in titles) + "  aim")
    for row in rows:
        cells = [
            "{:,.1f} [{:,.1f}-{:,.1f}]".format(*value)
            for value in row.values()
            if isinstance(value, list)
        ]
        aim = "" if row["aim"] is None else f"{row['aim']}: {VERDICTS[bool(row['reached'])]}"
        line = f"{row['program']:<24}" + "".join(f"{cell:>26}" for cell in cells) + f"  {aim}"
        print(line.rstrip())
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
