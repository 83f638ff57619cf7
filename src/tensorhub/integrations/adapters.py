"""LoRA adapters, which are models of their own beside their base, in the form in which they are
published: the tensors of a PEFT checkpoint, and its configuration as one more.

Responsible for that form, for an adapter's name in an engine's request, and for whether an adapter
fits an engine. Not responsible for what an engine does with it (`sglang_lora`, `vllm_lora`).
"""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import nn

from tensorhub import sync
from tensorhub.api.hub import Fetched
from tensorhub.api.tools import published_tensors
from tensorhub.errors import (
    InvalidType,
    InvalidValue,
    ManifestMismatch,
    TensorHubError,
    VersionConflict,
    VersionUnavailable,
    shown,
    some,
)
from tensorhub.runtime.loop_thread import finish_blocking
from tensorhub.types import VERSION_MAX, VersionInfo

Tensors = Mapping[str, torch.Tensor]
Sizes = tuple[int | None, int | None]  # inputs and outputs of a module; None: not known

CONFIG: Final = "adapter_config.json"
SCHEME: Final = "tensorhub:"  # of a request's path
# for so long an engine stands still at most, to ask whether a version is current
LOOK_S: Final = 5.0
KEPT: Final = 2  # versions of an adapter: requests may still be answered with the version before


def adapter_tensors(weights: Tensors, config: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """What to register as an adapter: its tensors where they are, and the bytes of its
    configuration. The engine's framework need not be installed.

    `weights`: by the names of a PEFT checkpoint, as `peft.get_peft_model_state_dict(model)` has
    them. `config`: what its `adapter_config.json` says, as
    `model.peft_config["default"].to_dict()`.
    """
    try:
        text = json.dumps(dict(config), default=_listed)
    except (TypeError, ValueError, RecursionError) as error:
        raise InvalidType(
            f"config={shown(config)}: {error}; give what adapter_config.json is to say"
        ) from error
    return {**weights, CONFIG: torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8)}


def _listed(value: object) -> list[Any]:
    if isinstance(value, set | frozenset):
        return sorted(value)
    raise TypeError(f"{shown(value)} cannot be written as JSON")


def named(path: str) -> tuple[str, int]:
    """The model and the version of a request's path."""
    model, _, version = path.removeprefix(SCHEME).rpartition("@")
    is_number = version.isdecimal() and len(version) <= len(str(VERSION_MAX))
    if not model or not is_number:
        raise InvalidValue(f"lora_path={shown(path)}: give {SCHEME}MODEL@VERSION")
    return model, int(version)


def config_of(model: str, tensors: Tensors) -> dict[str, Any]:
    """The configuration that was published with an adapter."""
    config = tensors.get(CONFIG)
    try:
        if config is not None and config.dtype == torch.uint8:
            made = json.loads(config.numpy().tobytes())
            if isinstance(made, dict):
                return made
    except (ValueError, RecursionError):  # too deep
        pass
    raise _no_adapter(model)


def _no_adapter(model: str) -> ManifestMismatch:
    text = (
        f"{model!r} has no tensor {CONFIG!r} that says what it is: publish "
        f"adapter_tensors(weights, config)"
    )
    return ManifestMismatch(text, differences=(text,))


def fetch_adapter(hub: sync.Hub, model: str, version: int, timeout_s: float) -> Fetched:
    """All tensors of a version of an adapter. A request comes from a client of the engine, and may
    name any model: a base model's weights need not fit into the engine's memory. So what is no
    adapter is refused before it is fetched. So is what no worker holds now: the engine stands still
    while it waits.

    Raises ManifestMismatch: it is no adapter; and as `Hub.fetch`.
    """
    asked = published_tensors(hub._async, model, version, timeout_s)
    if finish_blocking(asked).kinds.get(CONFIG, ("", ()))[0] != "uint8":
        raise _no_adapter(model)
    view = hub.describe(model, timeout_s, version=version).versions
    if [each.state for each in view] != ["available"]:
        raise VersionUnavailable(
            f"no live worker holds version {version} of {model!r} now: request a newer one"
        )
    return hub.fetch(model, version, rank=None, timeout=timeout_s)


class Publication:
    """What an adapter's version was when it was fetched. Its number is another publication's once
    the model was rolled back, as by a trainer that starts again from a checkpoint.
    """

    def __init__(self, hub: sync.Hub, info: VersionInfo) -> None:
        self._hub, self._info = hub, info
        self._newest: VersionInfo | None = None  # at the last look
        with suppress(TensorHubError):
            hub.newest(info.model)  # hear of it from now on

    def is_current(self) -> bool:
        """False: the number is known to be another publication's. The coordinator is asked only
        after something was published.
        """
        its = self._info
        try:
            newest = self._hub.newest(its.model)
            if newest == self._newest:
                return True
            views = self._hub.describe(its.model, LOOK_S, version=its.version).versions
        except TensorHubError:  # it is not known any more, or the coordinator is away
            return True
        if any(each.content_id != its.content_id for each in views):
            return False
        self._newest = newest
        return True

    def conflict(self) -> VersionConflict:
        its = self._info
        return VersionConflict(
            f"version {its.version} of {its.model!r} was published anew since this engine has "
            f"loaded it. Have the engine unload {its.model}@{its.version}, with what it has cached "
            f"for it; then repeat this"
        )


def unwrapped(model: nn.Module, wrapper: type[Any]) -> nn.Module:
    """The same layers as loaders know them: without those of the class `wrapper`, which an engine
    has put around them for adapters.
    """
    made: dict[nn.Module, nn.Module] = {}

    def of(module: nn.Module) -> nn.Module:
        if isinstance(module, wrapper):
            return of(module.base_layer)
        if module not in made:
            inner = {name: each and of(each) for name, each in module._modules.items()}
            made[module] = module
            if any(each is not module._modules[name] for name, each in inner.items()):
                made[module] = copy.copy(module)
                made[module].__dict__["_modules"] = inner
        return made[module]

    return of(model)


def outputs_of(base: Any, parts: int) -> Sequence[int | None]:
    """The outputs of each part of a fused linear layer."""
    outputs: Sequence[int | None] = getattr(base, "output_sizes", ())
    if hasattr(base, "total_num_kv_heads"):
        width = getattr(base, "v_head_size", base.head_size)
        kv_heads = base.total_num_kv_heads
        outputs = (
            base.total_num_heads * base.head_size,
            kv_heads * base.head_size,
            kv_heads * width,
        )
    return outputs if len(outputs) == parts else [None] * parts


@dataclass(frozen=True)
class Half:
    """One of the two matrices of a module. `name`: as it is published."""

    name: str
    module: str
    is_a: bool
    tensor: torch.Tensor


def differences(
    halves: Iterable[Half],
    sizes: Mapping[str, Sizes],
    rank_of: Callable[[Half], int | None],
    config: Mapping[str, Any],
) -> Iterator[str]:
    """Why an adapter cannot be that of an engine with these modules: wrong names, dtypes, shapes,
    and what is missing. `rank_of`: None where it cannot be known.
    """
    parts: dict[str, dict[bool, str]] = {}
    for half in halves:
        name, tensor, module = half.name, half.tensor, half.module
        parts.setdefault(module, {})[half.is_a] = name
        found = sizes.get(module) or sizes.get(module.removesuffix(".base_layer"))
        if found is None:
            yield f"{name!r}: the engine has no module {module!r} that takes an adapter"
            continue
        rank = rank_of(half)
        wanted = (rank, found[0]) if half.is_a else (found[1], rank)
        if not tensor.dtype.is_floating_point or tensor.element_size() == 1:
            yield f"{name!r}: {tensor.dtype} is no dtype of an adapter".replace("torch.", "")
        elif tensor.ndim != 2:
            yield f"{name!r}: it has {tensor.ndim} dimensions, and has to have 2"
        elif any(size not in (None, its) for size, its in zip(wanted, tensor.shape, strict=True)):
            text = ", ".join("any" if size is None else f"{size}" for size in wanted)
            yield f"{name!r}: its shape is {tuple(tensor.shape)}, and has to be ({text})"
    for module, has in parts.items():
        if len(has) == 1:
            (name,) = has.values()
            yield f"{module!r}: {name!r} is there without its other half"
    for module in sizes:
        if module not in parts and _is_targeted(module, config):
            yield f"{module!r}: it is a target module, and has no weights"


def check_fits(model: str, found: Sequence[str]) -> None:
    """Raise ManifestMismatch with all of these differences."""
    if found:
        raise ManifestMismatch(
            f"the adapter {model!r} does not fit this engine in {len(found)} place(s): "
            f"{some(found, '; ', most=100)}",
            differences=tuple(found),
        )


def _is_targeted(module: str, config: Mapping[str, Any]) -> bool:
    """Whether the configuration names a module beyond doubt."""
    targets = config.get("target_modules")
    if not isinstance(targets, list) or any(
        config.get(each) for each in ("layers_to_transform", "layers_pattern", "exclude_modules")
    ):
        return False
    return any(module == each or module.endswith(f".{each}") for each in targets)
