"""vLLM's workers: the engine's side of the weight-transfer backend `tensorhub`.

The source of each parameter is recorded from the model's own `load_weights`. Then there are three
ways:

- *in place*: parameters that post-processing leaves as they are loaded are registered where they
  lie. All workers of a tensor-parallel engine are one group.
- *by layer*: the tensors of any other layer are read in load format, as this worker has them, some
  layers at a time, while earlier layers are processed. Such memory is filled and freed: it is no
  source for other workers.
- *by `load_weights`*: parameters that the loader computes, of whole tensors.

With host memory for a whole shard (`host_memory_bytes`) the first two are staged: the shard is
filled in host memory, where it stays and serves other workers, while the engine generates. The
engine's own tensors are written when all of it is there.

All workers of an engine say together whether a call has failed: see `Engine._together`.

Responsible for what a worker does when. Not responsible for vLLM's layers (`vllm_layers`), nor for
the trainer (`vllm`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.distributed
from torch import nn
from vllm.config import set_current_vllm_config
from vllm.distributed import parallel_state
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.model_executor.layers.attention import is_deferred_attention_layer

from tensorhub import shared_empty_like, sync
from tensorhub.api.tools import PublishedTensors, changed_tensors, published_tensors
from tensorhub.errors import (
    IntegrityError,
    ManifestMismatch,
    RegistrationError,
    StateError,
    TensorHubError,
    VersionConflict,
    some,
)
from tensorhub.integrations import vllm_layers as layers
from tensorhub.integrations.recording import Recording, Specs, record
from tensorhub.integrations.vllm_session import INTACT, OPEN, TORN
from tensorhub.logs import get_logger
from tensorhub.runtime.loop_thread import finish_blocking

log = get_logger(__name__)

# the text of the error, if a call has failed; whether the weights are torn
_Outcome = tuple[str | None, bool]

BATCH_BYTES = 256 * 2**20  # of layers that are read together


@dataclass
class Init(WeightTransferInitInfo):
    """`replica`: the trainer's word for its engines. `version`: the next version, to get ready for.
    `check`: compare the engine's tensors with the published ones. `digests`: keep digests of
    tensors that are not written in place, to compare.
    """

    address: str | list[str]
    model: str
    replica: str
    host_memory_bytes: int = 0
    timeout_s: float = 300.0
    version: int | None = None
    check: bool = False
    digests: bool = False


@dataclass
class Update(WeightTransferUpdateInfo):
    version: int
    content_id: str | None = None


@dataclass
class _Layer:
    """One module with tensors to read: `names` by their attribute."""

    name: str
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
    computed: list[_Layer] = field(default_factory=list)  # of what load_weights computes
    # the whole published tensors that it is given for that
    loaded: list[str] = field(default_factory=list)

    @property
    def nbytes(self) -> int:
        return sum(layer.nbytes for layer in (*self.in_place, *self.processed))


class Engine(WeightTransferEngine[Init, Update]):  # type: ignore[type-arg, unused-ignore]
    """One worker of vLLM's. Made by vLLM, after it has loaded the model."""

    init_info_cls = Init
    update_info_cls = Update
    supports_draft_weight_update = False

    def __init__(
        self, config: Any, vllm_config: Any, device: torch.device, model: nn.Module
    ) -> None:
        super().__init__(config, vllm_config, device, model)
        self._unprocessed = {layer for layer in model.modules() if layers.is_unprocessed(layer)}
        self._acting_once = [
            name for name, layer in model.named_modules() if layers.acts_once(layer)
        ]
        self._init: Init | None = None
        self._hub: sync.Hub | None = None
        self._published: PublishedTensors | None = None  # of which `_plan` is, or may be
        self._plan: _Plan | None = None
        self._ready_for: int | None = None  # the version that `_plan` was compared with last
        self._weights: sync.Weights | None = None
        self._live: dict[str, torch.Tensor] = {}  # the tensors that are written in place
        self._staged: dict[str, torch.Tensor] = {}  # all of the shard, in host memory
        self._digests: dict[str, bytes] = {}  # of computed tensors, when they were made
        self._served: Update | None = None
        self._torn = False
        self._is_open = self._is_updated = self._is_abandoned = False

    # ----------------------------------------------------------------------------------------------
    # what vLLM calls

    def init_transfer_engine(self, init_info: Init) -> None:
        """Join the trainer's cluster, get ready for its next version, or check the served
        version.
        """
        if error := self._together(lambda: self._join(init_info))[0]:
            raise error

    def start_weight_update(self) -> None:
        if self._hub is None and self._speaks:
            raise StateError("start_weight_update comes after init_weight_transfer_engine")
        self._is_open, self._is_updated, self._is_abandoned = True, False, False

    def receive_weights(self, update_info: Update) -> None:
        error, are_torn = self._together(lambda: self._receive(update_info))
        if not are_torn:
            self._is_updated, self._is_abandoned = True, False
            return
        # A worker that has succeeded has new weights, beside workers that have old ones.
        self._torn = any(are_torn) or len(are_torn) < self.parallel_config.world_size
        self._is_abandoned = True  # only `finish` is left to do
        if error is not None:
            self._is_open = False  # so does vLLM
            says = TORN if self._torn else INTACT
            error.args, error.memory = (f"{error} [{says}]",), "torn" if self._torn else "intact"
            raise error

    def finish_weight_update(self) -> None:
        if self._speaks and not (self._is_updated or self._is_abandoned):
            self._is_abandoned = True
            raise StateError(
                "finish_weight_update comes after update_weights: nothing was updated; once more "
                "gives it up"
            )
        self._is_open = self._is_updated = self._is_abandoned = False

    def shutdown(self) -> None:
        weights, hub = self._weights, self._hub
        self._weights = self._hub = self._published = self._plan = self._init = self._ready_for = (
            None
        )
        self._staged = self._live = {}
        for each in (weights, hub):
            if each is not None:
                with suppress(TensorHubError):
                    each.close()

    # ----------------------------------------------------------------------------------------------
    # several workers

    @property
    def _speaks(self) -> bool:
        """Whether this worker raises for all workers of its engine."""
        return bool(self.parallel_config.rank == self.parallel_config.world_size - 1)

    def _together(self, call: Callable[[], None]) -> tuple[TensorHubError | None, list[bool]]:
        """Make a call on all workers. Returns the error to raise here, and of each worker that has
        failed whether its weights are torn.

        Only the last worker raises, for all of them: vLLM's executor reads answers in the order of
        ranks up to the first error, and takes what it leaves unread for answers to later calls.
        """
        error: Exception | None = None
        try:
            call()
        except Exception as each:
            error = each
        said = self._shared(
            (None if error is None else f"{type(error).__name__}: {error}", self._torn)
        )
        failed = {rank: text for rank, (text, _) in sorted(said.items()) if text is not None}
        are_torn = [said[rank][1] for rank in failed]
        if not failed or not self._speaks:
            return None, are_torn
        if len(said) == 1 and isinstance(error, TensorHubError):
            return error, are_torn
        text = "; ".join(
            [f"worker {rank}: {text}" if len(said) > 1 else text for rank, text in failed.items()]
        )
        together = StateError(text)
        together.__cause__ = error
        return together, are_torn

    def _shared(self, mine: _Outcome) -> dict[int, _Outcome]:
        """What all workers of this engine say, by rank. They wait for each other as long as vLLM's
        groups do.
        """
        said = {self.parallel_config.rank: mine}
        if self.parallel_config.world_size > 1:
            for get_group in ("get_tp_group", "get_pcp_group", "get_pp_group"):
                group = getattr(parallel_state, get_group)()
                of_all: list[Any] = [None] * group.world_size
                torch.distributed.all_gather_object(of_all, said, group=group.cpu_group)
                said = {rank: outcome for each in of_all for rank, outcome in each.items()}
        return said

    # ----------------------------------------------------------------------------------------------
    # an update

    def _join(self, init: Init) -> None:
        self._is_abandoned = self._is_open  # by a trainer that is gone, or did not hear of its end
        # another worker raises
        if self._is_open and (self.parallel_config.world_size == 1 or not self._speaks):
            raise StateError(f"finish_weight_update comes first [{OPEN}]")
        lasting = replace(init, version=None, check=False)
        if lasting != self._init or self._hub is None:
            self.shutdown()
            self._hub = sync.connect(init.address)
            self._init = lasting
        if init.check:
            self._check()
        elif init.version is not None:
            plan = self._prepare(self._hub, init.version)
            self._ready_for = init.version
            if self._staged and self._weights is not None:
                self._check_places(plan)
                self._weights.update(init.version, timeout=self._timeout_s)

    def _receive(self, update: Update) -> None:
        hub = self._hub
        if hub is None or not self._is_open:
            raise StateError(
                "update_weights comes after init_weight_transfer_engine and start_weight_update"
            )
        served = self._served
        if served is not None and not self._torn:
            if served.content_id is not None and served.content_id == update.content_id:
                return
            is_older = update.version < served.version
            if (
                is_older
                and update.version
                != hub.wait_for(self._name, at_least=0, timeout=self._timeout_s).version
            ):
                text = (
                    f"version {update.version} is older than the one that the engine serves, "
                    f"{served.version}"
                )
                raise VersionConflict(
                    f"{text}; to go back, call "
                    f"hub.rollback({self._name!r}, to=...) and publish anew"
                )
        plan = self._plan if self._plan is not None and self._ready_for == update.version else None
        plan, self._ready_for = plan or self._prepare(hub, update.version), None
        self._check_places(plan)
        loaded: Mapping[str, torch.Tensor] = {}
        if plan.loaded:
            loaded = hub.fetch(
                self._name, update.version, rank=None, names=plan.loaded, timeout=self._timeout_s
            )
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
                layers.process(
                    layer.module,
                    {attribute: tensors[name] for attribute, name in layer.names.items()},
                )
        if loaded:
            layers.load(self.model, self.model_config, loaded.items())
        layers.finish(self.model, self.model_config)
        made = self._made(plan) if self._init is not None and self._init.digests else ()
        self._digests = {name: layers.digest(tensor) for name, tensor in made}
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

    def _sinks(
        self, hub: sync.Hub, plan: _Plan, version: int
    ) -> Iterator[tuple[_Layer, dict[str, torch.Tensor]]]:
        """Each layer that is processed, with its tensors in load format; the next ones are read
        meanwhile.
        """

        def read(batch: list[_Layer]) -> dict[str, torch.Tensor]:
            tensors = {}
            for layer in batch:
                made = layers.allocate(layer.module, layer.names)
                tensors.update(
                    {name: made[attribute].data for attribute, name in layer.names.items()}
                )
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

    def _check_places(self, plan: _Plan) -> None:
        """Raise if a tensor that is written in place is no longer where it was registered."""
        moved = [
            repr(name)
            for layer in plan.in_place
            for own in [layers.own_tensors(layer.module)]
            for attribute, name in layer.names.items()
            if not layers.is_in_place(own.get(attribute), self._live[name])
        ]
        if moved:
            raise RegistrationError(
                f"{len(moved)} parameter(s) were replaced since they were registered, by "
                f"post-processing or a reload: "
                f"{some(moved)}. Copy into the old ones; or call shutdown_weight_transfer_engine "
                f"and make the trainer "
                "anew: then the new ones are registered"
            )

    def _check(self) -> None:
        """Compare this worker's tensors with the published ones. Nothing is written."""
        plan, served = self._plan, self._served
        if plan is None or served is None or self._torn:
            raise StateError(
                "no update has succeeded: there is nothing to compare the engine's weights with"
            )
        self._check_places(plan)
        if (plan.processed or plan.computed) and not self._digests:
            made = len(plan.processed) + len(plan.computed)
            text = f"{made} layer(s) of the engine hold what was made of published tensors"
            raise StateError(f"{text}: to compare it, give TrainerInit(digests=True)")
        differ = (
            {}
            if self._weights is None
            else dict.fromkeys(finish_blocking(changed_tensors(self._weights._async)))
        )
        if self._staged:
            differ.update(
                {
                    name: None
                    for name in self._live
                    if not layers.same_bytes(self._live[name], self._staged[name])
                }
            )
        differ.update(
            {
                name: None
                for name, each in self._made(plan)
                if layers.digest(each) != self._digests.get(name)
            }
        )
        if differ:
            self._torn, self._plan = True, None  # so that the next update writes all of it
            text = (
                f"{len(differ)} tensor(s) of the engine, or others in a chunk with them, have "
                f"not the digests of version"
            )
            raise IntegrityError(
                f"{text} {served.version}: {some(list(map(repr, differ)), most=100)}"
            )

    @staticmethod
    def _made(plan: _Plan) -> Iterator[tuple[str, torch.Tensor]]:
        """The tensors that are not written in place, by name."""
        for layer in (*plan.processed, *plan.computed):
            for attribute, tensor in layers.own_tensors(layer.module).items():
                yield f"{layer.name}.{attribute}", tensor

    @staticmethod
    def _fill_numbers(plan: _Plan, tensors: Mapping[str, torch.Tensor]) -> None:
        for name, place, value in plan.recording.filled:
            if name in tensors:
                tensors[name][place] = value

    # ----------------------------------------------------------------------------------------------
    # getting ready

    @property
    def _name(self) -> str:
        assert self._init is not None
        return self._init.model

    @property
    def _timeout_s(self) -> float:
        assert self._init is not None
        return self._init.timeout_s

    def _prepare(self, hub: sync.Hub, version: int) -> _Plan:
        """The plan for this version's tensors: made once, and again when they change."""
        asked = published_tensors(hub._async, self._name, version, self._timeout_s, self._published)
        self._published = finish_blocking(asked)
        specs = self._published.kinds
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
            found = record(
                self.model.load_weights, {name: each[2] for name, each in parameters.items()}, specs
            )
        plan = _Plan(specs, found)
        self._check_gaps(
            found,
            {
                name: (modules[prefix], attribute)
                for name, (prefix, attribute, _) in parameters.items()
            },
        )
        by_module: dict[str, dict[str, str]] = {}
        for name, (prefix, attribute, _) in parameters.items():
            if name in found.needs:
                by_module.setdefault(prefix, {})[attribute] = name
        if refused := [name for name in self._acting_once if name in by_module]:
            raise RegistrationError(
                f"vLLM lays {len(refused)} layer(s) out for their kernels when it loads them "
                f"first, and never again, so "
                f"that neither an update nor vLLM's own reload would be right: "
                f"{some(list(map(repr, refused)))}. Start the "
                "engine with another kernel for them (moe_backend), or with the new weights"
            )
        computed = {
            prefix
            for prefix, names in by_module.items()
            if is_deferred_attention_layer(modules[prefix])
            or any(name in found.computed for name in names.values())
        }
        whole = {
            each
            for prefix in computed
            for name in by_module[prefix].values()
            for each in found.needs[name]
        }
        # load_weights also loads modules that share a published tensor with its modules
        while True:
            more = {
                prefix
                for prefix, names in by_module.items()
                if prefix not in computed
                and any(each in whole for name in names.values() for each in found.needs[name])
            }
            if not more:
                break
            computed |= more
            whole |= {
                each
                for prefix in more
                for name in by_module[prefix].values()
                for each in found.needs[name]
            }
        plan.loaded = [name for name in specs if name in whole]
        for prefix, names in by_module.items():
            module, nbytes = (
                modules[prefix],
                sum(parameters[name][2].nbytes for name in names.values()),
            )
            ways = plan.in_place if module in self._unprocessed else plan.processed
            (plan.computed if prefix in computed else ways).append(
                _Layer(prefix, module, names, nbytes)
            )
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
        """Nothing that is loaded at start-up may be left out. Quantized models have scales that are
        not in a checkpoint.
        """
        live = {
            name: layers.own_tensors(module).get(attribute)
            for name, (module, attribute) in where.items()
        }
        written = {id(live[name]) for name in found.needs}
        missing = [
            name
            for name in found.gaps
            if isinstance(live[name], nn.Parameter)
            # a tied one is written under another name
            and (name in found.needs or id(live[name]) not in written)
            and not is_deferred_attention_layer(where[name][0])
        ]
        if missing and getattr(self.model_config, "quantization", None) is None:
            differences = tuple(
                f"{name!r}: {found.gaps[name]} elements come from no published tensor"
                for name in missing
            )
            text = (
                f"{len(missing)} parameter(s) of the engine are not in what is published as "
                f"{self._name!r}"
            )
            raise ManifestMismatch(
                f"{text}: {some(differences, '; ', most=100)}", differences=differences
            )

    def _register(self, hub: sync.Hub, plan: _Plan) -> None:
        assert self._init is not None
        self._live = {
            n: layers.own_tensors(each.module)[a].data
            for each in plan.in_place
            for a, n in each.names.items()
        }
        if 0 < plan.nbytes <= self._init.host_memory_bytes:
            with layers.load_format(self.model):
                all_ = (*plan.in_place, *plan.processed)
                like = {
                    name: layers.own_tensors(each.module)[a]
                    for each in all_
                    for a, name in each.names.items()
                }
                like = {
                    name: torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")
                    for name, tensor in like.items()
                }
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
