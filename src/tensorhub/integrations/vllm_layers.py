"""vLLM's layers: which parameters may be written where they lie, and how a layer is loaded and processed by itself.

vLLM keeps, for each layer, what its tensors were before they were post-processed (its load format). A layer whose
post-processing changes nothing can be written in place. Any other one gets tensors in load format, is processed, and the
result is copied to where the live tensors are, so that captured graphs stay valid.

What is used of vLLM here is `model_executor.model_loader.reload`, the same in 0.32 and 0.33, with three of its private
names.
"""

from __future__ import annotations

import contextlib
import copy
import types
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import nn
from vllm.model_executor.layers.attention import is_deferred_attention_layer
from vllm.model_executor.layers.quantization.base_config import QuantizeMethodBase
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload
from vllm.model_executor.model_loader.reload.layerwise import (
    _get_original_loader,
    _layerwise_process,
    _place_kernel_tensors,
    get_layerwise_info,
)
from vllm.model_executor.model_loader.reload.meta import materialize_meta_tensor, restore_layer_on_meta

from tensorhub.errors import StateError

_PLAIN = (bool, int, float, str, type(None), torch.dtype, torch.device)


def own_tensors(layer: nn.Module) -> dict[str, torch.Tensor]:
    """The parameters and persistent buffers that are a layer's own."""
    buffers = {name: each for name, each in layer._buffers.items() if name not in layer._non_persistent_buffers_set}
    return {name: each for name, each in (*layer._parameters.items(), *buffers.items()) if each is not None}


@contextlib.contextmanager
def load_format(model: nn.Module) -> Iterator[None]:
    """Within it, the model's tensors are as they were before post-processing, on the meta device."""
    was = [
        (layer, dict(layer._parameters), dict(layer._buffers), set(layer._non_persistent_buffers_set))
        for layer in model.modules()
    ]
    try:
        for layer, *_ in was:
            restore_layer_on_meta(layer, get_layerwise_info(layer))
            for tensor in own_tensors(layer).values():
                if hasattr(tensor, "weight_loader"):  # an earlier reload of vLLM's has left its wrapper there
                    tensor.weight_loader = _get_original_loader(tensor)
        yield
    finally:
        for layer, parameters, buffers, non_persistent in was:
            layer.__dict__.update(_parameters=parameters, _buffers=buffers, _non_persistent_buffers_set=non_persistent)


def is_unprocessed(layer: nn.Module) -> bool:
    """Whether post-processing leaves this layer's tensors as they are loaded, and derives nothing from them. Tried with
    random bytes on a shallow copy of the layer, for equal pointers, shapes and strides would prove nothing.
    """
    method = getattr(layer, "quant_method", None)
    metadata = get_layerwise_info(layer).restore_metadata
    loaded, live = {**metadata[0], **metadata[1]}, own_tensors(layer)
    names = [name for name in live if name in loaded]
    if is_deferred_attention_layer(layer) or any(not _alike(live[name], loaded[name]) for name in names):
        return False
    if not isinstance(method, QuantizeMethodBase):
        return True
    if not type(method).__name__.startswith("Unquantized"):
        return False
    trial, trial_method = copy.copy(layer), copy.copy(method)
    for each in (trial, trial_method):
        if isinstance(each, nn.Module):
            own = ("_parameters", "_buffers", "_modules", "_non_persistent_buffers_set")
            each.__dict__.update({name: copy.copy(each.__dict__[name]) for name in own})
    trial.quant_method = trial_method
    patterns = {name: _pattern(loaded[name], live[name].device) for name in names}
    for name, pattern in patterns.items():
        given = pattern.clone()
        trial.__dict__["_parameters" if name in trial._parameters else "_buffers"][name] = given
        given.__class__, given.__dict__ = loaded[name].__class__, {**loaded[name].__dict__}
    before = [(each, {**each.__dict__}) for each in (trial, trial_method)]
    trial_method.process_weights_after_loading(trial)
    after = own_tensors(trial)
    if set(after) != set(live) or any(not _same_bytes(after[name], pattern) for name, pattern in patterns.items()):
        return False
    return all(
        each.__dict__[name] is was.get(name) or name.startswith("_") or _is_plain(each.__dict__[name])
        for each, was in before
        for name in each.__dict__
    )


def _alike(live: torch.Tensor, loaded: torch.Tensor) -> bool:
    return (live.shape, live.dtype, live.stride()) == (loaded.shape, loaded.dtype, loaded.stride()) and live.is_contiguous()


def _pattern(like: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Random numbers, so that no two halves are equal; small ones, so that arithmetic with them raises nothing. They are
    not taken from those that sampling uses.
    """
    generator = torch.Generator(device).manual_seed(0)
    if like.dtype.is_floating_point:
        return torch.rand(like.shape, generator=generator, device=device).to(like.dtype)
    return torch.randint(0, 2, like.shape, generator=generator, device=device).to(like.dtype)


def _same_bytes(one: torch.Tensor, other: torch.Tensor) -> bool:
    if (one.shape, one.dtype, one.stride()) != (other.shape, other.dtype, other.stride()):
        return False
    return torch.equal(one.data.reshape(-1).view(torch.uint8), other.data.reshape(-1).view(torch.uint8))


def _is_plain(value: Any) -> bool:
    """Whether it can hold nothing that was derived from a tensor."""
    if isinstance(value, types.FunctionType):
        return not value.__closure__ and not value.__defaults__
    return isinstance(value, (*_PLAIN, types.BuiltinFunctionType))


def allocate(layer: nn.Module, names: Iterable[str]) -> dict[str, torch.Tensor]:
    """Tensors in load format, with nothing in them."""
    info = get_layerwise_info(layer)
    metadata = {**info.restore_metadata[0], **info.restore_metadata[1]}
    with info.restore_device:
        return {name: materialize_meta_tensor(metadata[name]) for name in names}


def process(layer: nn.Module, filled: Mapping[str, torch.Tensor]) -> None:
    """Post-process a layer whose tensors in load format are these, and copy what comes out to its live tensors. Whatever
    happens, the layer has its live tensors in the end.
    """
    info = get_layerwise_info(layer)
    live = own_tensors(layer)
    info.kernel_tensors = dict(layer._parameters), dict(layer._buffers)
    info.kernel_tensors = tuple({n: t for n, t in each.items() if t is not None} for each in info.kernel_tensors)
    info.kernel_non_persistent_buffers = set(layer._non_persistent_buffers_set)
    restore_layer_on_meta(layer, info)
    info.load_numel_total = 1
    try:
        for name, tensor in own_tensors(layer).items():
            if tensor.is_meta:
                given = filled[name] if name in filled else live[name].data.clone()
                if given.shape != tensor.shape:
                    raise StateError(f"{type(layer).__name__}.{name} is not published, and post-processing has reshaped it")
                given.__class__, given.__dict__ = tensor.__class__, {**tensor.__dict__}
                setattr(layer, name, given)
        _layerwise_process(layer, info)
    except BaseException:
        info.load_numel_total = 1
        if info.kernel_tensors is not None:
            _place_kernel_tensors(layer, info)
        info.reset()
        raise


def load(model: nn.Module, model_config: Any, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
    """vLLM's own reload, of the layers that these are of; the others stay as they are."""
    initialize_layerwise_reload(model)
    try:
        model.load_weights(weights)  # type: ignore[operator]
    finally:
        finalize_layerwise_reload(model, model_config)


def finish(model: nn.Module, model_config: Any) -> None:
    """Derive again what attention layers derive from weights that were written in place."""
    for layer in model.modules():
        if is_deferred_attention_layer(layer):
            layer.process_weights_after_loading(model_config.dtype)  # type: ignore[operator]
