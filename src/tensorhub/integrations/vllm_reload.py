"""vLLM's own loader beside the live model, as the judge of what an update does.

Responsible for the comparison of a served model with an independent reload, and for the probe of a
release that was not tested. Neither writes to the live model.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from torch import nn

from tensorhub.errors import StateError, some
from tensorhub.integrations import vllm_layers as layers
from tensorhub.integrations.probing import pattern
from tensorhub.integrations.vllm_plan import Layer, Plan


def differences(
    model: nn.Module, plan: Plan, batch: Iterable[Layer], published: Mapping[str, torch.Tensor]
) -> list[str]:
    """Which tensors of these layers are not what vLLM's loader and post-processing make of what is
    published, padding included.
    """
    batch = [layer for layer in batch if not layers.is_deferred(layer.module)]
    made = _reloaded(model, batch, published)
    found = []
    for layer in batch:
        live, loaded = layers.own_tensors(layer.module), made[layer.module]
        if layer not in plan.in_place:
            loaded = layers.processed(layer.module, loaded)
        for attribute, tensor in loaded.items():
            name = f"{layer.name}.{attribute}".removeprefix(".")
            has_gap = layer.names.get(attribute) in plan.recording.gaps
            if not has_gap and not layers.same_bytes(live[attribute], tensor):
                found.append(name)
    return found


def probe(model: nn.Module, plan: Plan) -> None:
    """Raise StateError unless each parameter gets, by the plan, the bytes that vLLM's own loader
    gives it. Tried with random numbers, one layer at a time.
    """
    wrong: list[str] = []
    for layer in plan.layers:
        if layers.is_deferred(layer.module):
            continue
        published = {}
        for name in plan.needs(layer):
            dtype, shape = plan.specs[name]
            like = torch.empty(shape, dtype=getattr(torch, dtype), device="meta")
            published[name] = pattern(like, torch.device("cpu"))
        made = _reloaded(model, [layer], published)[layer.module]
        for attribute, name in layer.names.items():
            if name in plan.recording.sources and not layers.same_bytes(
                made[attribute].cpu(), _planned(plan, name, made[attribute], published)
            ):
                wrong.append(repr(name))
        if layer not in plan.in_place:
            layers.processed(layer.module, made)
    if wrong:
        raise StateError(f"{len(wrong)} parameter(s) would get other bytes: {some(wrong)}")


def _reloaded(
    model: nn.Module, batch: Iterable[Layer], published: Mapping[str, torch.Tensor]
) -> dict[nn.Module, dict[str, torch.Tensor]]:
    return layers.beside(
        model, {layer.module: layer.names for layer in batch}, iter(published.items())
    )


def _planned(
    plan: Plan, name: str, like: torch.Tensor, published: Mapping[str, torch.Tensor]
) -> torch.Tensor:
    """A parameter in load format, as the recorded sources make it."""
    made = torch.empty(like.shape, dtype=like.dtype)
    made.view(-1).view(torch.uint8).fill_(layers.UNWRITTEN)
    plan.recording.make(name, made, published)
    return made
