"""OpenRLHF: `python -m tensorhub.integrations.openrlhf ARGUMENTS` instead of `python -m
openrlhf.cli.train_ppo_ray ARGUMENTS`. A program of one's own calls `install` first.

Two of OpenRLHF's Ray actors are replaced: the vLLM engine, which gets TensorHub's worker extension,
and the policy, whose rank 0 publishes copies instead of broadcasting. That rank takes the
coordinator's address from TENSORHUB_ADDRESS. OpenRLHF itself pauses the engines.
"""

from __future__ import annotations

import inspect
import runpy
import sys
from collections.abc import Iterator, Mapping
from importlib import import_module
from importlib.metadata import version
from types import FunctionType
from typing import Any

import deepspeed
import ray
import torch
from openrlhf.trainer.ray import ppo_actor, vllm_engine

from tensorhub.errors import StateError
from tensorhub.integrations.engine_feed import EXTENSION, EngineFeed, exchange, send
from tensorhub.integrations.releases import check_calls, check_release
from tensorhub.integrations.vllm_session import MARGIN_S

SUPPORTED = ("0.11",)
_THEIR_ENGINE: Any = vllm_engine.RolloutRayActor.__ray_metadata__.modified_class
_THEIR_POLICY: Any = ppo_actor.PolicyModelActor.__ray_metadata__.modified_class


class Engine(_THEIR_ENGINE):
    """A vLLM engine's actor."""

    # Ray awaits it
    async def __init__(self, *given: Any, **named: Any) -> None:  # type: ignore[misc]
        await super().__init__(*given, **{**named, "worker_extension_cls": EXTENSION})

    async def tensorhub_call(self, method: str, arguments: Mapping[str, Any]) -> Any:
        return await self.llm.collective_rpc(method, kwargs=dict(arguments))


class EngineClient:
    """vLLM's `collective_rpc`, of the actor with this number."""

    def __init__(self, actor: Any, number: int, timeout_s: float = 300.0) -> None:
        self._actor, self._number, self._timeout_s = actor, number, timeout_s + MARGIN_S

    def __repr__(self) -> str:
        return f"OpenRLHF's vLLM engine {self._number}"

    def collective_rpc(self, method: str, kwargs: Mapping[str, Any]) -> Any:
        return self._done(method, self._actor.tensorhub_call.remote(method, kwargs))

    def reset_prefix_cache(self) -> None:
        self._done("reset_prefix_cache", self._actor.reset_prefix_cache.remote())

    def _done(self, method: str, call: Any) -> Any:
        try:
            return ray.get(call, timeout=self._timeout_s)
        except Exception as error:
            reason = getattr(error, "cause", None) or error
            raise StateError(f"{self!r} has failed in {method}: {reason}") from error


class Policy(_THEIR_POLICY):
    """A rank of the policy."""

    def init_model_from_pretrained(
        self, strategy: Any, pretrain: Any, max_steps: Any = None, vllm_engines: Any = None
    ) -> None:
        self._feed = None
        if vllm_engines and self._rank == 0:
            self._clients = [EngineClient(each, n) for n, each in enumerate(vllm_engines)]
            self._feed = EngineFeed(self._clients)
        # without engines: it makes no process group with them
        super().init_model_from_pretrained(strategy, pretrain, max_steps)

    def broadcast_to_vllm(self) -> None:
        send(self._feed, self._whole())
        if self._feed is not None:
            for each in self._clients:
                each.reset_prefix_cache()

    def _whole(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Each parameter, which all ranks gather."""
        model, settings = self.actor.model.module, self.strategy.args.ds
        for name, parameter in model.named_parameters():
            if settings.tensor_parallel_size > 1:
                gathered = deepspeed.module_inject.layers.GatherReplacedLayerParams(
                    [parameter], model, enabled=True
                )
            else:
                gathered = deepspeed.zero.GatheredParameters(
                    [parameter], enabled=settings.zero_stage == 3
                )
            with gathered:
                yield name, parameter.data


def install() -> None:
    """Have OpenRLHF, in this process and the actors that it makes, sync by TensorHub. Modules that
    take these actors by name have to be imported afterwards: `openrlhf.cli.train_ppo_ray`.
    """
    check_release("openrlhf", version("openrlhf"), SUPPORTED, probe=_probe)
    vllm_engine.RolloutRayActor = ray.remote(Engine)
    ppo_actor.PolicyModelActor = ray.remote(num_gpus=1)(Policy)


def _probe() -> None:
    names = ("init_model_from_pretrained", "broadcast_to_vllm")
    codes = [inspect.unwrap(getattr(_THEIR_POLICY, name)).__code__ for name in names]
    # by their code: Ray adds an argument to their signatures
    theirs = {code.co_name: FunctionType(code, {}) for code in codes}
    check_calls(Policy, type("PolicyModelActor", (), theirs))


def main() -> None:
    if {"-h", "--help"}.isdisjoint(sys.argv):
        exchange()
    install()
    runpy.run_module("openrlhf.cli.train_ppo_ray", run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    # Ray's workers import these classes by name, so they must not be of `__main__`
    import_module("tensorhub.integrations.openrlhf").main()
