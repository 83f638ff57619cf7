"""verl's CheckpointEngineManager brings weights from two actors to two rollout workers, by
TensorHub, on a local Ray.

    python examples/verl_update.py

In a job of yours only `ENGINE` is new, as two values of
`actor_rollout_ref.rollout.checkpoint_engine`. The rest stands for the trainer and the inference
engine: their workers are verl's own classes, around weights that are numbers.

Needs verl 0.9 and `pip install 'tensorhub-ros[torch]'`; no GPU.
"""

from collections.abc import AsyncIterator
from typing import Any

import ray
import torch
from verl.checkpoint_engine import (
    CheckpointEngineManager,
    CheckpointEngineRegistry,
    CheckpointEngineWorker,
)
from verl.single_controller.base import Worker
from verl.single_controller.base.decorator import Dispatch, register
from verl.single_controller.ray import RayClassWithInitArgs, RayResourcePool, RayWorkerGroup
from verl.utils.import_utils import import_external_libs
from verl.workers.config import CheckpointEngineConfig, RolloutConfig
from verl.workers.engine_workers import ActorRolloutRefWorker
from verl.workers.rollout import BaseRollout, RolloutReplica

ENGINE = CheckpointEngineConfig(
    backend="tensorhub", custom_backend_module="tensorhub.integrations.verl"
)


class Actor(Worker):
    execute_checkpoint_engine = ActorRolloutRefWorker.execute_checkpoint_engine

    def __init__(self) -> None:
        super().__init__()
        import_external_libs(ENGINE.custom_backend_module)
        self.checkpoint_engine = CheckpointEngineRegistry.new(
            ENGINE.backend, bucket_size=2**20, is_master=self.rank == 0
        )

    @register(dispatch_mode=Dispatch.ONE_TO_ALL, blocking=False)
    async def update_weights(self, global_steps: int, mode: str) -> dict[str, float]:
        weights = (
            (f"layers.{layer}", torch.full((1024, 1024), float(global_steps + layer)))
            for layer in range(4)
        )
        return await self.checkpoint_engine.send_weights(weights, global_steps)  # type: ignore[no-any-return]


class Engine(BaseRollout):
    def __init__(self) -> None: ...

    async def update_weights(
        self, weights: AsyncIterator[tuple[str, torch.Tensor]], **given: Any
    ) -> None:
        self.held = {name: tensor.clone() async for name, tensor in weights}

    async def resume(self, tags: list[str]) -> None: ...

    async def release(self) -> None: ...


class Rollout(CheckpointEngineWorker):
    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def mean(self) -> float:
        return float(torch.cat(list(self.server_adapter.held.values())).mean())


class Replica(RolloutReplica):
    def __init__(self, worker: Any) -> None:
        self.workers, self.servers = [worker], []  # type: ignore[var-annotated]

    async def launch_servers(self) -> None: ...


def group(name: str, cls: type, **given: Any) -> Any:
    pool = RayResourcePool([2], use_gpu=False, max_colocate_count=1, name_prefix=name)
    return RayWorkerGroup(
        pool, RayClassWithInitArgs(cls=ray.remote(cls), **given), device_name="cpu", bin_pack=False
    )


def main() -> None:
    ray.init(
        "local",
        num_cpus=64,
        include_dashboard=False,
        _node_ip_address="127.0.0.1",
        log_to_driver=False,
    )
    given = {
        "rollout_config": RolloutConfig(name="vllm", checkpoint_engine=ENGINE),
        "model_config": None,
    }
    rollouts = group("rollouts", Rollout, server_adapter=Engine(), **given)
    manager = CheckpointEngineManager(
        ENGINE, group("actors", Actor), [Replica(worker) for worker in rollouts.workers]
    )
    for step in (1, 2, 3):
        print(manager.update_weights(step))
        print(f"version {step}: the rollouts' mean weights are {rollouts.mean()}")


if __name__ == "__main__":
    main()
