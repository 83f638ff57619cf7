"""A trainer and its rollout workers in Ray actors, on any nodes of a Ray cluster: `python
examples/ray_weights.py`.

Ray restarts whatever dies, the coordinator included. Here it is a cluster of this machine;
`ray.init("auto")` joins another.
"""

import os
import secrets
import tempfile
from typing import Any

import ray
import torch

from tensorhub import sync
from tensorhub.integrations.ray import location, start_coordinator


@ray.remote(max_restarts=-1)
class Trainer:
    def __init__(self, address: str) -> None:
        self.model = torch.nn.Linear(1024, 1024)
        torch.nn.init.zeros_(self.model.weight)
        hub = sync.connect(address, location=location())
        self.weights = hub.register("actor", self.model)
        # the coordinator may outlive the program: numbers go on from there
        self.version = hub.describe("actor", limit=0).mark or 0
        if ray.get_runtime_context().was_current_actor_reconstructed and self.version:
            self.weights.replicate("available")  # the newest that a reader has taken

    def step(self) -> int:
        self.version += 1
        with self.weights.mutate(self.version), torch.no_grad():
            self.model.weight += 1
        return self.version


@ray.remote(max_restarts=-1, max_task_retries=-1)
class Rollout:
    def __init__(self, address: str) -> None:
        self.model = torch.nn.Linear(1024, 1024)
        self.weights = sync.connect(address, location=location()).register(
            "actor", self.model, spot=True
        )

    def generate(self, version: int) -> float:
        self.weights.update(at_least=version)
        return self.model.weight.mean().item()


def run(state_dir: str) -> None:
    address = start_coordinator(state_dir=state_dir)  # finds the one that is there, if there is one
    trainer: Any = Trainer.remote(address)  # type: ignore[attr-defined]
    rollouts: Any = [Rollout.remote(address) for _ in range(2)]  # type: ignore[attr-defined]
    for _ in range(3):
        version = ray.get(trainer.step.remote())
        print(f"version {version}: {ray.get([each.generate.remote(version) for each in rollouts])}")


if __name__ == "__main__":
    # what `ray.init` starts here inherits it
    os.environ.setdefault("TENSORHUB_TOKEN", secrets.token_hex())
    ray.init("local")
    run(tempfile.mkdtemp())
