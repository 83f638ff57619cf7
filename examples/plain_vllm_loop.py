"""A plain training loop that keeps a vLLM engine's weights up to date, by TensorHub.

    VLLM_SERVER_DEV_MODE=1 vllm serve MODEL \\
        --worker-extension-cls tensorhub.integrations.vllm_worker.WorkerExtension
    python examples/plain_vllm_loop.py http://127.0.0.1:8000 MODEL

MODEL is the directory of a model for transformers, or its configuration alone (with `--load-format
dummy` at the server): the trainer begins with random weights. Its steps stand for yours.

Needs transformers here, vLLM 0.22 or newer there, and `pip install 'tensorhub-ros[torch]'` on both.
"""

import sys
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from tensorhub import sync
from tensorhub.integrations.vllm_session import ExtensionClient, Session, Settings


def train_one_step(model: torch.nn.Module) -> None:
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1 - 1e-3)


def main(server: Any, path: str) -> torch.nn.Module:
    config = AutoConfig.from_pretrained(path)
    model: torch.nn.Module = AutoModelForCausalLM.from_config(config).to(torch.bfloat16)
    with sync.serve() as coordinator, sync.connect(coordinator.address) as hub:
        weights = hub.register("actor", model)
        client = ExtensionClient(server)
        engine = Session(client, Settings(coordinator.address, "actor", pause="keep"))
        for step in range(3):
            with weights.mutate(step):
                train_one_step(model)
            engine.update(hub.wait_for("actor", at_least=step))
            print("the engine has version", client.state()[0]["version"])
    return model


if __name__ == "__main__":
    main(*sys.argv[1:])
