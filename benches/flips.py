"""One version for all: how long do engines stop for a flip, after the last vote?

Two engines in processes of their own, of so many MiB, beside two of 16 bytes, in turns: what the
small ones take, calls and records take. With `--vllm` or `--sglang`, in that environment, two
offline engines of it as well. `OneVersion.flip_s` is timed, and its steps.

    python -m benches flips --mib 128 --rounds 20
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch

from tensorhub import sync
from tensorhub.integrations.one_version_engine import Engine
from tensorhub.integrations.one_version_trainer import OneVersion

ENGINES, WAIT_S = 2, 600.0


def llama(mib: int) -> dict[str, Any]:
    from tests.frameworks import vllm_cpu

    sizes = {
        "hidden_size": 1024,
        "intermediate_size": 4096,
        "num_attention_heads": 16,
        "num_key_value_heads": 16,
        "head_dim": 64,
        "num_hidden_layers": max(1, mib // 32),
    }
    return {**vllm_cpu.LLAMA, **sizes}


def module_of(way: str, mib: int) -> torch.nn.Module:
    if way == "sglang":
        from tests.frameworks import sglang_cpu

        sglang_cpu.shim()  # transformers wants torchvision
    if way in ("vllm", "sglang"):
        from transformers import LlamaConfig, LlamaForCausalLM

        model: torch.nn.Module = LlamaForCausalLM(LlamaConfig(**llama(mib))).to(torch.bfloat16)
        return model
    module = torch.nn.Module()
    for number in range(16 if way == "plain" else 1):
        values = torch.zeros(mib * 2**14 if way == "plain" else 4)
        module.register_parameter(f"{number}", torch.nn.Parameter(values, requires_grad=False))
    return module


def engine(address: str, way: str, mib: int) -> None:
    """Until the end of its input."""
    if way == "vllm":
        from tests.frameworks import vllm_cpu

        os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
        path = vllm_cpu.prepare(Path(tempfile.mkdtemp()), llama(mib))
        from vllm import LLM

        extension = "tensorhub.integrations.vllm_worker.WorkerExtension"
        settings = {**vllm_cpu.ENGINE, "enable_prefix_caching": False}
        llm = LLM(model=path, worker_extension_cls=extension, **settings)
        llm.collective_rpc("tensorhub_one_version", kwargs={"address": address, "model": way})
        print("ready", flush=True)
        sys.stdin.read()
        return
    with sync.connect(address) as hub:
        its = Engine(hub, way, module_of(way, mib))
        print("ready", flush=True)
        sys.stdin.read()
        its.close()


def started(stack: ExitStack, address: str, way: str, mib: int) -> Callable[[], object]:
    """Waits until the engine is ready."""
    if way == "sglang":
        return sglang_started(stack, address, mib)
    command = [sys.executable, "-m", "benches.flips", address, way, f"{mib}"]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    stack.callback(process.wait)
    assert process.stdin is not None
    assert process.stdout is not None
    stack.callback(process.stdin.close)
    says = process.stdout

    def wait() -> None:
        while (line := says.readline()) != "ready\n":
            assert line, "an engine has ended"

    return wait


def sglang_started(stack: ExitStack, address: str, mib: int) -> Callable[[], object]:
    from tests.frameworks.sglang_generating import Engine

    place = Path(tempfile.mkdtemp()) / "engine"
    place.mkdir()
    (place / "config.json").write_text(json.dumps(llama(mib)))
    environment = {
        "TENSORHUB_ADDRESS": address,
        "TENSORHUB_MODEL": "sglang",
        "TENSORHUB_FLEET_HOST": "127.0.0.1",
    }
    engine = Engine(place, environment)
    stack.callback(engine.kill)
    return engine.hears


class Fleet:
    """A trainer and its engines. `times`: of each step, by name, and of each flip."""

    def __init__(self, stack: ExitStack, address: str, way: str, mib: int) -> None:
        self.hub = stack.enter_context(sync.connect(address))
        self.waits = [started(stack, address, way, mib) for _ in range(ENGINES)]
        self.module, self.way = module_of(way, mib), way
        self.weights = self.hub.register(way, self.module)
        self.fleet = OneVersion(self.hub, way)
        stack.callback(self.fleet.close)
        self.times: dict[str, list[float]] = defaultdict(list)
        does = self.fleet._do

        def timed(step: Any) -> Any:
            began = time.perf_counter()
            answer = does(step)
            self.times[type(step).__name__].append(time.perf_counter() - began)
            return answer

        self.fleet._do = timed  # type: ignore[method-assign]

    def update(self, version: int) -> None:
        with self.weights.mutate(version), torch.no_grad():
            for each in self.module.parameters():
                each.add_(1)
        report = self.fleet.update(self.hub.wait_for(self.way, at_least=version))
        assert len(report.done) == ENGINES, report
        self.times["flip"].append(self.fleet.flip_s)


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m benches flips", description=__doc__)
    parser.add_argument("--mib", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=20)
    for way in ("vllm", "sglang"):
        parser.add_argument(f"--{way}", action="store_true")
    its = parser.parse_args(arguments)
    ways = ["tiny", "plain", *(way for way in ("vllm", "sglang") if vars(its)[way])]
    with ExitStack() as stack:
        coordinator = stack.enter_context(sync.serve(token=""))
        fleets = [Fleet(stack, coordinator.address, way, its.mib) for way in ways]
        for wait in [wait for each in fleets for wait in each.waits]:
            wait()
        for version in range(1, its.rounds + 2):
            for each in fleets if version % 2 else reversed(fleets):
                each.update(version)
        tiny = fleets[0].times["flip"][1:]
        for each in fleets:
            print(f"{each.way}: load {os.getloadavg()[0]:.0f}")
            for name, found in each.times.items():
                ms = [1000 * second for second in found[1:]]  # the first one makes plans
                print(f"  {name:8} {statistics.median(ms):8.1f} ms   [{min(ms):.1f}-{max(ms):.1f}]")
            ratios = [one / other for one, other in zip(each.times["flip"][1:], tiny, strict=True)]
            print(
                f"  flip / tiny's: {statistics.median(ratios):.2f} "
                f"[{min(ratios):.2f}-{max(ratios):.2f}]"
            )
    return 0


if __name__ == "__main__":
    engine(sys.argv[1], sys.argv[2], int(sys.argv[3]))
