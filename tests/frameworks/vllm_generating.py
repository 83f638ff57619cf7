"""vLLM's engine in a process of its own: see `generating`."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

from tests.frameworks import vllm_cpu
from tests.frameworks.generating import LENGTH, Process, serve
from tests.frameworks.test_vllm_worker import EXTENSION

PLUGINS = vllm_cpu.ENVIRONMENT["VLLM_PLUGINS"] + ",cpu_faults,cpu_generation"


class Engine(Process):
    def __init__(self, place: Path, environment: dict[str, str], workers: int = 1) -> None:
        given = {
            **vllm_cpu.ENVIRONMENT,
            "VLLM_PLUGINS": PLUGINS,
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
            **environment,
        }
        super().__init__(__name__, place, given, workers)


def main(place: Path, workers: int) -> None:
    path = vllm_cpu.prepare(place)
    os.environ["VLLM_PLUGINS"] = PLUGINS
    from vllm import LLM, SamplingParams

    engine = {**vllm_cpu.ENGINE, "tensor_parallel_size": workers, "enable_prefix_caching": False}
    if workers > 1:
        engine["distributed_executor_backend"] = "mp"
    llm = LLM(model=path, worker_extension_cls=EXTENSION, **engine)
    sampling = SamplingParams(temperature=0.0, max_tokens=LENGTH, ignore_eos=True, detokenize=False)

    def generate() -> list[int]:
        (output,) = llm.generate({"prompt_token_ids": [0]}, sampling, use_tqdm=False)
        return [0, *output.outputs[0].token_ids]

    def call(method: str, given: Any) -> None:
        llm.collective_rpc(method, kwargs=given)

    serve(generate, call)


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
