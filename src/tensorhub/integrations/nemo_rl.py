"""A checkpoint engine for NeMo-RL: `refit_transport:
"tensorhub.integrations.nemo_rl:TensorHubCheckpointEngine"`.

NeMo-RL's calls carry no number, and `prepare()` is called once for many updates. So both sides
count their calls, from a number on that they have agreed on then. The policy's rank 0 copies what
it is given into buffers, and publishes these; every generation worker fills buffers of its own. The
entry of `refit_cfg` has the settings: see `Exchange`.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from itertools import count
from typing import TYPE_CHECKING, Any

import ray
from nemo_rl.utils.checkpoint_engines.base import CheckpointEngine

from tensorhub.integrations.checkpoint_engine import Exchange, Role

if TYPE_CHECKING:
    import torch

BATCH_BYTES = 256 * 2**20  # of tensors that are loaded together


class TensorHubCheckpointEngine(CheckpointEngine):
    """See the module, and `Exchange` for `settings`."""

    cleanup_after_load = False  # of torch's cache: the buffers stay

    def __init__(
        self,
        bucket_size: int,
        *,
        host: str | None = None,
        release_after_refit: bool = False,
        **settings: Any,
    ) -> None:
        """`release_after_refit` is NeMo-RL's own: then it calls `finalize()` after each update, and
        `prepare()` before.
        """
        self.bucket_size = bucket_size
        self._exchange = Exchange(
            host=host or ray.util.get_node_ip_address().strip("[]"), **settings
        )
        self._numbers = count()

    def prepare(self) -> dict[str, Any]:
        return self._exchange.prepare()  # on each process: the sender is not known here

    def init_policy_process_group(
        self,
        *,
        worker_rank: int,
        train_world_size: int,
        rollout_world_size: int,
        metadata: Sequence[Mapping[str, Any]],
    ) -> None:
        self._join("sender" if worker_rank == 0 else "idle", metadata)

    def init_rollout_process_group(
        self,
        *,
        rollout_rank: int,
        train_world_size: int,
        rollout_world_size: int,
        metadata: Sequence[Mapping[str, Any]],
    ) -> None:
        self._join("receiver", metadata)

    def _join(self, role: Role, metadata: Sequence[Mapping[str, Any]]) -> None:
        self._numbers = count(self._exchange.join(role, metadata[0]).next)

    def finalize(self) -> None:
        """Buffers and registrations stay for the next update, and go on serving this one."""

    async def send_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        self._exchange.send(weights, next(self._numbers))

    async def receive_weight_batches(self) -> AsyncIterator[list[tuple[str, torch.Tensor]]]:
        batch: list[tuple[str, torch.Tensor]] = []
        async for name, tensor in self._exchange.receive(next(self._numbers)):
            batch.append((name, tensor))
            if sum(each.nbytes for _, each in batch) >= BATCH_BYTES:
                yield batch
                batch = []
        if batch:
            yield batch
