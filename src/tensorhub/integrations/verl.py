"""A checkpoint engine for verl: `backend: tensorhub`, `custom_backend_module:
tensorhub.integrations.verl`.

Each update is one version; its number is verl's `global_steps`. The actors' rank 0 copies the given
tensors into buffers, and publishes these. Every rollout worker fills buffers of its own, from the
actor or from other rollout workers, and hands tensors on when all are verified.
`engine_kwargs.tensorhub` has the settings: see `Exchange`.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

import ray
from verl.checkpoint_engine.base import CheckpointEngine, CheckpointEngineRegistry

from tensorhub.errors import StateError
from tensorhub.integrations.checkpoint_engine import KEY, Exchange
from tensorhub.integrations.releases import check_calls, check_release

if TYPE_CHECKING:
    import torch

SUPPORTED = ("0.9",)

Arguments = dict[str, list[Any]]


@CheckpointEngineRegistry.register("tensorhub")
class TensorHubCheckpointEngine(CheckpointEngine):
    """See the module, and `Exchange` for `settings`."""

    def __init__(
        self, bucket_size: int, is_master: bool = False, *, host: str | None = None, **settings: Any
    ) -> None:
        check_release(
            "verl",
            version("verl"),
            SUPPORTED,
            probe=lambda: check_calls(TensorHubCheckpointEngine, CheckpointEngine),
        )
        self.bucket_size = bucket_size
        self._is_master = is_master
        self._exchange = Exchange(
            host=host or ray.util.get_node_ip_address().strip("[]"), **settings
        )

    def prepare(self) -> dict[str, Any]:
        return self._exchange.prepare() if self._is_master else {}

    @classmethod
    def build_topology(
        cls,
        actor_wg_world_size: int,
        rollout_world_size: int,
        metadata: Sequence[Mapping[str, Any]],
    ) -> tuple[Arguments, Arguments]:
        sending = [rank for rank, each in enumerate(metadata) if KEY in each]
        if len(sending) != 1 or sending[0] >= actor_wg_world_size:
            raise StateError(
                f"{len(sending)} of the processes send: one of the actors is to be made with "
                f"is_master=True"
            )
        roles = ["sender" if rank in sending else "idle" for rank in range(actor_wg_world_size)]
        meeting = metadata[sending[0]]
        return (
            {"role": roles, "meeting": [meeting] * actor_wg_world_size},
            {"role": ["receiver"] * rollout_world_size, "meeting": [meeting] * rollout_world_size},
        )

    def init_process_group(self, **given: Any) -> None:
        self._exchange.join(**given)

    def finalize(self) -> None:
        """Buffers and registrations stay for the next update, and go on serving this one."""

    async def send_weights(
        self, weights: Iterable[tuple[str, torch.Tensor]], global_steps: int | None = None
    ) -> dict[str, float]:
        return self._exchange.send(weights, global_steps)

    async def receive_weights(
        self, global_steps: int | None = None
    ) -> AsyncIterator[tuple[str, torch.Tensor]]:
        async for name, tensor in self._exchange.receive(global_steps):
            yield name, tensor
