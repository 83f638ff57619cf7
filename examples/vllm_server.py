"""A trainer that keeps a vLLM server's weights up to date, by TensorHub, while the server
generates.

    VLLM_SERVER_DEV_MODE=1 vllm serve MODEL --weight-transfer-config '{"backend": "tensorhub"}'
    python examples/vllm_server.py http://127.0.0.1:8000 MODEL

MODEL is the directory of a model for transformers, or its configuration alone (with `--load-format
dummy` at the server): the trainer begins with random weights. Its steps stand for yours. vLLM's
routes for weights need VLLM_SERVER_DEV_MODE.

Needs vLLM 0.32 or newer, transformers, and `pip install 'tensorhub-ros[torch]'` where either runs.
"""

import sys

import requests
import torch
from transformers import AutoConfig, AutoModelForCausalLM
from vllm.distributed.weight_transfer.clients import HTTPVLLMWeightSyncClient
from vllm.distributed.weight_transfer.factory import WeightTransferTrainerFactory

from tensorhub import Stamp, sync
from tensorhub.integrations.vllm import TrainerInit, register


def train_one_step(model: torch.nn.Module) -> None:
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1 - 1e-3)


def main(server: str, path: str) -> None:
    register()
    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(path)).to(torch.bfloat16)
    with sync.serve() as coordinator:  # or `tensorhub serve` on a machine that all workers reach
        settings = TrainerInit(address=coordinator.address, rank=0, pause="keep")
        trainer = WeightTransferTrainerFactory.trainer_init(
            settings, client=HTTPVLLMWeightSyncClient(server), source=model
        )
        for _ in range(3):
            train_one_step(model)
            trainer.send_weights()
            said = requests.get(f"{server}/weight_info", timeout=10).json()["weight_version"]
            print("the server has version", Stamp.parse(said).version)
        trainer.shutdown()


if __name__ == "__main__":
    main(*sys.argv[1:])
