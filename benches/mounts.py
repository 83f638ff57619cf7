"""How fast is a mounted version read, and how much of that is FUSE's?

    python -m tests.frameworks --only-make fs
    sudo env PYTHONPATH=src:. .venv-frameworks/fs/bin/python -m benches.mounts --mib 512 --rounds 7

In turns, of the same bytes from one publisher, each into new memory: a `fetch`; fsspec; reads of a
new mount; and reads of a file that FUSE serves from the memory of a process, which is the least
that any mount takes. CPU seconds are those of the reader and of the process that mounts.
"""

from __future__ import annotations

import argparse
import os
import stat
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from tensorhub import sync
from tensorhub.fs import TensorHubFileSystem
from tests.frameworks.mounted import end, start
from tests.frameworks.publisher import publisher

MIB = 2**20
TENSORS = 16
FILE = "model.safetensors"
Took = tuple[float, float]  # seconds, and CPU seconds


def cpu_s(pid: int) -> float:
    user, system = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[11:13]
    return (int(user) + int(system)) / os.sysconf("SC_CLK_TCK")


def timed(call: Callable[[], object], served_by: int | None = None) -> Took:
    pids = [os.getpid(), *([] if served_by is None else [served_by])]
    cpu, began = sum(map(cpu_s, pids)), time.perf_counter()
    call()
    return time.perf_counter() - began, sum(map(cpu_s, pids)) - cpu


def read(path: Path) -> None:
    into: memoryview = torch.empty(path.stat().st_size, dtype=torch.uint8).numpy().data
    with path.open("rb", buffering=0) as file:
        while into and (count := file.readinto(into)):
            into = into[count:]


def serve(directory: Path, mib: int) -> None:
    """The floor: a file of so many MiB, whose bytes are there."""
    from tensorhub.fs import mounting

    held = memoryview(bytearray(b"1") * (mib * MIB))

    class Floor(mounting.Files):
        def __init__(self) -> None:
            self.mounted = threading.Event()

        def getattr(self, path: str, fh: int | None = None) -> dict[str, int]:
            if path == "/":
                return {"st_mode": stat.S_IFDIR | 0o555, "st_nlink": 2}
            return {"st_mode": stat.S_IFREG | 0o444, "st_size": len(held), "st_nlink": 1}

        def open(self, path: str, flags: int) -> int:
            return 1

        def read(self, path: str, into: memoryview, offset: int, fh: int) -> int:
            piece = held[offset : offset + len(into)]
            into[: len(piece)] = piece
            return len(piece)

        def release(self, path: str, fh: int) -> int:
            return 0

    mount = mounting.Mount(Floor(), directory)
    print("mounted", flush=True)
    sys.stdin.read()
    mount.unmount()


@contextmanager
def floor(directory: Path, mib: int) -> Iterator[int]:
    command = [sys.executable, "-m", "benches.mounts", "--mib", f"{mib}", "--serve", str(directory)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        yield process.pid


def measure(mib: int, rounds: int) -> None:
    took: dict[str, list[Took]] = {}
    with tempfile.TemporaryDirectory() as place, publisher(Path(place)) as trainer:
        directory = Path(place) / "mount"
        directory.mkdir()
        size = mib * MIB // 4 // TENSORS
        trainer.publish({f"layers.{n}": torch.full((size,), float(n)) for n in range(TENSORS)})

        def fetch() -> Took:
            with sync.connect(trainer.address) as hub:
                return timed(lambda: hub.fetch("m"))

        def fsspec() -> Took:
            fs = TensorHubFileSystem(trainer.address, skip_instance_cache=True)
            try:
                with fs.open(f"m/1/{FILE}") as file:
                    return timed(file.read)
            finally:
                fs.close()

        def mount() -> Took:
            process = start(trainer.address, "m@1", directory)
            try:
                return timed(lambda: read(directory / FILE), process.pid)
            finally:
                end(process, directory)

        def fuse() -> Took:
            with floor(directory, mib) as pid:
                return timed(lambda: read(directory / FILE), pid)

        ways: dict[str, Callable[[], Took]] = {
            "fetch": fetch,
            "fsspec": fsspec,
            "mount": mount,
            "FUSE alone": fuse,
        }
        for number in range(rounds):
            for name in ways if number % 2 == 0 else reversed(ways):
                took.setdefault(name, []).append(ways[name]())
    report(took)


def report(took: dict[str, list[Took]]) -> None:
    for name, turns in took.items():
        seconds, cpu = zip(*turns, strict=True)
        print(
            f"{name:12} {statistics.median(seconds):7.3f} s ({min(seconds):.3f} to {max(seconds):.3f})   "
            f"CPU {statistics.median(cpu):.3f} s ({min(cpu):.3f} to {max(cpu):.3f})"
        )
    for name in ("fsspec", "mount"):
        rows = [
            (way[part] / fetch[part], way[part] / (fetch[part] + fuse[part]))
            for part in (0, 1)
            for way, fetch, fuse in zip(took[name], took["fetch"], took["FUSE alone"], strict=True)
        ]
        half = len(rows) // 2
        for unit, found in (("seconds", rows[:half]), ("CPU", rows[half:])):
            of_fetch, of_both = map(statistics.median, zip(*found, strict=True))
            print(f"{name}, {unit}: {of_fetch:.2f} of a fetch, {of_both:.2f} of fetch + FUSE alone")
    print("load {:.0f} {:.0f} {:.0f}".format(*os.getloadavg()))


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benches.mounts", description=__doc__)
    parser.add_argument("--mib", type=int, default=512)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--serve", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.serve is not None:
        serve(arguments.serve, arguments.mib)
    else:
        measure(arguments.mib, arguments.rounds)


if __name__ == "__main__":
    main()
