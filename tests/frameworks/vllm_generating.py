"""vLLM's engine in a process of its own, which generates when its parent asks:
`python -m tests.frameworks.vllm_generating PLACE WORKERS`. Its model's next token is the last one
plus the version.
"""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

from tests.frameworks import vllm_cpu
from tests.frameworks.test_vllm_worker import EXTENSION

LENGTH = 8  # tokens of a request
ROOT = Path(__file__).resolve().parents[2]
PLUGINS = vllm_cpu.ENVIRONMENT["VLLM_PLUGINS"] + ",cpu_faults,cpu_generation"


class Engine:
    """The process. A worker fails to finish its layers as long as a file in `place` has the number
    of its rank.
    """

    def __init__(self, place: Path, environment: dict[str, str], workers: int = 1) -> None:
        place.mkdir()
        self.place = place
        paths = [str(place), str(ROOT), os.environ.get("PYTHONPATH", "")]
        given = {
            **os.environ,
            **vllm_cpu.ENVIRONMENT,
            "VLLM_PLUGINS": PLUGINS,
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
            "PYTHONPATH": os.pathsep.join(filter(None, paths)),
            "TENSORHUB_TEST_FAULTS": str(place),
            **environment,
        }
        self._lock = threading.Lock()
        self._log = (place / "log").open("w")
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.frameworks.vllm_generating", str(place), f"{workers}"],
            env=given,
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

    def wait(self) -> None:
        self._process.wait(60)
        self._log.close()


def main(place: Path, workers: int) -> None:
    path = vllm_cpu.prepare(place)
    os.environ["VLLM_PLUGINS"] = PLUGINS
    from vllm import LLM, SamplingParams

    engine = {**vllm_cpu.ENGINE, "tensor_parallel_size": workers, "enable_prefix_caching": False}
    if workers > 1:
        engine["distributed_executor_backend"] = "mp"
    llm = LLM(model=path, worker_extension_cls=EXTENSION, **engine)
    sampling = SamplingParams(temperature=0.0, max_tokens=LENGTH, ignore_eos=True, detokenize=False)
    say("ready")
    for line in sys.stdin:
        method, _, arguments = line.strip().partition(" ")
        try:
            if method == "generate":
                say(generated(llm, sampling))
            else:
                llm.collective_rpc(method, kwargs=json.loads(arguments or "{}"))
                say("done")
        except Exception as error:
            say(f"{error}")
    os._exit(0)  # vLLM's objects need long to be freed


def generated(llm: Any, sampling: Any) -> list[int]:
    """The versions of a request's tokens."""
    (output,) = llm.generate({"prompt_token_ids": [0]}, sampling, use_tqdm=False)
    tokens = [0, *output.outputs[0].token_ids]
    size = vllm_cpu.LLAMA["vocab_size"]
    return [(after - before) % size for before, after in itertools.pairwise(tokens)]


def say(what: Any) -> None:
    sys.stdout.write(f"@{json.dumps(what)}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
