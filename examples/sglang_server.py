"""A trainer that keeps an SGLang server's weights up to date, by TensorHub.

    python -m sglang.launch_server --model-path MODEL --custom-weight-loader tensorhub.integrations.sglang.load
    python examples/sglang_server.py http://127.0.0.1:30000 MODEL

MODEL is the directory of a model for transformers, or its configuration alone (with `--load-format
dummy` at the server): the trainer begins with random weights. Its steps stand for yours.

Needs SGLang and `pip install 'tensorhub-ros[torch]'` where the server runs; here
transformers and that installation.
"""  # noqa: E501 - lines as they are typed

import sys

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from tensorhub import sync
from tensorhub.integrations.sglang import Trainer


def train_one_step(model: torch.nn.Module) -> None:
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1 - 1e-3)


def main(server: str, path: str) -> None:
    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(path)).to(torch.bfloat16)
    # or `tensorhub serve`
    with sync.serve() as coordinator, Trainer(model, server, coordinator.address) as trainer:
        for _ in range(3):
            train_one_step(model)
            print("the server has version", trainer.send_weights())


if __name__ == "__main__":
    main(*sys.argv[1:])
