"""Runs the targets under atheris: `python -m tests.fuzz --runs 1000000 --jobs 2`. See
docs/simulation.md.

Each target is a process of its own, with its share of the inputs, bounded memory and a bounded time
for one input. It starts from the corpus, and writes what it finds to a temporary directory, of
which `--grow` keeps the least that reaches as much.
"""

from __future__ import annotations

import argparse
import atexit
import importlib
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

SOURCE = "tensorhub"
INPUT_S_MAX = 30  # of one input: the machine may be busy
RSS_MB_MAX = 2048


def fuzz(name: str, options: Sequence[str]) -> None:
    """Be the process of one target; libFuzzer ends it."""
    import atheris

    with atheris.instrument_imports(include=[SOURCE]):
        targets = importlib.import_module("tests.fuzz.targets")
    with tempfile.NamedTemporaryFile("w", prefix="fuzz-", suffix=".sh", delete=False) as again:
        # What a merge starts for itself, so that an input which ends the process ends only that
        # one.
        again.write(
            f'#!/bin/sh\nexec {shlex.quote(sys.executable)} -m tests.fuzz --one {name} -- "$@"\n'
        )
    os.chmod(again.name, 0o700)
    atexit.register(os.unlink, again.name)
    atheris.Setup([again.name, *options], targets.TARGETS[name].run)
    atheris.Fuzz()


def start(name: str, options: Sequence[str], log: Path) -> int:
    """One process of libFuzzer, to its end; its exit code."""
    with log.open("wb") as output:
        command = [sys.executable, "-m", "tests.fuzz", "--one", name, "--", *options]
        return subprocess.run(
            command, stdin=subprocess.DEVNULL, stdout=output, stderr=output
        ).returncode


def run_target(name: str, runs: int, seed: int, place: Path, failed: list[str]) -> None:
    """Run one target, and print what it has reached."""
    from tests.fuzz.targets import CORPUS, TARGETS

    target, found, log = TARGETS[name], place / name, place / f"{name}.log"
    found.mkdir()
    (CORPUS / name).mkdir(parents=True, exist_ok=True)
    limits = [
        f"-timeout={INPUT_S_MAX}",
        f"-rss_limit_mb={RSS_MB_MAX}",
        f"-max_len={target.bytes_max}",
        "-len_control=0",
    ]
    options = [
        f"-runs={runs}",
        f"-seed={seed}",
        *limits,
        "-print_final_stats=1",
        f"-artifact_prefix={place}/{name}-",
    ]
    started = time.monotonic()
    code = start(name, [*options, str(found), str(CORPUS / name)], log)
    seconds, said = time.monotonic() - started, log.read_text(errors="replace")
    units = re.findall(r"number_of_executed_units:\s*(\d+)", said)
    reached = re.findall(r"cov: (\d+) ft: (\d+) corp: (\d+)", said) or [("?", "?", "?")]
    edges, features, inputs = reached[-1]
    count = units[-1] if units else "?"
    print(
        f"{name:13}{count:>9} inputs {edges:>6} edges {features:>7} features {inputs:>6} kept "
        f"{seconds:8.0f} s",
        flush=True,
    )
    if code:
        failed.append(name)
        print(f"{said[-6000:]}\n{name} FAILED: its input is {place}/{name}-*", flush=True)


def grow(place: Path) -> None:
    """Of the corpus and what was found, keep the fewest and smallest inputs that reach as much."""
    from tests.fuzz.targets import CORPUS, TARGETS

    for name in TARGETS:
        merged, found = place / f"{name}-merged", place / name
        if not found.exists():
            continue
        merged.mkdir()
        code = start(
            name,
            ["-set_cover_merge=1", str(merged), str(CORPUS / name), str(found)],
            place / f"{name}-merge.log",
        )
        if code or not any(merged.iterdir()):
            raise SystemExit(f"the corpus of {name} could not be merged: {place}/{name}-merge.log")
        shutil.rmtree(CORPUS / name)
        shutil.move(merged, CORPUS / name)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    parser.add_argument("--runs", type=int, default=100_000, help="inputs of all targets together")
    parser.add_argument("--jobs", type=int, default=2, help="processes at a time")
    parser.add_argument("--seed", type=int, default=1, help="the same seed tries the same inputs")
    parser.add_argument(
        "--target", action="append", help="only this one, with all inputs (may be repeated)"
    )
    parser.add_argument("--grow", action="store_true", help="add what reaches more to the corpus")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    parser.add_argument("options", nargs="*", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.one:
        fuzz(arguments.one, arguments.options)
        return
    run_all(arguments)


def run_all(arguments: argparse.Namespace) -> None:
    from tests.fuzz.targets import TARGETS

    names = arguments.target or list(TARGETS)
    place, failed, started = (
        Path(tempfile.mkdtemp(prefix="tensorhub-fuzz-")),
        list[str](),
        time.monotonic(),
    )
    shares = {name: TARGETS[name].share for name in names}
    with ThreadPoolExecutor(arguments.jobs) as pool:
        # the slowest first, so that they do not come last alone
        for name in sorted(names, key=lambda name: shares[name]):
            runs = -(-arguments.runs * shares[name] // sum(shares.values()))
            pool.submit(run_target, name, runs, arguments.seed, place, failed)
    print(f"{len(names)} targets in {time.monotonic() - started:.0f} s")
    if failed:
        raise SystemExit(
            f"failed: {', '.join(failed)}; run `python -m tests.fuzz --one NAME -- INPUT` to "
            f"repeat one"
        )
    if arguments.grow:
        grow(place)
    shutil.rmtree(place)


if __name__ == "__main__":
    main()
