"""vLLM's workers: the engine's side of the weight-transfer backend `tensorhub`.

What each parameter is made of is recorded from the model's own `load_weights`. Then there are three ways:

- *in place*: parameters that post-processing leaves as they are loaded are registered where they lie. All workers of a
  tensor-parallel engine are one group.
- *by layer*: the tensors of any other layer are read in load format, as this worker has them, some layers at a time, while
  the ones before are processed. Such memory is read into and goes: it is no source for others.
- *by `load_weights`*: what the loader computes, of whole tensors.

With host memory for a whole shard (`host_memory_bytes`) the first two are staged: the shard is filled in host memory, where
it stays and serves others, and the engine's own tensors are written when all of it is there.

Responsible for what a worker does when. Not responsible for vLLM's layers (`vllm_layers`), nor for the trainer (`vllm`).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn
from vllm.config import set_current_vllm_config
from vllm.distributed.weight_transfer.base import WeightTransferEngine, WeightTransferInitInfo, WeightTransferUpdateInfo
from vllm.model_executor.layers.attention import is_deferred_attention_layer

from tensorhub import shared_empty_like, sync
from tensorhub.errors import ManifestMismatch, StateError, TensorHubError, VersionConflict, some
from tensorhub.integrations import vllm_layers as layers
from tensorhub.integrations.recording import Recording, Specs, record
from tensorhub.integrations.vllm import INTACT, TORN
from tensorhub.logs import get_logger
from tensorhub.runtime.loop_thread import finish_blocking
from tensorhub.tools import published_tensors

log = get_logger(__name__)

BATCH_BYTES = 256 * 2**20  # of layers that are read together


@dataclass
class Init(WeightTransferInitInfo):
    """`replica`: the trainer's word for its engines. `version`: one that will come next, to get ready for."""

    address: str | list[str]
    model: str
    replica: str
    host_memory_bytes: int = 0
    timeout_s: float = 300.0
    version: int | None = None


@dataclass
class Update(WeightTransferUpdateInfo):
    version: int
    content_id: str | None = None


@dataclass
class _Layer:
    """One module whose tensors are read: `names` by their attribute."""

    module: nn.Module
    names: dict[str, str]
    nbytes: int


@dataclass
class _Plan:
    """How a publication of these tensors gets into the model."""

    specs: Specs
    recording: Recording
    in_place: list[_Layer] = field(default_factory=list)
    processed: list[_Layer] = field(default_factory=list)
    loaded: list[str] = field(default_factory=list)  # whole published tensors, for load_weights

    @property
    def nbytes(self) -> int:
        return sum(layer.nbytes for layer in (*self.in_place, *self.processed))


class Engine(WeightTransferEngine[Init, Update]):  # type: ignore[type-arg, unused-ignore]
    """One worker of vLLM's. Made by vLLM, after it has loaded the model."""

    init_info_cls = Init
    update_info_cls = Update
    supports_draft_weight_update = False

    def __init__(self, config: Any, vllm_config: Any, device: torch.device, model: nn.Module) -> None:
        super().__init__(config, vllm_config, device, model)
        self._unprocessed = {layer for layer in model.modules() if layers.is_unprocessed(layer)}
        self._init: Init | None = None
        self._hub: sync.Hub | None = None
        self._plan: _Plan | None = None
        self._ready_for: int | None = None  # the version that `_plan` was compared with last
        self._weights: sync.Weights | None = None
        self._live: dict[str, torch.Tensor] = {}  # what is written in place
        self._staged: dict[str, torch.Tensor] = {}  # all of the shard, in host memory
        self._served: Update | None = None
        self._torn = False
        self._is_open = self._is_updated = self._is_abandoned = False

    # --------------------------------------------------------------------------------------------------- what vLLM calls

    def init_transfer_engine(self, init_info: Init) -> None:
        """Join the trainer's cluster, or get ready for its next version."""
        lasting = replace(init_info, version=None)
        if lasting != self._init or self._hub is None:
            self.shutdown()
            self._hub = sync.connect(init_info.address)
            self._init = lasting
            self._is_abandoned = self._is_open  # by a trainer that is gone
        if init_info.version is not None:
            self._prepare(self._hub, init_info.version)
            self._ready_for = init_info.version

    def start_weight_update(self) -> None:
        if self._hub is None:
            raise StateError("start_weight_update comes after init_weight_transfer_engine")
        self._is_open, self._is_updated, self._is_abandoned = True, False, False

    def receive_weights(self, update_info: Update) -> None:
        if self._hub is None:
            raise StateError("update_weights comes after init_weight_transfer_engine")
        try:
            self._receive(self._hub, update_info)
        except Exception as error:
            self._is_open = False  # so does vLLM
            raise self._told(error) from error
        self._is_updated = True

    def finish_weight_update(self) -> None:
        if not (self._is_updated or self._is_abandoned):
            raise StateError("finish_weight_update comes after update_weights: nothing was updated")
        self._is_open = self._is_updated = self._is_abandoned = False

    def shutdown(self) -> None:
        weights, hub = self._weights, self._hub
        self._weights = self._hub = self._plan = self._init = self._ready_for = None
        self._staged = self._live = {}
        for each in (weights, hub):
            if each is not None:
                with suppress(TensorHubError):
                    each.close()

    # ------------------------------------------------------------------------------------------------------------ an update

    def _receive(self, hub: sync.Hub, update: Update) -> None:
        served = self._served
        if served is not None and not self._torn:
            if served.content_id is not None and served.content_id == update.content_id:
                return
            newest = hub.wait_for(self._name, at_least=0, timeout=self._timeout_s).version
            if update.version < served.version and update.version != newest:
                text = f"version {update.version} is older than the one that the engine serves, {served.version}"
                raise VersionConflict(f"{text}; to go back, call hub.rollback({self._name!r}, to=...) and publish anew")
        plan = self._plan if self._plan is not None and self._ready_for == update.version else None
        plan, self._ready_for = plan or self._prepare(hub, update.version), None
        loaded: Mapping[str, torch.Tensor] = {}
        if plan.loaded:
            loaded = hub.fetch(self._name, update.version, rank=None, names=plan.loaded, timeout=self._timeout_s)
        if self._weights is not None:
            if not self._staged and self._weights.version is None:
                self._fill_numbers(plan, self._live)
            try:
                self._weights.update(update.version, timeout=self._timeout_s)
            except TensorHubError as error:
                self._torn = self._torn or (not self._staged and error.memory != "intact")
                raise
        self._torn = True
        if self._staged:
            self._write_staged(plan)
        else:
            for layer, tensors in self._sinks(hub, plan, update.version):
                layers.process(layer.module, {attribute: tensors[name] for attribute, name in layer.names.items()})
        if loaded:
            layers.load(self.model, self.model_config, loaded.items())
        layers.finish(self.model, self.model_config)
        self._torn, self._served = False, update

    def _write_staged(self, plan: _Plan) -> None:
        with torch.no_grad():
            for layer in plan.in_place:
                for name in layer.names.values():
                    self._live[name].copy_(self._staged[name])
            for layer in plan.processed:
                tensors = layers.allocate(layer.module, layer.names)
                for attribute, name in layer.names.items():
                    tensors[attribute].copy_(self._staged[name])
                layers.process(layer.module, tensors)

    def _sinks(self, hub: sync.Hub, plan: _Plan, version: int) -> Iterator[tuple[_Layer, dict[str, torch.Tensor]]]:
        """Each layer that is processed, with its tensors in load format; the next ones are read meanwhile."""

        def read(batch: list[_Layer]) -> dict[str, torch.Tensor]:
            tensors = {}
            for layer in batch:
                made = layers.allocate(layer.module, layer.names)
                tensors.update({name: made[attribute].data for attribute, name in layer.names.items()})
            self._fill_numbers(plan, tensors)
            sources = {name: plan.recording.sources.get(name, []) for name in tensors}
            sink = hub.register(self._name, tensors, sources=sources, spot=True, partial=True)
            try:
                sink.replicate(version, timeout=self._timeout_s)
            finally:
                sink.close(abandon=True)
            return tensors

        with ThreadPoolExecutor(1, thread_name_prefix="tensorhub-sink") as thread:
            batches = _batches(plan.processed)
            coming = [thread.submit(read, batch) for batch in batches[:1]]
            for number, batch in enumerate(batches):
                tensors = coming.pop().result()
                if number + 1 < len(batches):
                    coming.append(thread.submit(read, batches[number + 1]))
                for layer in batch:
                    yield layer, tensors

    @staticmethod
    def _fill_numbers(plan: _Plan, tensors: Mapping[str, torch.Tensor]) -> None:
        for name, place, value in plan.recording.filled:
            if name in tensors:
                tensors[name][place] = value

    def _told(self, error: Exception) -> TensorHubError:
        """The same error, which says what the engine's weights are."""
        says = TORN if self._torn else INTACT
        if isinstance(error, TensorHubError):
            error.args = (f"{error} [{says}]",)
        else:
            error = StateError(f"{type(error).__name__}: {error} [{says}]")
        error.memory = "torn" if self._torn else "intact"
        return error

    # ------------------------------------------------------------------------------------------------------ getting ready

    @property
    def _name(self) -> str:
        assert self._init is not None
        return self._init.model

    @property
    def _timeout_s(self) -> float:
        assert self._init is not None
        return self._init.timeout_s

    def _prepare(self, hub: sync.Hub, version: int) -> _Plan:
        """The plan for this version's tensors: made once, and again when they are others than before."""
        _, specs = finish_blocking(published_tensors(hub._hub, self._name, version, self._timeout_s))
        if self._plan is None or self._plan.specs != specs:
            if self._weights is not None:
                self._weights.close(abandon=True)
                self._weights, self._staged = None, {}
            with set_current_vllm_config(self.vllm_config):
                plan = self._make_plan(specs)
            self._register(hub, plan)
            self._plan = plan
        return self._plan

    def _make_plan(self, specs: Specs) -> _Plan:
        modules = dict(self.model.named_modules())
        with layers.load_format(self.model):
            parameters = {
                f"{prefix}.{attribute}".removeprefix("."): (prefix, attribute, tensor)
                for prefix, module in modules.items()
                for attribute, tensor in layers.own_tensors(module).items()
            }
            found = record(self.model.load_weights, {name: each[2] for name, each in parameters.items()}, specs)
        plan = _Plan(specs, found)
        self._check_gaps(found, {name: (modules[prefix], attribute) for name, (prefix, attribute, _) in parameters.items()})
        by_module: dict[str, dict[str, str]] = {}
        for name, (prefix, attribute, _) in parameters.items():
            if name in found.needs:
                by_module.setdefault(prefix, {})[attribute] = name
        computed = {
            prefix
            for prefix, names in by_module.items()
            if is_deferred_attention_layer(modules[prefix]) or any(name in found.computed for name in names.values())
        }
        whole = {each for prefix in computed for name in by_module[prefix].values() for each in found.needs[name]}
        while True:  # who shares a published tensor with a module that load_weights loads is loaded by it as well
            more = {
                prefix
                for prefix, names in by_module.items()
                if prefix not in computed and any(each in whole for name in names.values() for each in found.needs[name])
            }
            if not more:
                break
            computed |= more
            whole |= {each for prefix in more for name in by_module[prefix].values() for each in found.needs[name]}
        plan.loaded = [name for name in specs if name in whole]
        for prefix, names in by_module.items():
            if prefix not in computed:
                module, nbytes = modules[prefix], sum(parameters[name][2].nbytes for name in names.values())
                ways = plan.in_place if module in self._unprocessed else plan.processed
                ways.append(_Layer(module, names, nbytes))
        log.info(
            "vllm_plan",
            model=self._name,
            in_place=len(plan.in_place),
            processed=len(plan.processed),
            loaded=plan.loaded,
            computed=found.computed,
            unread=found.unread,
        )
        return plan

    def _check_gaps(self, found: Recording, where: Mapping[str, tuple[nn.Module, str]]) -> None:
        """Nothing that is loaded at start-up may be left out. Quantized models have scales that are not in a checkpoint."""
        live = {name: layers.own_tensors(module).get(attribute) for name, (module, attribute) in where.items()}
        written = {id(live[name]) for name in found.needs}
        missing = [
            name
            for name in found.gaps
            if isinstance(live[name], nn.Parameter)
            and (name in found.needs or id(live[name]) not in written)  # a tied one is written under another name
            and not is_deferred_attention_layer(where[name][0])
        ]
        if missing and getattr(self.model_config, "quantization", None) is None:
            differences = tuple(f"{name!r}: {found.gaps[name]} elements come from no published tensor" for name in missing)
            text = f"{len(missing)} parameter(s) of the engine are not in what is published as {self._name!r}"
            raise ManifestMismatch(f"{text}: {some(differences, '; ', most=100)}", differences=differences)

    def _register(self, hub: sync.Hub, plan: _Plan) -> None:
        assert self._init is not None
        self._live = {n: layers.own_tensors(each.module)[a].data for each in plan.in_place for a, n in each.names.items()}
        if 0 < plan.nbytes <= self._init.host_memory_bytes:
            with layers.load_format(self.model):
                all_ = (*plan.in_place, *plan.processed)
                like = {name: layers.own_tensors(each.module)[a] for each in all_ for a, name in each.names.items()}
                like = {name: torch.empty(tensor.shape, dtype=tensor.dtype, device="meta") for name, tensor in like.items()}
            tensors = self._staged = shared_empty_like(like)
            self._fill_numbers(plan, tensors)
        else:
            tensors = self._live
        if tensors:
            parallel = self.parallel_config
            self._weights = hub.register(
                self._name,
                tensors,
                sources={name: plan.recording.sources.get(name, []) for name in tensors},
                group=f"{self._init.replica}/{self.vllm_config.instance_id}/{parallel.data_parallel_index}",
                rank=parallel.rank,
                world_size=parallel.world_size,
                spot=True,
                partial=True,
            )


def _batches(all_: Iterable[_Layer]) -> list[list[_Layer]]:
    """Layers that are read together: some, of so many bytes, or one that is larger."""
    batches: list[list[_Layer]] = []
    room = 0
    for layer in all_:
        if not batches or layer.nbytes > room:
            batches.append([])
            room = BATCH_BYTES
        batches[-1].append(layer)
        room -= layer.nbytes
    return batches
