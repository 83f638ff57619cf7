"""How long does a vLLM engine that starts again take to have its weights?

    python -m tests.frameworks --only-make vllm
    PYTHONPATH=src:. .venv-frameworks/vllm/bin/python -m benches.restarts --mib 1024 --rounds 5

In turns, each in a new process: vLLM loads a safetensors file, which is in the page cache; and the
worker extension takes the same weights from `tensorhub seed` on this machine, after vLLM's load
format "dummy" has made the model. The trainer is gone. The times are those of the worker's
`load_model`, without imports, and of what TensorHub does after it. "dummy" draws random numbers,
which takes a processor longer than a file does, and a GPU some milliseconds: so both are told.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from benches.frameworks import llama_sizes
from tests.frameworks import vllm_cpu

EXTENSION = "tensorhub.integrations.vllm_worker"
WAYS = {"vLLM's loader": "auto", "host memory": "dummy"}


def start(path: Path, load_format: str) -> None:
    """Start an engine, and print how long its worker loads."""
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    sys.path.insert(0, str(path))
    vllm_cpu.shim()
    import importlib

    importlib.import_module(EXTENSION)
    from vllm import LLM
    from vllm.v1.worker.gpu_worker import Worker

    from tensorhub.integrations import vllm_start

    def timed(name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def its(*given: Any, **named: Any) -> Any:
            began = time.perf_counter()
            result = call(*given, **named)
            print(f"\nseconds {name} {time.perf_counter() - began}", flush=True)
            return result

        return its

    Worker.load_model = timed("load", Worker.load_model)
    vllm_start.start = timed("take", vllm_start.start)
    settings = {**vllm_cpu.ENGINE, "load_format": load_format}
    llm = LLM(str(path), worker_extension_cls=f"{EXTENSION}.WorkerExtension", **settings)
    if load_format == "dummy":
        (state,) = llm.collective_rpc("tensorhub_state")
        assert state["version"] == 1, state


def seconds(path: Path, load_format: str, address: str) -> dict[str, float]:
    """Of `load_model`, and of what follows where TensorHub has it to do."""
    environment = {**os.environ, **vllm_cpu.ENVIRONMENT}
    if load_format == "dummy":
        environment |= {"TENSORHUB_ADDRESS": address, "TENSORHUB_MODEL": "actor"}
    command = [sys.executable, "-m", "benches.restarts", "--start", f"{path}", load_format]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    found = [line.split()[1:] for line in done.stdout.splitlines() if line.startswith("seconds ")]
    if done.returncode or len(found) != (2 if load_format == "dummy" else 1):
        raise RuntimeError(f"the engine did not start: {done.stderr[-4000:]}")
    return {name: float(its) for name, its in found}


def measure(mib: int, rounds: int) -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    from tensorhub import sync

    config = {**vllm_cpu.LLAMA, **llama_sizes(mib)}
    took: dict[str, list[float]] = {"vLLM's loader": [], "dummy": [], "host memory": []}
    with tempfile.TemporaryDirectory() as place, sync.serve() as coordinator:
        path = Path(place)
        vllm_cpu.install_plugins(path)
        (path / "config.json").write_text(json.dumps(config))
        model = LlamaForCausalLM(LlamaConfig(**config)).to(torch.bfloat16)
        vllm_cpu.write_checkpoint(path, model.state_dict())
        command = [sys.executable, "-m", "tensorhub", "seed", "actor", "--host-memory", "4GiB"]
        with subprocess.Popen(
            [*command, "--address", coordinator.address], stdout=subprocess.PIPE
        ) as seed:
            try:
                with sync.connect(coordinator.address) as trainer:
                    trainer.register("actor", model).publish(1)
                    assert seed.stdout is not None
                    seed.stdout.readline()
                nbytes = sum(each.nbytes for each in model.state_dict().values())
                del model
                for number in range(rounds):
                    for name in WAYS if number % 2 == 0 else reversed(WAYS):
                        its = seconds(path, WAYS[name], coordinator.address)
                        took["dummy" if "take" in its else name].append(its["load"])
                        if "take" in its:
                            took[name].append(its["take"])
            finally:
                seed.terminate()
    for name, found in took.items():
        print(f"{name:16} {statistics.median(found):7.3f} s ({min(found):.3f} to {max(found):.3f})")
    own, dummy, ours = took.values()
    take = statistics.median([b / a for a, b in zip(own, ours, strict=True)])
    all_s = statistics.median([(b + c) / a for a, b, c in zip(own, dummy, ours, strict=True)])
    print(
        f"{nbytes >> 20} MiB: from host memory in {take:.2f} times the time of vLLM's loader, with "
        f'"dummy" in {all_s:.2f}'
    )
    print("load {:.0f} {:.0f} {:.0f}".format(*os.getloadavg()))


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benches.restarts", description=__doc__)
    parser.add_argument("--mib", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--start", nargs=2, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.start is not None:
        path, load_format = arguments.start
        start(Path(path), load_format)
    else:
        measure(arguments.mib, arguments.rounds)


if __name__ == "__main__":
    main()
