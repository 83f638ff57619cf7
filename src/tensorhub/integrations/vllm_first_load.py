"""Which published tensors an engine's own first load was given: their names, dtypes and shapes.

What that load has filled, an update has to fill. vLLM loads a model before anything of TensorHub's
is called with it, so its loader's `initialize_model` is wrapped, by the plug-in.

Responsible for that record. Not responsible for what follows from it (`vllm_plan`).
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import nn

_first: WeakKeyDictionary[nn.Module, dict[str, tuple[str, tuple[int, ...]]]] = WeakKeyDictionary()


def watch() -> None:
    """Note what models are given that vLLM makes from now on. Called any number of times."""
    from vllm.model_executor.model_loader import base_loader

    initialize = base_loader.initialize_model
    if hasattr(initialize, "__wrapped__") and initialize.__wrapped__ in _wrapped:
        return

    @functools.wraps(initialize)
    def initialize_watched(*given: Any, **named: Any) -> nn.Module:
        model: nn.Module = initialize(*given, **named)
        _watch(model)
        return model

    _wrapped.append(initialize)
    base_loader.initialize_model = initialize_watched


_wrapped: list[Any] = []


def _watch(model: nn.Module) -> None:
    load = getattr(model, "load_weights", None)
    if load is None:
        return
    noted: dict[str, tuple[str, tuple[int, ...]]] = {}

    def noting(weights: Iterable[tuple[str, torch.Tensor]]) -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor in weights:
            noted[name] = f"{tensor.dtype}".removeprefix("torch."), tuple(tensor.shape)
            yield name, tensor

    @functools.wraps(load)
    def load_noted(weights: Iterable[tuple[str, torch.Tensor]], *given: Any, **named: Any) -> Any:
        return load(noting(weights), *given, **named)

    model.__dict__["load_weights"] = load_noted
    _first[model] = noted


def first_load(model: nn.Module) -> dict[str, tuple[str, tuple[int, ...]]] | None:
    """What the model was given so far; None: nothing, or it was made before `watch`. Nothing is
    noted any more.
    """
    if hasattr(model.__dict__.get("load_weights"), "__wrapped__"):
        del model.__dict__["load_weights"]
    return _first.get(model) or None


def note_first(model: nn.Module, given: dict[str, tuple[str, tuple[int, ...]]] | None) -> None:
    """Say what a model was given that vLLM has not made."""
    if given is not None:
        _first[model] = given
