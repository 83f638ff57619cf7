"""Whether a layer's post-processing leaves its tensors as they were loaded. Tried, for equal
pointers, shapes and strides prove nothing: halves may be swapped where they lie.

Responsible for the trial, on a shallow copy of the layer with random bytes. Not responsible for
when a framework post-processes, nor for what becomes of layers that do not pass.
"""

from __future__ import annotations

import copy
import types
from collections.abc import Callable, Hashable, Mapping
from typing import Any

import torch
from torch import nn

_PLAIN = (bool, int, float, str, type(None), torch.dtype, torch.device)
_NAMES = {"prefix", "layer_name"}  # a layer's own place in its model


def own_tensors(layer: nn.Module) -> dict[str, torch.Tensor]:
    """The parameters and persistent buffers that are a layer's own."""
    buffers = {
        name: each
        for name, each in layer._buffers.items()
        if name not in layer._non_persistent_buffers_set
    }
    return {
        name: each
        for name, each in (*layer._parameters.items(), *buffers.items())
        if each is not None
    }


def kind(layer: nn.Module, loaded: Mapping[str, torch.Tensor]) -> Hashable:
    """Equal for layers that post-processing treats alike: those of one class, with tensors of equal
    shapes, strides, dtypes and classes, and with attributes that are equal, or are objects of one
    class. Random numbers for each of a model's layers would take longer than to load it.
    """
    tensors = [
        (name, type(each), tuple(each.shape), each.stride(), each.dtype, each.device)
        for these in (own_tensors(layer), loaded)
        for name, each in sorted(these.items())
    ]
    attributes = [
        (type(each), name, _shown(value))
        for each in (layer, layer.quant_method)
        for name, value in sorted(each.__dict__.items())
        if name not in _NAMES
    ]
    return type(layer), tuple(tensors), tuple(attributes)


def _shown(value: Any) -> Hashable:
    if isinstance(value, list | tuple):
        return type(value), tuple(map(_shown, value))
    if isinstance(value, types.MethodType):
        return value.__func__
    if isinstance(value, types.FunctionType):  # one that holds objects is equal to itself alone
        return value if value.__closure__ or value.__defaults__ else value.__code__
    return type(value), value if isinstance(value, _PLAIN) else None


def leaves_bytes(
    layer: nn.Module,
    loaded: Mapping[str, torch.Tensor],
    process: Callable[[Any], None],
    *,
    is_exact: bool = True,
) -> bool:
    """Whether `process`, which is given a copy of the layer, leaves tensors of the shapes, dtypes
    and attributes of `loaded` as they are. `is_exact`: and derives nothing from them.
    """
    live = own_tensors(layer)
    patterns = {name: pattern(each, live[name].device) for name, each in loaded.items()}
    tried = trial(layer, loaded, patterns)
    before = [(each, {**each.__dict__}) for each in (tried, tried.quant_method)]
    process(tried)
    after = own_tensors(tried)
    if set(after) != set(live) or any(
        not same_bytes(after[name], each) for name, each in patterns.items()
    ):
        return False
    return not is_exact or all(
        each.__dict__[name] is was.get(name)
        or name.startswith("_")
        or _is_plain(each.__dict__[name])
        for each, was in before
        for name in each.__dict__
    )


def trial(
    layer: nn.Module, loaded: Mapping[str, torch.Tensor], filled: Mapping[str, torch.Tensor]
) -> nn.Module:
    """A shallow copy of a layer, and of its `quant_method`, with copies of the tensors `filled`;
    those are otherwise as `loaded` ones are.
    """
    tried, method = copy.copy(layer), copy.copy(layer.quant_method)
    for each in (tried, method):
        if isinstance(each, nn.Module):
            own = ("_parameters", "_buffers", "_modules", "_non_persistent_buffers_set")
            each.__dict__.update({name: copy.copy(each.__dict__[name]) for name in own})
    tried.quant_method = method
    for name, tensor in filled.items():
        given = tensor.clone()
        tried.__dict__["_parameters" if name in tried._parameters else "_buffers"][name] = given
        given.__class__, given.__dict__ = loaded[name].__class__, {**loaded[name].__dict__}
    return tried


def pattern(like: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Random numbers, so that no two halves are equal; small ones, so that arithmetic with them
    raises nothing. They are not taken from those that sampling uses.
    """
    generator = torch.Generator(device).manual_seed(0)
    if like.dtype in (torch.bfloat16, torch.float16, torch.float32):
        return torch.rand(like.shape, generator=generator, device=device, dtype=like.dtype)
    if like.dtype.is_floating_point:
        return torch.rand(like.shape, generator=generator, device=device).to(like.dtype)
    return torch.randint(0, 2, like.shape, generator=generator, device=device).to(like.dtype)


def same_bytes(one: torch.Tensor, other: torch.Tensor) -> bool:
    if (one.shape, one.dtype, one.stride()) != (other.shape, other.dtype, other.stride()):
        return False
    return torch.equal(
        one.data.reshape(-1).view(torch.uint8), other.data.reshape(-1).view(torch.uint8)
    )


def _is_plain(value: Any) -> bool:
    """Whether it can hold nothing that was derived from a tensor."""
    if isinstance(value, types.FunctionType):
        return not value.__closure__ and not value.__defaults__
    return isinstance(value, (*_PLAIN, types.BuiltinFunctionType))
