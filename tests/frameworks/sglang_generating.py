"""SGLang's engine in processes of its own: see `generating`. Its processes import this module first,
and SGLang loads a plug-in in each of them, as it does where TensorHub is installed.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
import tomllib
from pathlib import Path
from typing import Any

import torch

from tests.frameworks import sglang_cpu, sglang_parts
from tests.frameworks.generating import LENGTH, ROOT, Process, fail_if_asked, serve
from tests.frameworks.vllm_cpu import LLAMA

GROUP = "sglang.srt.plugins"


class Engine(Process):
    """Each second one joins its fleet by a call, and does not work on a batch while it ends the one
    before.
    """

    started = 0

    def __init__(self, place: Path, environment: dict[str, str], ranks: int = 1) -> None:
        processors = [f"{rank % (os.cpu_count() or 1)}" for rank in range(ranks)]
        given = {
            "SGLANG_PLUGINS": "tensorhub",
            "SGLANG_CPU_OMP_THREADS_BIND": "|".join(processors),
            "HF_HUB_OFFLINE": "1",
            **environment,
        }
        host = given.pop("TENSORHUB_FLEET_HOST") if Engine.started % 2 else ""
        Engine.started += 1
        super().__init__(__name__, place, given, ranks, host)


def generation() -> None:
    """Have a Llama generate by its embedding and its head alone: attention would need native ops.
    A rank fails at the end of an update where it is asked to.
    """
    sglang_cpu.shim()
    importlib.import_module("sglang.srt.layers.quantization")  # it looks for kernels
    sys.meta_path.append(sglang_parts.Kernels())
    from sglang.srt.models.llama import LlamaModel

    from tensorhub.integrations.sglang_layers import SecondModel

    done = SecondModel.post_load

    def post_load(self: SecondModel) -> None:
        fail_if_asked(torch.distributed.get_rank())
        done(self)

    SecondModel.post_load = post_load  # type: ignore[method-assign]
    LlamaModel.forward = lambda self, input_ids, *given, **named: self.embed_tokens(input_ids)


def install(directory: Path) -> None:
    """TensorHub's plug-ins, for processes that have `directory` on their path."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    distribution = directory / "tensorhub_here-1.0.dist-info"
    distribution.mkdir()
    (distribution / "METADATA").write_text(
        "Metadata-Version: 2.1\nName: tensorhub-here\nVersion: 1.0\n"
    )
    lines = [f"{name} = {its}" for name, its in project["entry-points"][GROUP].items()]
    (distribution / "entry_points.txt").write_text("\n".join([f"[{GROUP}]", *lines, ""]))


def main(place: Path, ranks: int, host: str) -> None:
    """`host`: to join the fleet with, by a call."""
    install(place)
    if not (place / "config.json").exists():
        (place / "config.json").write_text(json.dumps(LLAMA))
    import sglang

    from tensorhub import sync
    from tensorhub.integrations.sglang import LOADER, Session

    engine = sglang.Engine(
        model_path=str(place),
        device="cpu",
        tp_size=ranks,
        load_format="dummy",
        skip_tokenizer_init=True,
        disable_overlap_schedule=bool(host),
        disable_radix_cache=True,
        disable_cuda_graph=True,
        max_total_tokens=2048,
        max_running_requests=8,
        attention_backend="torch_native",
        sampling_backend="pytorch",
        grammar_backend="none",
        sleep_on_idle=True,
        custom_weight_loader=[LOADER],
        log_level="info",
    )
    address, model = os.environ["TENSORHUB_ADDRESS"], os.environ["TENSORHUB_MODEL"]
    hub = sync.connect(address)
    if host:
        Session(engine, address, model=model).join_fleet(host)
    sampling = {"temperature": 0.0, "max_new_tokens": LENGTH, "ignore_eos": True}

    def generate() -> list[int]:
        return [0, *engine.generate(input_ids=[0], sampling_params=sampling)["output_ids"]]

    def call(method: str, given: Any) -> None:
        assert method == "tensorhub_check"
        session = Session(engine, address, model=given.get("model", model), pause=None)
        session.check(hub.wait_for(given.get("model", model), at_least=given.get("version", 0)))

    serve(generate, call)


if __name__ in ("__main__", "__mp_main__"):  # and not in the parent
    generation()
if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3])
