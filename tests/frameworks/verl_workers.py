"""verl's own workers around weights that are numbers: an actor whose generator has a collective for
each tensor, as those of FSDP and Megatron do, and a rollout worker that keeps what it is given.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from types import SimpleNamespace
from typing import Any

import torch
from verl.checkpoint_engine import CheckpointEngineRegistry, CheckpointEngineWorker
from verl.single_controller.base import Worker
from verl.single_controller.base.decorator import Dispatch, register
from verl.utils.distributed import initialize_global_process_group_ray
from verl.utils.import_utils import import_external_libs
from verl.workers.config import CheckpointEngineConfig
from verl.workers.engine_workers import ActorRolloutRefWorker
from verl.workers.rollout import BaseRollout

ELEMENTS = 4 * 2**20


def weights(version: int) -> Iterator[tuple[str, torch.Tensor]]:
    """Of 16 MB, and a little."""
    for number in range(4):
        yield (
            f"layers.{number}",
            torch.full((ELEMENTS // 4,), version * 10 + number, dtype=torch.float32),
        )
    yield "norm", torch.full((7,), version, dtype=torch.bfloat16)


def changed(version: int) -> Iterator[tuple[str, torch.Tensor]]:
    for name, tensor in weights(version):
        if name != "layers.1":
            yield name, {"layers.0": tensor[:9], "norm": tensor.float()}.get(name, tensor)
    yield "extra", torch.zeros(3)


def sums(given: dict[str, torch.Tensor]) -> dict[str, float]:
    return {name: tensor.double().sum().item() for name, tensor in given.items()}


class Actor(Worker):
    """The two methods that the manager calls are verl's own."""

    update_weights = ActorRolloutRefWorker.update_weights
    execute_checkpoint_engine = ActorRolloutRefWorker.execute_checkpoint_engine

    def __init__(self, config: CheckpointEngineConfig) -> None:
        super().__init__()
        initialize_global_process_group_ray(timeout_second=None, backend="cpu:gloo")
        import_external_libs(config.custom_backend_module)
        self.checkpoint_engine = CheckpointEngineRegistry.new(
            config.backend,
            is_master=torch.distributed.get_rank() == 0,
            bucket_size=config.update_weights_bucket_megabytes << 20,
            **config.engine_kwargs[config.backend],
        )
        self.actor = SimpleNamespace(engine=self)
        self.version = 0
        self.fails = self.dies = self.changes = False

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def train(
        self, version: int, fails: bool = False, dies: bool = False, changes: bool = False
    ) -> None:
        """`changes`: to a model with another shape, another dtype, a name less and a name more."""
        self.version, self.fails, self.dies, self.changes = version, fails, dies, changes

    def get_per_tensor_param(self) -> tuple[Iterator[tuple[str, torch.Tensor]], None]:
        return self._gathered(), None

    def _gathered(self) -> Iterator[tuple[str, torch.Tensor]]:
        is_first = torch.distributed.get_rank() == 0
        for name, tensor in changed(self.version) if self.changes else weights(self.version):
            if name == "layers.2" and is_first and self.dies:
                os.kill(os.getpid(), signal.SIGKILL)
            if name == "layers.2" and self.fails:
                raise RuntimeError("the gather has failed")
            whole = tensor if is_first else torch.empty_like(tensor)
            torch.distributed.broadcast(whole, src=0)
            yield name, whole


class Engine(BaseRollout):
    """Keeps the weights. What has come of each update is noted, and which version was committed
    before its first tensor.
    """

    def __init__(self) -> None:
        self.held: dict[str, torch.Tensor] = {}
        self.outcomes: list[str] = []
        self.committed: list[int | None] = []
        self.version: Callable[[], int | None]

    async def resume(self, tags: list[str]) -> None: ...

    async def release(self) -> None: ...

    async def update_weights(
        self, weights: AsyncIterator[tuple[str, torch.Tensor]], **given: Any
    ) -> None:
        held: dict[str, torch.Tensor] = {}
        try:
            async for name, tensor in weights:
                if not held:
                    self.committed.append(self.version())
                held[name] = tensor.clone()
        except Exception as error:
            self.outcomes.append(type(error).__name__)
            raise
        self.held = held
        self.outcomes.append(str(given["global_steps"]))


class Rollout(CheckpointEngineWorker):
    """verl's own worker, which can be asked what it holds, and be killed as soon as its memory is
    being filled.
    """

    def __init__(self, **given: Any) -> None:
        super().__init__(server_adapter=Engine(), **given)
        self.server_adapter.version = lambda: (
            self.checkpoint_engine._exchange._receiver._weights.version
        )

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def seen(self) -> tuple[list[str], dict[str, float]]:
        return self.server_adapter.outcomes, sums(self.server_adapter.held)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def committed(self) -> list[int | None]:
        return self.server_adapter.committed  # type: ignore[no-any-return]

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def die_in_update(self) -> None:
        filled = self.checkpoint_engine._exchange._receiver._weights

        def watch() -> None:
            pause = threading.Event()
            while filled.state != "filling":
                pause.wait(0.0005)
            os.kill(os.getpid(), signal.SIGKILL)

        threading.Thread(target=watch, daemon=True).start()
