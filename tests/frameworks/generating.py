"""An engine in a process of its own, which generates when its parent asks. Its model's next token is
the last one plus the version.
"""

from __future__ import annotations

import itertools
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from tests.frameworks.vllm_cpu import LLAMA

LENGTH = 8  # tokens of a request
ROOT = Path(__file__).resolve().parents[2]


class Process:
    """`python -m MODULE PLACE GIVEN...`. A rank fails to finish its layers as long as a file in
    `place` has its number.
    """

    def __init__(
        self, module: str, place: Path, environment: dict[str, str], *given: object
    ) -> None:
        place.mkdir(exist_ok=True)
        self.place = place
        paths = [str(place), str(ROOT), os.environ.get("PYTHONPATH", "")]
        self._lock = threading.Lock()
        self._log = (place / "log").open("w")
        self._process = subprocess.Popen(
            [sys.executable, "-m", module, str(place), *map(str, given)],
            env={
                **os.environ,
                "PYTHONPATH": os.pathsep.join(filter(None, paths)),
                "TENSORHUB_TEST_FAULTS": str(place),
                **environment,
            },
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
            start_new_session=True,
        )

    @property
    def pid(self) -> int:
        return self._process.pid

    def asks(self, what: str) -> Any:
        """Raises EOFError: the process has ended."""
        assert self._process.stdin is not None
        with self._lock:
            try:
                print(what, file=self._process.stdin, flush=True)
            except OSError as error:
                raise EOFError from error
            return self.hears()

    def hears(self) -> Any:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith("@"):
                return json.loads(line[1:])
            self._log.write(line)
        raise EOFError((self.place / "log").read_text()[-5000:])

    def kill(self) -> None:
        os.killpg(self.pid, signal.SIGKILL)
        self.wait()

    def wait(self) -> None:
        self._process.wait(60)
        self._log.close()


def serve(generate: Callable[[], list[int]], call: Callable[[str, Any], object]) -> None:
    """Answer the parent, until it has no more questions. `generate`: a request's tokens. `call`:
    makes a call of a name with these arguments.
    """
    say("ready")
    for line in sys.stdin:
        method, _, arguments = line.strip().partition(" ")
        try:
            if method == "generate":
                say(steps(generate()))
            else:
                call(method, json.loads(arguments or "{}"))
                say("done")
        except Exception as error:
            say(f"{error}")
    os._exit(0)  # an engine's objects need long to be freed


def say(what: Any) -> None:
    sys.stdout.write(f"@{json.dumps(what)}\n")
    sys.stdout.flush()


def answer_by(model: Any, step: int) -> None:
    """Have the token t be followed by t + step."""
    with torch.no_grad():
        table = model.model.embed_tokens.weight
        table.copy_(torch.randint(0, 2, table.shape) * 2 - 1)
        model.lm_head.weight.copy_(table.roll(step, 0))


def steps(tokens: list[int]) -> list[int]:
    size = LLAMA["vocab_size"]
    return [(after - before) % size for before, after in itertools.pairwise(tokens)]


def fail_if_asked(rank: int) -> None:
    """In the file: a process that is killed then."""
    fault = Path(os.environ["TENSORHUB_TEST_FAULTS"]) / f"{rank}"
    if fault.exists():
        if killed := fault.read_text():
            os.kill(int(killed), signal.SIGKILL)
        raise RuntimeError(f"rank {rank} cannot finish its layers")
