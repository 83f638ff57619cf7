"""Mutants by machine: `make mutants`. See docs/simulation.md.

A sample of lines is drawn and one change is made in each, which tests are to notice: first those
nearest to the module, then the simulator on some seeds, then all others.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import os
import re
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.mutants.operators import Mutant, draw, explained
from tests.mutants.running import CRASH, DEADLINE, Search, Stage, Verdict

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "src" / "tensorhub"
EXPLAINED = Path(__file__).with_name("explained.toml")
PURE = "coordinator worker scheduler layouts deltas flows model machine archives/retention".split()
PACKAGES = [*PURE, "compaction", "runtime/data", "transport"]
SIMULATED = ["coordinator", "worker"]  # what --seeds-only takes
APART = ["frameworks", "rdma", "mutants"]  # they need what is not here, or run this


def nearest(mutants: Sequence[Mutant]) -> set[Path]:
    """The test modules with the names of the mutants' modules, and those whose docstrings name
    these modules. Without any, those that import the modules.
    """
    texts = {path: path.read_text() for path in _tests()}
    stories = {path: ast.get_docstring(ast.parse(texts[path])) or "" for path in texts}
    found = set[Path]()
    for module in {Path(mutant.path).with_suffix("") for mutant in mutants}:
        *parents, name = ["tensorhub", *module.parts]
        package = re.escape(".".join(parents))
        imports = re.compile(rf"{package}\.{name}\b|from {package} import (\([^)]*|.*)\b{name}\b")
        tells = re.compile(rf"`([\w.]+\.)?{name}`")
        mine = ROOT / "tests" / module.parent
        beside = {path for path in texts if path.is_relative_to(mine)}
        near = {path for path in beside if path.name.startswith(f"test_{name}")}
        near |= {path for path in beside if tells.search(stories[path])}
        found |= near or {path for path in texts if imports.search(texts[path])}
    return found


def _tests() -> list[Path]:
    paths = sorted((ROOT / "tests").rglob("test_*.py"))
    return [path for path in paths if path.relative_to(ROOT / "tests").parts[0] not in APART]


class Plugin:
    """Of pytest: in place of the tests, once they are collected, the search runs."""

    def __init__(
        self, search: Search, mutants: Sequence[Mutant], near: set[Path], seeds: int
    ) -> None:
        self._search, self._mutants, self._near, self._seeds = search, mutants, near, seeds

    def pytest_collection(self) -> None:
        """Properties try the same examples each time, and leave nothing in the working tree."""
        from hypothesis import Phase, settings  # here: its own plugin of pytest is to be the first

        phases = (Phase.explicit, Phase.generate)
        mine = settings(derandomize=True, database=None, phases=phases)
        settings.register_profile("mutants", mine)
        settings.load_profile("mutants")

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        items = session.items
        stages = [
            Stage("nearest", [each for each in items if each.path in self._near]),
            Stage("seeds", range(self._seeds)),
            Stage("wider", [each for each in items if each.path not in self._near]),
        ]
        self._search.run(self._mutants, stages)
        return True


def report(verdicts: Sequence[Verdict]) -> int:
    """Print a line for each mutant, the survivors last; how many of those have no reason."""
    reasons, totals = explained(EXPLAINED), Counter[str]()
    rows = list[tuple[int, str]]()
    for verdict in verdicts:
        mutant, reason = verdict.mutant, reasons.get(verdict.mutant.key)
        if verdict.killer:
            order, what = 0, f"{verdict.killer}: {verdict.by}"
            totals[
                "by deadline" if verdict.by.startswith((DEADLINE, CRASH)) else verdict.killer
            ] += 1
        elif reason:
            order, what = 1, f"explained: {reason}"
            totals["explained"] += 1
        elif not verdict.reached:
            order, what = 2, "NOT REACHED by any of these cases"
            totals["not reached"] += 1
        else:
            order, what = 3, f"SURVIVED {verdict.run} of {verdict.reached} cases that reach it"
            totals["survived"] += 1
        place = f"{mutant.place} {mutant.function}"
        rows.append((order, f"{place}\n    {mutant.operator}: {mutant.diff()}\n    {what}"))
    print(*(text for _, text in sorted(rows)), sep="\n")
    said = ", ".join(f"{count} {what}" for what, count in sorted(totals.items()))
    print(f"{len(verdicts)} mutants: {said}")
    return totals["survived"] + totals["not reached"]


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.mutants", description=__doc__)
    parser.add_argument("--sample", type=int, default=300, help="how many mutants")
    parser.add_argument("--seed", type=int, default=1, help="which of them")
    parser.add_argument("--at", nargs="+", help="only those at these places: PATH:LINE, or PATH")
    parser.add_argument("--packages", help=f"in these (default: {' '.join(PACKAGES)})")
    parser.add_argument("--seeds", type=int, default=20, help="seeds of the simulator")
    parser.add_argument("--seeds-only", action="store_true", help="only the simulator is to notice")
    parser.add_argument("--nearest-only", action="store_true", help="only the nearest tests are")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="processes")
    parser.add_argument("--seconds", type=float, default=60, help="of tests, per mutant and stage")
    parser.add_argument("--survivors-max", type=int, default=0, help="the exit code is 1 above")
    arguments = parser.parse_args()
    packages = SIMULATED if arguments.seeds_only else PACKAGES
    if arguments.packages:
        packages = arguments.packages.split()
    mutants = draw(PACKAGE, packages, arguments.seed, arguments.sample)
    if arguments.at:
        mutants = [each for each in mutants if {each.path, each.place} & set(arguments.at)]
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # the children end first
    started, aside = time.monotonic(), os.fdopen(os.dup(2), "w")

    def tell(what: str) -> None:
        print(f"{time.monotonic() - started:6.0f} s {what}", file=aside, flush=True)

    search = Search(PACKAGE, arguments.jobs, arguments.seconds, tell)
    if arguments.seeds_only:
        with contextlib.suppress(KeyboardInterrupt, SystemExit):  # pytest does the same
            search.run(mutants, [Stage("seeds", range(arguments.seeds))])
    else:
        near = nearest(mutants)
        paths = sorted(near) if arguments.nearest_only else _tests()
        plugin = Plugin(search, mutants, near, 0 if arguments.nearest_only else arguments.seeds)
        options = ["-q", "-s", "-p", "no:cacheprovider", "--no-summary", f"--rootdir={ROOT}"]
        with tempfile.TemporaryDirectory() as place:
            os.environ["HYPOTHESIS_STORAGE_DIRECTORY"] = place
            os.environ["OMP_NUM_THREADS"] = "1"  # torch's threads do not survive a fork
            code = pytest.main([*options, *map(str, paths)], plugins=[search, plugin])
        if not search.verdicts:
            raise SystemExit(f"pytest came to no search, and ended with {code}")
    sys.stdout.flush()
    survivors = report(search.verdicts)
    if not search.is_complete:
        print("the search was ended before its end: some survivors have not met all of their tests")
    return int(survivors > arguments.survivors_max or not search.is_complete)


if __name__ == "__main__":
    sys.exit(main())
