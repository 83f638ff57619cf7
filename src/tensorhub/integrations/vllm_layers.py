"""vLLM's layers: which parameters may be written where they lie, how a layer is loaded and
processed by itself, and what vLLM's own loader makes of it beside the live model.

vLLM keeps, for each layer, the form of its tensors before post-processing (its load format). A
layer that post-processing does not change can be written in place. Any other layer gets tensors in
load format, is processed, and the result is copied to where the live tensors are, so that captured
graphs stay valid.

This module uses vLLM's `model_executor.model_loader.reload`, with three of its private names.
"""

from __future__ import annotations

import contextlib
from collections.abc import Hashable, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import nn
from vllm.model_executor.layers import attention
from vllm.model_executor.layers.quantization.base_config import QuantizeMethodBase
from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding
from vllm.model_executor.model_loader.reload import (
    finalize_layerwise_reload,
    initialize_layerwise_reload,
)
from vllm.model_executor.model_loader.reload.layerwise import (
    _get_original_loader,
    _layerwise_process,
    _place_kernel_tensors,
    get_layerwise_info,
)
from vllm.model_executor.model_loader.reload.meta import (
    materialize_meta_tensor,
    restore_layer_on_meta,
    to_meta_tensor,
)

from tensorhub.errors import StateError
from tensorhub.integrations.probing import (
    kind,
    leaves_bytes,
    own_tensors,
    pattern,
    same_bytes,
    trial,
)

__all__ = [
    "acts_once",
    "allocate",
    "beside",
    "finish",
    "is_deferred",
    "is_in_place",
    "is_unprocessed",
    "load",
    "load_format",
    "own_tensors",
    "pads_itself",
    "process",
    "processed",
    "same_bytes",
]


def is_deferred(layer: nn.Module) -> bool:
    """Whether a layer is attention, which derives what it has from other layers' weights."""
    if hasattr(attention, "is_deferred_attention_layer"):
        return bool(attention.is_deferred_attention_layer(layer))
    return isinstance(layer, attention.Attention | attention.MLAAttention)  # vLLM before 0.29


UNWRITTEN = 0xA5  # each byte of what a loader leaves alone


@contextlib.contextmanager
def load_format(model: nn.Module) -> Iterator[None]:
    """Within it, the model's tensors are as they were before post-processing, on the meta
    device.
    """
    was = [
        (
            layer,
            dict(layer._parameters),
            dict(layer._buffers),
            set(layer._non_persistent_buffers_set),
        )
        for layer in model.modules()
    ]
    try:
        for layer, *_ in was:
            restore_layer_on_meta(layer, get_layerwise_info(layer))
            for tensor in own_tensors(layer).values():
                # an earlier reload of vLLM's has left its wrapper there
                if hasattr(tensor, "weight_loader"):
                    tensor.weight_loader = _get_original_loader(tensor)
        yield
    finally:
        for layer, parameters, buffers, non_persistent in was:
            layer.__dict__.update(
                _parameters=parameters, _buffers=buffers, _non_persistent_buffers_set=non_persistent
            )


def is_unprocessed(layer: nn.Module, tried: dict[Hashable, bool]) -> bool:
    """Whether post-processing leaves this layer's tensors as they are loaded, and derives nothing
    from them. Tried with random bytes on a shallow copy of the layer, for equal pointers, shapes
    and strides would prove nothing. `tried`: what came of layers of each `kind`.
    """
    method = getattr(layer, "quant_method", None)
    metadata = get_layerwise_info(layer).restore_metadata
    loaded, live = {**metadata[0], **metadata[1]}, own_tensors(layer)
    names = [name for name in live if name in loaded]
    if is_deferred(layer) or any(not _alike(live[name], loaded[name]) for name in names):
        return False
    if not isinstance(method, QuantizeMethodBase):
        return True
    if not _can_be_tried(method):
        return False
    loaded = {name: loaded[name] for name in names}
    its = kind(layer, loaded)
    if its not in tried:
        tried[its] = leaves_bytes(layer, loaded, _process_trial)
    return tried[its]


def acts_once(layer: nn.Module, tried: dict[Hashable, bool]) -> bool:
    """Whether post-processing does something to the tensors that a layer is loaded with first, and
    not to later ones: some experts are laid out when their kernel is made, and never again. Tried
    as `is_unprocessed` is. `tried`: what came of layers of each `kind`.
    """
    method = getattr(layer, "quant_method", None)
    if getattr(method, "moe_kernel", None) is None or not _can_be_tried(method):
        return False
    metadata = get_layerwise_info(layer).restore_metadata
    loaded = {**metadata[0], **metadata[1]}
    its = kind(layer, loaded)
    if its not in tried:
        tried[its] = _differs_later(layer, loaded)
    return tried[its]


def _differs_later(layer: nn.Module, loaded: Mapping[str, torch.Tensor]) -> bool:
    live = own_tensors(layer)
    patterns = {
        name: pattern(loaded[name], each.device) for name, each in live.items() if name in loaded
    }
    first, later = trial(layer, loaded, patterns), trial(layer, loaded, patterns)
    first.quant_method.moe_kernel = None  # type: ignore[union-attr]
    for each in (first, later):
        _process_trial(each)
    then = own_tensors(later)
    return any(
        name not in then or not same_bytes(each, then[name])
        for name, each in own_tensors(first).items()
    )


def _can_be_tried(method: object) -> bool:
    """Whether post-processing a copy of a layer is known to leave the layer itself alone."""
    return type(method).__name__.startswith("Unquantized")


def _process_trial(tried: Any) -> None:
    tried.__dict__.pop("_already_called_process_weights_after_loading", None)
    tried.quant_method.process_weights_after_loading(tried)


def is_in_place(tensor: torch.Tensor | None, registered: torch.Tensor) -> bool:
    """Whether this is the registered memory, in the registered form."""
    return tensor is not None and _form(tensor) == _form(registered)


def _form(tensor: torch.Tensor) -> tuple[object, ...]:
    return tensor.data_ptr(), tensor.shape, tensor.dtype, tensor.stride()


def _alike(live: torch.Tensor, loaded: torch.Tensor) -> bool:
    return (live.shape, live.dtype, live.stride()) == (
        loaded.shape,
        loaded.dtype,
        loaded.stride(),
    ) and live.is_contiguous()


def allocate(layer: nn.Module, names: Iterable[str]) -> dict[str, torch.Tensor]:
    """Tensors in load format, with nothing in them."""
    info = get_layerwise_info(layer)
    # vLLM's metadata has no tensors that it never lays out anew, such as a bias in 0.33
    kept = {name: to_meta_tensor(each) for name, each in own_tensors(layer).items()}
    metadata = {**kept, **info.restore_metadata[0], **info.restore_metadata[1]}
    with info.restore_device:
        return {name: materialize_meta_tensor(metadata[name]) for name in names}


def process(layer: nn.Module, filled: Mapping[str, torch.Tensor]) -> None:
    """Post-process a layer with the tensors in load format `filled`, and copy the result to its
    live tensors. The layer has its live tensors in the end, also after an error.
    """
    _process(layer, filled, (dict(layer._parameters), dict(layer._buffers)))


def processed(layer: nn.Module, filled: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """What post-processing makes of a layer's tensors in load format. Its live tensors stay as they
    are, and so do the layer and its method: kernels of experts hold scales of their own.
    """
    owners = [each for each in (layer, getattr(layer, "quant_method", None)) if each is not None]
    own = [{**vars(each)} for each in owners]
    live = dict(layer._parameters), dict(layer._buffers), set(layer._non_persistent_buffers_set)
    copies = tuple(
        {n: t if t is None else _like(t, t.data.clone()) for n, t in each.items()}
        for each in live[:2]
    )
    try:
        _process(layer, filled, copies)
        return own_tensors(layer)
    finally:
        for each, was in zip(owners, own, strict=True):
            vars(each).clear()
            vars(each).update(was)
        parameters, buffers, non_persistent = live
        layer.__dict__.update(
            _parameters=parameters, _buffers=buffers, _non_persistent_buffers_set=non_persistent
        )


def _like(model: torch.Tensor, tensor: torch.Tensor) -> torch.Tensor:
    tensor.__class__, tensor.__dict__ = model.__class__, {**model.__dict__}
    return tensor


def _process(layer: nn.Module, filled: Mapping[str, torch.Tensor], into: Any) -> None:
    info = get_layerwise_info(layer)
    live = {**into[0], **into[1]}
    info.kernel_tensors = tuple({n: t for n, t in each.items() if t is not None} for each in into)
    info.kernel_non_persistent_buffers = set(layer._non_persistent_buffers_set)
    restore_layer_on_meta(layer, info)
    info.load_numel_total = 1
    try:
        for name, tensor in (*layer._parameters.items(), *layer._buffers.items()):
            if tensor is not None and tensor.is_meta:
                given = filled[name] if name in filled else live[name].data.clone()
                if given.shape != tensor.shape:
                    raise StateError(
                        f"{type(layer).__name__}.{name} is not published, and post-processing has "
                        f"reshaped it"
                    )
                setattr(layer, name, _like(tensor, given))
            elif tensor is not None and name in filled:
                live[name].data.copy_(filled[name])
        _layerwise_process(layer, info)
    except BaseException:
        info.load_numel_total = 1
        if info.kernel_tensors is not None:
            _place_kernel_tensors(layer, info)
        info.reset()
        raise


def beside(
    model: nn.Module,
    wanted: Mapping[nn.Module, Iterable[str]],
    weights: Iterable[tuple[str, torch.Tensor]],
) -> dict[nn.Module, dict[str, torch.Tensor]]:
    """What the model's own `load_weights` makes of the `wanted` tensors of some layers, in load
    format, in memory beside the live model.
    """
    made = {layer: allocate(layer, names) for layer, names in wanted.items()}
    with load_format(model), torch.no_grad():
        for layer, tensors in made.items():
            metadata = own_tensors(layer)
            for name, tensor in tensors.items():
                tensor.data.view(-1).view(torch.uint8).fill_(UNWRITTEN)
                _like(metadata[name], tensor)
                own = "_parameters" if name in layer._parameters else "_buffers"
                layer.__dict__[own][name] = tensor
        model.load_weights(weights)  # type: ignore[operator]
        return {
            layer: {name: own_tensors(layer)[name] for name in tensors}
            for layer, tensors in made.items()
        }


def load(model: nn.Module, model_config: Any, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
    """vLLM's own reload, of the layers of `weights`; all other layers stay as they are."""
    initialize_layerwise_reload(model)
    try:
        model.load_weights(weights)  # type: ignore[operator]
    finally:
        finalize_layerwise_reload(model, model_config)


def pads_itself(layer: nn.Module) -> bool:
    """Whether what is loaded fills a part of this layer, and its shape is checked: a vocabulary."""
    return isinstance(layer, VocabParallelEmbedding)


def finish(model: nn.Module, model_config: Any) -> None:
    """Derive again what attention layers derive from weights that were written in place."""
    for layer in model.modules():
        if is_deferred(layer):
            layer.process_weights_after_loading(model_config.dtype)  # type: ignore[operator]
