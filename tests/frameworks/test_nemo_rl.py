"""NeMo-RL's own factory makes the engine, and it is driven as NeMo-RL's synchronizer and workers
drive one.

NeMo-RL is not on the package index: this runs where its source is on PYTHONPATH.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import pytest
import torch

pytestmark = pytest.mark.framework

pytest.importorskip("ray")
base = pytest.importorskip(
    "nemo_rl.utils.checkpoint_engines.base", reason="NeMo-RL's source is not on PYTHONPATH"
)

from tensorhub.errors import OperationTimeout, VersionConflict  # noqa: E402

BACKEND = "tensorhub.integrations.nemo_rl:TensorHubCheckpointEngine"


def engine(**settings: Any) -> Any:
    kwargs = {"host": "127.0.0.1", "timeout_s": 20.0, "release_after_refit": False, **settings}
    return base.create_checkpoint_engine(BACKEND, bucket_size_bytes=2**20, engine_kwargs=kwargs)


def weights(value: float) -> Iterator[tuple[str, torch.Tensor]]:
    yield "a", torch.full((4, 4), value)
    yield "b", torch.full((3,), value, dtype=torch.bfloat16)


def meet(policy: list[Any], rollouts: list[Any]) -> None:
    """As `CheckpointEngineWeightSynchronizer` does once, before the first of many updates."""
    prepared = [{**each.prepare(), "rank": rank} for rank, each in enumerate(policy)]
    prepared += [{**each.prepare(), "rank": rank} for rank, each in enumerate(rollouts)]
    sizes = {
        "train_world_size": len(policy),
        "rollout_world_size": len(rollouts),
        "metadata": prepared,
    }
    for rank, each in enumerate(policy):
        each.init_policy_process_group(worker_rank=rank, **sizes)
    for rank, each in enumerate(rollouts):
        each.init_rollout_process_group(rollout_rank=rank, **sizes)


def received(rollout: Any) -> dict[str, float]:
    """As its vLLM worker does: a loop of its own for each update."""

    async def run() -> dict[str, float]:
        return {
            name: each.sum().item()
            async for batch in rollout.receive_weight_batches()
            for name, each in batch
        }

    return asyncio.run(run())


def test_updates_are_counted_on_both_sides() -> None:
    policy, rollouts = [engine(), engine()], [engine(), engine()]
    meet(policy, rollouts)
    for value in (1.0, 2.0, 3.0):
        for each in policy:
            asyncio.run(each.send_weights(weights(value)))
        assert [received(each) for each in rollouts] == [{"a": 16 * value, "b": 3 * value}] * 2
    assert policy[1]._exchange._sender is None, "only rank 0 keeps a copy"

    def broken() -> Iterator[tuple[str, torch.Tensor]]:
        yield "a", torch.zeros(4, 4)
        raise RuntimeError("the gather has failed")

    with pytest.raises(RuntimeError, match="the gather has failed"):
        asyncio.run(policy[0].send_weights(broken()))
    for each in rollouts:  # their call belongs to the one that failed
        each._exchange._timeout_s = 0.2
        with pytest.raises(OperationTimeout):
            received(each)
        each._exchange._timeout_s = 20.0
    asyncio.run(policy[0].send_weights(weights(5.0)))
    assert [received(each) for each in rollouts] == [{"a": 80.0, "b": 15.0}] * 2
    policy[0].finalize()
    meet(policy[:1], [engine()])
    with pytest.raises(VersionConflict):
        policy[0]._exchange.send(weights(6.0), 5)


def test_tensors_are_loaded_in_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    from tensorhub.integrations import nemo_rl

    async def batches() -> list[list[tuple[str, torch.Tensor]]]:
        return [batch async for batch in rollout.receive_weight_batches()]

    policy, rollout = engine(), engine()
    meet([policy], [rollout])
    for batch_bytes, expected in ((1, [["a"], ["b"]]), (2**20, [["a", "b"]])):
        monkeypatch.setattr(nemo_rl, "BATCH_BYTES", batch_bytes)
        asyncio.run(policy.send_weights(weights(1.0)))
        assert [[name for name, _ in batch] for batch in asyncio.run(batches())] == expected
