"""SGLang: LoRA adapters, which are models of their own beside their base (`adapters`), loaded
without files.

SGLang's own call `load_lora_adapter`, with the path `tensorhub:MODEL@VERSION`, has each of the
engine's ranks fetch that version into memory, and give it to SGLang's manager of adapters, which
puts it into a slot when a request names it. The engine has to have joined the cluster.

Responsible for fetching an adapter, and for its checks. Not responsible for the base's weights
(`sglang_engine`), nor for slots: they are SGLang's.
"""

from __future__ import annotations

import functools
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Protocol

from torch import nn

from tensorhub.errors import StateError
from tensorhub.integrations.adapters import (
    CONFIG,
    SCHEME,
    Half,
    Sizes,
    Tensors,
    check_fits,
    config_of,
    differences,
    named,
    outputs_of,
    unwrapped,
)

NEEDED = ("peft_type", "r", "lora_alpha", "target_modules")  # of the configuration
PARTS = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}
_NAME = re.compile(
    r"(?:.*\.)?(layers\.\d+\..+|embed_tokens|lm_head)\.lora_(?:embedding_)?([AB])(?:\.weight)?"
)


class Fetching(Protocol):
    """One rank of an engine."""

    def fetch_adapter(self, model: str, version: int) -> Tensors: ...
    def has_loaded(self, name: str) -> None: ...

    def on_all_ranks(self, call: Callable[[], Any]) -> Any:
        """The call's result, once it has returned on all ranks; raises on all ranks."""


def without_adapters(model: nn.Module) -> nn.Module:
    """The same layers without those that SGLang has put around them for adapters."""
    layers = sys.modules.get("sglang.srt.lora.layers")  # there are none before it is imported
    return model if layers is None else unwrapped(model, layers.BaseLayerWithLoRA)


def watch(find: Callable[[nn.Module], Fetching | None]) -> None:
    """Have this process's rank load such paths. `find`: the rank of a model. Called any number of
    times.
    """
    managers: Any = sys.modules.get("sglang.srt.lora.lora_manager")
    if managers is None or hasattr(managers.LoRAManager.load_lora_adapter, "is_tensorhubs"):
        return
    load = managers.LoRAManager.load_lora_adapter

    @functools.wraps(load)
    def load_named(manager: Any, lora_ref: Any) -> Any:
        if not str(lora_ref.lora_path).startswith(SCHEME):
            return load(manager, lora_ref)
        try:
            rank = find(manager.base_model)
            if rank is None:
                raise StateError(
                    f"{lora_ref.lora_name!r} cannot be fetched: this engine has joined no cluster "
                    f"yet; Session.get_ready comes first"
                )
            return _load(manager, lora_ref, rank)
        except Exception as error:  # it would end the engine
            kind = "" if hasattr(error, "outcome") else f"{type(error).__name__}: "
            return manager.create_lora_update_result(success=False, error_message=f"{kind}{error}")

    load_named.is_tensorhubs = True  # type: ignore[attr-defined]
    managers.LoRAManager.load_lora_adapter = load_named


def _load(manager: Any, lora_ref: Any, rank: Fetching) -> Any:
    model, version = named(lora_ref.lora_path)

    def fetched() -> tuple[dict[str, Any], Tensors]:
        tensors = rank.fetch_adapter(model, version)
        config = config_of(model, tensors)
        weights = {name: tensor for name, tensor in tensors.items() if name != CONFIG}
        check_fits(model, list(_differences(manager, config, weights)))
        return config, weights

    def loaded() -> Any:
        done = manager.load_lora_adapter_from_tensors(lora_ref, weights, config)
        if not done.success:
            raise StateError(f"SGLang has refused {lora_ref.lora_name!r}: {done.error_message}")
        return done

    config, weights = rank.on_all_ranks(fetched)
    try:
        done = rank.on_all_ranks(loaded)
        rank.has_loaded(f"{model}@{version}")
        return done
    except Exception:
        if lora_ref.lora_id in manager.loras:  # on this rank alone
            manager.unload_lora_adapter(lora_ref)
        raise


def _differences(manager: Any, config: Mapping[str, Any], weights: Tensors) -> Iterator[str]:
    if lacks := [each for each in NEEDED if each not in config]:
        yield f"{CONFIG!r} does not say {', '.join(lacks)}"
        return
    halves = []
    for name, tensor in weights.items():
        found = _NAME.fullmatch(name)
        if found is None:
            yield f"{name!r}: no name of a LoRA weight"
        elif ".experts." in name:
            yield f"{name!r}: adapters of experts are not supported"
        else:
            halves.append(Half(name, found[1], found[2] == "A", tensor))
    yield from differences(halves, dict(_sizes(manager)), lambda half: int(config["r"]), config)


def _sizes(manager: Any) -> Iterator[tuple[str, Sizes]]:
    """Inputs and outputs of each module that takes an adapter, by the end of its name."""
    for layer in manager.lora_modules:
        for name, module in layer.items():
            base, short = module.base_layer, name[name.rindex("layers.") :]
            inputs = getattr(base, "input_size", None)
            yield short, (inputs, getattr(base, "output_size", None))
            above, _, last = short.rpartition(".")
            parts = PARTS.get(last, ())
            for part, outputs in zip(parts, outputs_of(base, len(parts)), strict=True):
                yield f"{above}.{part}", (inputs, outputs)
    for name in ("embed_tokens", "lm_head"):
        if getattr(manager, f"{name}_module", None) is not None:
            yield name, (None, None)
