"""What serving a file costs its publisher, and how fast a version comes back as a file.

`tensorhub publish` serves a file of random bytes from a process of its own, one reader fetches it
into its memory, and `tensorhub fetch` writes it to a file. The publisher's anonymous memory is
sampled all the while: the file itself is only mapped. A copy of the file by `shutil.copyfile` and
fsync, in the same directory and round, is the yardstick. See README.md.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from safetensors.torch import save_file

from benches.comparison.facts import facts
from benches.memory_use import Sampler
from benches.one_to_n import spread
from benches.remotes import Remote
from benches.workers import coordinator_main
from tensorhub import sync

MIB = 2**20
TENSORS = 64  # of each file
START_S = 60.0

Figures = dict[str, list[float]]


class Publisher:
    """A `tensorhub publish` process; its anonymous resident memory is sampled until it is ended."""

    def __init__(self, address: str, path: Path, model: str) -> None:
        command = [
            sys.executable,
            "-m",
            "tensorhub",
            "publish",
            str(path),
            "--model",
            model,
            "--quiet",
        ]
        started = time.perf_counter()
        environment = {**os.environ, "TENSORHUB_ADDRESS": address}
        self._process = subprocess.Popen(command, stdout=subprocess.PIPE, env=environment)
        self._sampler = Sampler([self._process.pid])
        assert self._process.stdout is not None
        if not self._process.stdout.readline():
            raise RuntimeError("tensorhub publish ended; its reason is above")
        self.visible_s = time.perf_counter() - started

    @property
    def anonymous_bytes_max(self) -> int:
        return self._sampler.most[self._process.pid]

    def end(self) -> None:
        self._sampler.end()
        self._process.terminate()
        self._process.wait(START_S)
        assert self._process.stdout is not None
        self._process.stdout.close()


@contextmanager
def published(address: str, path: Path, model: str) -> Iterator[Publisher]:
    publisher = Publisher(address, path, model)
    try:
        yield publisher
    finally:
        publisher.end()


def make_file(path: Path, nbytes: int) -> None:
    torch.manual_seed(nbytes)
    each = nbytes // TENSORS // 4
    save_file(
        {
            f"layers.{n}.weight": torch.randint(-(2**31), 2**31 - 1, (each,), dtype=torch.int32)
            for n in range(TENSORS)
        },
        path,
    )


def one_round(address: str, folder: Path, path: Path, model: str, figures: Figures) -> None:
    def note(name: str, value: float) -> None:
        figures.setdefault(name, []).append(value)

    with published(address, path, model) as publisher:
        note("seconds until visible", publisher.visible_s)
        with sync.connect(address) as hub:
            report = hub.fetch(model).report
            note("fetch into memory, s", report.seconds)
        out, copy = folder / "out.safetensors", folder / "copy.safetensors"
        command = [
            sys.executable,
            "-m",
            "tensorhub",
            "fetch",
            model,
            "--out",
            str(out),
            "--quiet",
            "--json",
        ]
        done = subprocess.run(
            command,
            check=True,
            stdout=subprocess.PIPE,
            env={**os.environ, "TENSORHUB_ADDRESS": address},
        )
        note("fetch into a file, s", json.loads(done.stdout)["seconds"])
        started = time.perf_counter()
        shutil.copyfile(path, copy)
        with copy.open("rb") as file:
            os.fsync(file.fileno())
        note("copy and fsync, s", time.perf_counter() - started)
        if out.read_bytes() != path.read_bytes():
            raise RuntimeError("the fetched file is another one")
        out.unlink()
        copy.unlink()
    note("publisher's anonymous MiB", publisher.anonymous_bytes_max / MIB)
    note(
        "copy / fetch into a file",
        figures["copy and fsync, s"][-1] / figures["fetch into a file, s"][-1],
    )


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benches files", description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument(
        "--mib", type=int, nargs="+", default=[64, 256, 1024], help="the files' sizes"
    )
    parser.add_argument(
        "--folder",
        type=Path,
        help="where the files are made; default: the system's temporary directory",
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write facts and rows")
    options = parser.parse_args(arguments)
    if min(options.rounds, *options.mib) < 1:
        parser.error("give at least 1 round and 1 MiB")
    known = facts()
    for name, value in known.items():
        print(f"{name}: {value}")
    rows: list[dict[str, object]] = []
    coordinator = Remote("coordinator", coordinator_main)
    try:
        address = coordinator.hear()
        with tempfile.TemporaryDirectory(dir=options.folder) as name:
            for mib in options.mib:
                path, figures = Path(name) / "model.safetensors", Figures()
                make_file(path, mib * MIB)
                for number in range(options.rounds):
                    one_round(address, Path(name), path, f"model-{mib}-{number}", figures)
                rows.append(
                    {"MiB": mib, **{name: spread(values) for name, values in figures.items()}}
                )
    finally:
        coordinator.end()
    show(rows)
    if options.json is not None:
        options.json.write_text(json.dumps({"machine": known, "rows": rows}))
    return 0


def show(rows: list[dict[str, object]]) -> None:
    for name in list(rows[0])[1:]:
        cells = []
        for row in rows:
            value = row[name]
            assert isinstance(value, list)
            middle, low, high = value
            cells.append(f"{middle:.2f} [{low:.2f}-{high:.2f}]")
        print(f"{name:<28}" + "".join(f"{cell:>24}" for cell in cells))
    sizes = "".join(f"{str(row['MiB']) + ' MiB':>24}" for row in rows)
    print(f"{'of a file of':<28}{sizes}\n\nMedian [least-largest] of the rounds.")
