"""Backends that go wrong, each in its manner. STANDIN_NOTES names a file for the ids of the
processes they start.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from benches.comparison.backends import Backend, Kind


def backend(case: str) -> Backend:
    sleeping = [sys.executable, "-c", "import time; time.sleep(600)"]
    if case in ("hangs", "dies") and "benches.comparison.bench_process" in " ".join(
        sys.orig_argv
    ):  # in a bench process, before torch
        child = subprocess.Popen(sleeping)
        with open(os.environ["STANDIN_NOTES"], "a") as notes:
            notes.write(f"{child.pid}\n")
        if case == "hangs":
            time.sleep(600)
        sys.stderr.write("the last\nwords\n")
        sys.stderr.flush()
        os.abort()
    return Backend(f"{__name__}:{case}", case, Kind.PEER, __name__)


def versions() -> dict[str, str]:
    return {}


def __getattr__(name: str) -> Any:
    """The sides of the case `wrong`: only they need torch."""
    if name not in ("Source", "Receiver"):
        raise AttributeError(name)
    from benches.comparison.backends.base import Side
    from benches.comparison.backends.files import Receiver, Source

    class WrongSource(Source):
        def offer(self, number: int) -> Any:
            path = Path(super().offer(number))
            with path.open("r+b") as file:
                file.seek(-70_000, os.SEEK_END)  # neither of the bytes of a tensor that are sampled
                file.write(b"\xff\x00\xff\x00")
            return str(path)

    found: type[Side] = WrongSource if name == "Source" else Receiver
    return found
