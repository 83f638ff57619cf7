"""A coordinator and a publisher as a process of their own: `python -m tests.frameworks.publisher`.

A program that holds Python's lock while it waits for a page of a mounted file cannot publish the
file's bytes at the same time, so tests of mounts publish elsewhere.
"""

from __future__ import annotations

import contextlib
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from tensorhub import sync
from tensorhub.api.tools import register_memory
from tensorhub.memory.files import FileMemory
from tensorhub.runtime.loop_thread import finish_blocking


class Publisher:
    """The process. `address`: of its coordinator."""

    def __init__(self, process: subprocess.Popen[str], place: Path) -> None:
        self._process = process
        self._place = place
        self.address = self._answer()

    def publish(self, tensors: Mapping[str, torch.Tensor], version: int = 1) -> None:
        """These tensors, from its memory, as model m."""
        path = self._place / f"{version}.tensors"
        save_file({name: each.detach().contiguous() for name, each in tensors.items()}, path)
        self._say("tensors", str(version), str(path))

    def publish_file(self, path: Path, version: int = 1) -> None:
        """A file, in place, as model m."""
        self._say("file", str(version), str(path))

    def unpublish(self, version: int = 1) -> None:
        self._say("unpublish", str(version), "")

    def _say(self, *words: str) -> None:
        assert self._process.stdin is not None
        print(*words, sep="\t", file=self._process.stdin, flush=True)
        assert self._answer() == "done"

    def _answer(self) -> str:
        assert self._process.stdout is not None
        return self._process.stdout.readline().strip()


@contextlib.contextmanager
def publisher(place: Path) -> Iterator[Publisher]:
    """The process, which is ended at the end of the block, if it runs then."""
    with subprocess.Popen(
        [sys.executable, "-m", __name__],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        try:
            yield Publisher(process, place)
        finally:
            process.kill()


def main() -> None:
    with sync.serve() as coordinator, sync.connect(coordinator.address, name="trainer") as hub:
        print(coordinator.address, flush=True)
        published: dict[str, sync.Weights] = {}
        for line in sys.stdin:
            what, version, path = line.rstrip("\n").split("\t")
            if what == "tensors":
                published[version] = hub.register("m", load_file(path))
            elif what == "file":
                memory = FileMemory(Path(path))
                made = finish_blocking(register_memory(hub._async, "m", memory))
                published[version] = sync.Weights(made)
            if what == "unpublish":
                published[version].unpublish()
            else:
                published[version].publish(int(version))
            print("done", flush=True)


if __name__ == "__main__":
    main()
