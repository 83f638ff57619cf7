"""SkyRL: `trainer.override_entrypoint=tensorhub.integrations.skyrl` beside the other arguments of
its `main_base`. An entry point of one's own calls `install`.

Rank 0 of the policy's workers takes the coordinator's address from TENSORHUB_ADDRESS. SkyRL pauses
the engines, and syncs LoRA adapters by itself.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from importlib import import_module
from importlib.metadata import version
from typing import Any

import ray
import torch.distributed
from skyrl.backends.skyrl_train.weight_sync import WeightChunk, WeightTransferSender
from skyrl.backends.skyrl_train.workers.worker import PolicyWorkerBase

from tensorhub.integrations.engine_feed import EXTENSION, EngineFeed, exchange, send
from tensorhub.integrations.releases import check_calls, check_release

SUPPORTED = ("0.3",)
ENTRYPOINT = "trainer.override_entrypoint="


class WeightSender(WeightTransferSender):
    """A policy rank's sender. `servers`: URLs of all vLLM servers."""

    def __init__(self, servers: Sequence[str], **settings: Any) -> None:
        is_sender = torch.distributed.get_rank() == 0
        self._feed = EngineFeed(servers, **settings) if is_sender else None

    async def send_chunks(
        self, chunks: Iterable[WeightChunk], weight_metadata: dict[str, list[Any]] | None = None
    ) -> None:
        """Run through the chunks, as each rank has to; rank 0 sends them."""
        weights = (
            each for chunk in chunks for each in zip(chunk.names, chunk.tensors, strict=True)
        )
        send(self._feed, weights)

    def teardown(self) -> None:
        if self._feed is not None:
            self._feed.close()


class SyncedPolicy(PolicyWorkerBase):
    async def init_weight_sync_state(
        self, inference_engine_client: Any, inference_engine_cfg: Any
    ) -> None:
        self._weight_transfer_sender = WeightSender(inference_engine_client.server_urls)


def synced(worker: Any) -> Any:
    """`worker`, a class of policy workers that derives from SkyRL's `PolicyWorkerBase`, with
    `SyncedPolicy` right before that base: what the worker itself sets up stays.
    """
    return type("PolicyWorker", (worker, SyncedPolicy), {})


def install(cfg: Any) -> None:
    """Have SkyRL's experiments in this process sync by TensorHub. `cfg`: a SkyRLTrainConfig."""
    check_release(
        "skyrl",
        version("skyrl"),
        SUPPORTED,
        probe=lambda: check_calls(WeightSender, WeightTransferSender),
    )
    cfg.generator.inference_engine.engine_init_kwargs["worker_extension_cls"] = EXTENSION
    strategy = cfg.trainer.strategy
    workers: Any = import_module(f"skyrl.backends.skyrl_train.workers.{strategy}.{strategy}_worker")
    policy = workers.PolicyWorker.__ray_metadata__.modified_class
    workers.PolicyWorker = ray.remote(num_gpus=1)(synced(policy))


def _run(cfg: Any) -> None:
    from skyrl.train.entrypoints.main_base import BasePPOExp

    install(cfg)
    BasePPOExp(cfg).run()


def main() -> None:
    """SkyRL's `main_base` calls it."""
    from skyrl.train.config import SkyRLTrainConfig
    from skyrl.train.utils import validate_cfg
    from skyrl.train.utils.utils import initialize_ray

    given = [each for each in sys.argv[1:] if not each.startswith(ENTRYPOINT)]
    cfg = SkyRLTrainConfig.from_cli_overrides(given)
    validate_cfg(cfg)
    exchange()
    initialize_ray(cfg)
    ray.get(ray.remote(num_cpus=1)(_run).remote(cfg))
