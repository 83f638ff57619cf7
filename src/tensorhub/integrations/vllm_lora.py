"""vLLM: LoRA adapters, which are models of their own beside their base (`adapters`), loaded without
files.

A trainer publishes `adapter_tensors` as it publishes any model. A request that `adapter_request`
makes names a version of it, for vLLM's own `add_lora`, or for a prompt. Each of the engine's
workers then fetches that version into memory, and gives it to vLLM's manager of adapters. The
engine has to have joined the cluster.

Where an adapter is given up by vLLM, as when it has too many, or at an update of the base by its
weight-transfer interface, the worker still has its tensors, and loads them again when a request
names it.

Responsible for what a worker holds, and for its checks. Not responsible for the base's weights
(`vllm_updater`), nor for when an adapter is loaded, and which are in use (`vllm_lora_requests`).
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch import nn

from tensorhub.errors import ManifestMismatch, StateError, TensorHubError
from tensorhub.integrations.adapters import (
    CONFIG,
    KEPT,
    SCHEME,
    Half,
    Publication,
    Sizes,
    Tensors,
    adapter_tensors,
    check_fits,
    config_of,
    differences,
    named,
    outputs_of,
    unwrapped,
)

if TYPE_CHECKING:
    from vllm.lora.request import LoRARequest

__all__ = ["Adapters", "adapter_request", "adapter_tensors", "watch", "without_adapters"]


def adapter_request(model: str, version: int) -> LoRARequest:
    """The request by which vLLM loads a published version of an adapter: for `add_lora`, or with a
    prompt. Each version has a name and a number of its own, so that a running request keeps its
    version, and no version is answered from what was cached with another one.
    """
    from vllm.lora.request import LoRARequest

    name = f"{model}@{version}"
    # The number is the version's in all of the engine's processes, and fits vLLM's arrays.
    number = 1 + int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "big") % (2**31 - 1)
    return LoRARequest(lora_name=name, lora_int_id=number, lora_path=f"{SCHEME}{name}")


def without_adapters(model: nn.Module) -> nn.Module:
    """The same layers without those that vLLM has put around them for adapters. Its loaders before
    0.29 find no other ones.
    """
    from vllm.lora.layers import BaseLayerWithLoRA

    return unwrapped(model, BaseLayerWithLoRA)


def watch() -> None:
    """Have this process's workers load such requests. Called any number of times."""
    from vllm.lora.worker_manager import WorkerLoRAManager

    load, remove = WorkerLoRAManager._load_adapter, WorkerLoRAManager.remove_adapter
    if hasattr(load, "is_tensorhubs"):
        return

    @functools.wraps(load)
    def load_named(manager: Any, request: LoRARequest) -> Any:
        if not request.lora_path.startswith(SCHEME):
            return load(manager, request)
        return _joined(manager, request).load(manager, request)

    @functools.wraps(remove)
    def remove_named(manager: Any, adapter_id: int) -> bool:
        adapters = _of(manager)
        if adapters is not None:
            adapters.forget(adapter_id)
        return bool(remove(manager, adapter_id))

    load_named.is_tensorhubs = True  # type: ignore[attr-defined]
    WorkerLoRAManager._load_adapter = load_named
    WorkerLoRAManager.remove_adapter = remove_named


def _of(manager: Any) -> Adapters | None:
    found = manager._adapter_manager.model.__dict__.get("_tensorhub_adapters")
    assert found is None or isinstance(found, Adapters)
    return found


def _joined(manager: Any, request: LoRARequest) -> Adapters:
    adapters = _of(manager)
    if adapters is None:
        raise StateError(
            f"{request.lora_name!r} cannot be fetched: this engine has joined no cluster yet; "
            f"tensorhub_join comes first"
        )
    return adapters


def load_on_all(
    worker: Any, request: LoRARequest, needed: Sequence[int]
) -> tuple[TensorHubError | None, list[int]]:
    """Called on each of an engine's workers: all of them load a version, or none does. `needed`:
    the numbers of adapters that queued requests name, which stay. Returns the error (vLLM's
    executors would lose its type), and the numbers of all that can be loaded without a fetch.
    """
    from tensorhub.integrations.vllm_ranks import Ranks

    worker = getattr(worker, "worker", worker)
    manager = worker.model_runner.lora_manager
    ranks = Ranks(worker.vllm_config.parallel_config)
    outcome = ranks.together(
        lambda: _joined(manager, request).asked(manager, request), is_torn=lambda: False
    )
    if not outcome.has_failed:
        outcome = ranks.together(lambda: worker.add_lora(request), is_torn=lambda: False)
        if outcome.has_failed:  # on other workers, perhaps
            worker.remove_lora(request.lora_int_id)
    if outcome.has_failed:
        return outcome.error, []
    return None, _joined(manager, request).keep(needed)


@dataclass(frozen=True)
class _Held:
    number: int  # vLLM's
    tensors: Tensors
    publication: Publication


class Adapters:
    """What one of vLLM's workers has fetched for its model. `fetch`: all tensors of a version, and
    which one that is.
    """

    def __init__(
        self, model: nn.Module, fetch: Callable[[str, int], tuple[Tensors, Publication]]
    ) -> None:
        self._fetch = fetch
        self._held: dict[str, dict[int, _Held]] = {}  # by model and version, in order of loading
        # by number: fetched, and not loaded yet
        self._ready: dict[int, tuple[Tensors, Publication, Any]] = {}
        self._is_told = False  # which versions to keep
        self._manager: Any = None
        model.__dict__["_tensorhub_adapters"] = self

    def asked(self, manager: Any, request: LoRARequest) -> None:
        """As `fetch`, of a new request. Raises VersionConflict: vLLM has loaded what was published
        under this number before, and running requests and its cache have that.
        """
        model, version = named(request.lora_path)
        found = self._held.get(model, {}).get(version)
        if found is not None and not found.publication.is_current():
            raise found.publication.conflict()
        self.fetch(manager, request)

    def fetch(self, manager: Any, request: LoRARequest) -> None:
        """Get ready for `load`. Raises ManifestMismatch: it is no adapter, or none for this engine
        (all reasons are listed); and as `Hub.fetch`.
        """
        self._ready.clear()
        if request.load_inplace or request.lora_int_id not in manager.list_adapters():
            model, version = named(request.lora_path)
            found = self._held.get(model, {}).get(version)
            if found is None:
                tensors, publication = self._fetch(model, version)
            else:
                tensors, publication = found.tensors, found.publication
            made = _made(manager, request, model, tensors)
            self._ready[request.lora_int_id] = tensors, publication, made

    def load(self, manager: Any, request: LoRARequest) -> Any:
        """vLLM's form of a published version; raises as `fetch`."""
        if request.lora_int_id not in self._ready:
            self.fetch(manager, request)
        model, version = named(request.lora_path)
        tensors, publication, made = self._ready.pop(request.lora_int_id)
        self._manager = manager
        held = self._held.setdefault(model, {})
        held[version] = _Held(request.lora_int_id, tensors, publication)
        if not self._is_told:
            self._unload_old((request.lora_int_id,))
        return made

    def keep(self, needed: Container[int]) -> list[int]:
        """Unload versions of each adapter but the last two, and those with these numbers. Returns
        the numbers of what is left.
        """
        self._is_told = True
        self._unload_old(needed)
        return [each.number for held in self._held.values() for each in held.values()]

    def _unload_old(self, needed: Container[int]) -> None:
        for held in self._held.values():
            for old in list(held)[:-KEPT]:
                if held[old].number in needed:
                    continue
                number = held.pop(old).number
                if number not in [each.number for each in held.values()]:
                    self._manager._adapter_manager.remove_adapter(number)

    def forget(self, number: int) -> None:
        """Free what vLLM was told to unload."""
        for model, held in list(self._held.items()):
            kept = {version: each for version, each in held.items() if each.number != number}
            self._held[model] = kept
            if not kept:
                del self._held[model]

    def unload(self) -> None:
        """Have vLLM load each one again before it is used: the memory of its slots goes."""
        if self._manager is not None:
            self._manager.remove_all_adapters()

    def clear(self) -> None:
        """Free all of it. What vLLM has loaded stays loaded."""
        self._held.clear()
        self._ready.clear()

    def state(self) -> dict[str, list[int]]:
        """The versions of each adapter that vLLM has loaded now."""
        loaded = self._manager.list_adapters() if self._held else ()
        return {
            model: [version for version, each in held.items() if each.number in loaded]
            for model, held in self._held.items()
        }


def _made(manager: Any, request: LoRARequest, model: str, tensors: Tensors) -> Any:
    from vllm.lora.peft_helper import PEFTHelper

    config = config_of(model, tensors)
    weights = {name: tensor for name, tensor in tensors.items() if name != CONFIG}
    try:
        helper = PEFTHelper.from_dict(
            {**config, "vllm_max_position_embeddings": manager.max_position_embeddings}
        )
        helper.validate_legal(manager.lora_config)
    except (TypeError, ValueError, ZeroDivisionError) as error:
        text = f"{CONFIG!r}: {error}"
        raise ManifestMismatch(
            f"vLLM cannot use the adapter {model!r}: {text}", differences=(text,)
        ) from error
    mapper: Any = getattr(manager._adapter_manager.model, "hf_to_vllm_mapper", None)
    if hasattr(mapper, "get_rename_mapper"):
        mapper = mapper.get_rename_mapper()
    skipped = getattr(manager._adapter_manager.model, "lora_skip_prefixes", None)
    check_fits(model, list(_differences(manager, config, helper, weights, mapper, skipped)))
    made = manager._lora_model_cls.from_lora_tensors(
        request.lora_int_id,
        {name: tensor.clone() for name, tensor in weights.items()},  # vLLM scales them in place
        helper,
        device="cpu",
        dtype=manager.lora_config.lora_dtype,
        model_vocab_size=manager.vocab_size,
        weights_mapper=mapper,
        skip_prefixes=skipped,
    )
    made.is_3d_lora_weight = request.is_3d_lora_weight
    for check in ("_validate_moe_lora_format", "_validate_classification_head_lora"):
        if hasattr(manager._adapter_manager, check):  # vLLM 0.33
            getattr(manager._adapter_manager, check)(made)
    return made


def _differences(
    manager: Any,
    config: Mapping[str, Any],
    helper: Any,
    weights: Tensors,
    mapper: Any,
    skipped: list[str] | None,
) -> Iterator[str]:
    """Why an adapter cannot be this engine's: wrong names, dtypes, shapes, and what is missing."""
    from vllm.lora.utils import is_base_embedding_weights, parse_fine_tuned_lora_name

    halves = []
    for name, tensor in weights.items():
        if is_base_embedding_weights(name) or any(
            f".{prefix}" in name or name.startswith(prefix) for prefix in skipped or ()
        ):
            continue
        try:
            module, is_a = parse_fine_tuned_lora_name(name, mapper)
        except ValueError:
            yield f"{name!r}: no name of a LoRA weight"
            continue
        if ".experts." in f"{module}.":
            yield f"{name!r}: adapters of experts are not supported"
            continue
        if module not in (helper.modules_to_save or ()):
            halves.append(Half(name, module, is_a, tensor))
    sizes = dict(_sizes(manager._adapter_manager))
    yield from differences(halves, sizes, lambda half: _rank(half, helper), config)


def _rank(half: Half, helper: Any) -> int:
    if hasattr(helper, "get_rank_and_scaling"):  # vLLM 0.33
        from vllm.lora.utils import parse_fine_tuned_lora_name

        return int(helper.get_rank_and_scaling(parse_fine_tuned_lora_name(half.name)[0])[0])
    return int(helper.r)


def _sizes(manager: Any) -> Iterator[tuple[str, Sizes]]:
    """Inputs and outputs of each module that takes an adapter; None: not known here."""
    for name, module in manager.modules.items():
        base = module.base_layer
        inputs = getattr(base, "input_size", None)
        packed = manager.packed_modules.get(name)
        if not packed:
            yield name, (inputs, getattr(base, "output_size", None))
            continue
        for part, outputs in zip(packed, outputs_of(base, len(packed)), strict=True):
            yield part, (inputs, outputs)
