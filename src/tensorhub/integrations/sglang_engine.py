"""SGLang's ranks: the loader that an engine calls on each tensor-parallel rank, within a session of
a weight update.

The source of each parameter is recorded from the model's own `load_weights`. Then there are two
ways:

- *in place*: parameters that post-processing leaves as they are loaded are registered where they
  lie. All ranks of an engine are one group. With host memory for a whole shard
  (`host_memory_bytes`) they are written when all ranks have all of it.
- *by `load_weights`*: parameters that the loader computes, and layers with post-processing that
  SGLang can undo; of whole tensors.

Anything else is refused, before a byte is written.

Responsible for a rank's steps, and for one outcome on all ranks. Not responsible for the session,
which is SGLang's, nor for the trainer (`sglang_trainer`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from typing import Any, TypeVar

import torch
from sglang import __version__ as SGLANG_VERSION
from sglang.srt.layers.quantization.base_config import QuantizeMethodBase
from sglang.srt.model_loader import loader
from sglang.srt.runtime_context import get_parallel
from torch import nn

from tensorhub import sync
from tensorhub.api.tools import PublishedTensors, published_tensors
from tensorhub.errors import (
    ManifestMismatch,
    RegistrationError,
    StateError,
    TensorHubError,
    VersionConflict,
    some,
)
from tensorhub.integrations.probing import leaves_bytes, own_tensors
from tensorhub.integrations.recording import Recording, Specs, record
from tensorhub.integrations.sglang_session import Order, Outcome, check_sglang
from tensorhub.logs import get_logger
from tensorhub.runtime.loop_thread import finish_blocking
from tensorhub.types import Options

log = get_logger(__name__)
Made = TypeVar("Made")
Tensors = Sequence[tuple[str, torch.Tensor]]

ADVICE = (
    "serve with a backend that leaves weights as they are loaded (--moe-runner-backend triton, "
    "without SGLANG_USE_AITER and "
    "without AMX), or update such a model by SGLang's update_weights_from_disk"
)


def load(model: nn.Module, named_tensors: Tensors) -> None:
    """SGLang's custom weight loader. It never raises, for that would end the engine: SGLang's next
    answer says how it went. Called without tensors, it does nothing: a trainer asks so for that
    answer.
    """
    if not named_tensors:
        return
    answer = model._modules.get(Answer.name)
    if not isinstance(answer, Answer):
        answer = Answer(Receiver(model))
        model.add_module(Answer.name, answer)
    with torch.inference_mode(False), torch.no_grad():
        answer.said = answer.receiver.take(named_tensors)


class Answer(nn.Module):
    """A module without tensors, by which the model says how its last update has failed.

    Before any update SGLang asks all modules for `_derived_weight_cache_error`, and if one has
    something to say it refuses the update with that text. It says it once. A trainer asks directly
    after each update, with nothing to load.
    """

    name = "tensorhub"

    def __init__(self, receiver: Receiver) -> None:
        super().__init__()
        self.receiver = receiver
        self.said: str | None = None

    @property
    def _derived_weight_cache_error(self) -> str | None:
        said, self.said = self.said, None
        return said


@dataclass(frozen=True)
class _Plan:
    """How a publication of these tensors gets into the model: `in_place` where they lie, `loaded`
    by the loader.
    """

    specs: Specs
    recording: Recording
    in_place: dict[str, torch.Tensor]
    loaded: tuple[str, ...]

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.in_place.values())


class Receiver:
    """One rank of an engine, with what it has registered."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._hub: sync.Hub | None = None
        self._joined: Order | None = None
        self._published: PublishedTensors | None = None  # of which `_plan` is, or may be
        self._plan: _Plan | None = None
        self._weights: sync.Weights | None = None
        self._is_agreed = False  # by all ranks: every published tensor has its place
        # parameters that post-processing changes, and SGLang restores
        self._restored: set[str] | None = None
        # without these, the end of the session leaves all layers as they were
        self._is_spared = False
        self._served: Order | None = None
        self._is_torn = False

    def take(self, named_tensors: Tensors) -> str | None:
        """Do what a trainer has ordered: on all ranks, or on none. Returns what has failed."""
        try:
            order, plan, loaded = self._on_all_ranks(lambda: self._get_ready(named_tensors))
            if plan is None:
                return None
            self._refuse_unread(plan, order)
            self._on_all_ranks(lambda: self._fill(plan, order, loaded))
        except _Failed as failed:
            self._is_torn, self._is_agreed = failed.outcome.memory != "intact", False
            log.error(
                "sglang_update_failed", error=failed.outcome.text, memory=failed.outcome.memory
            )
            return failed.outcome.message()
        self._is_torn, self._served = False, order
        return None

    def _on_all_ranks(self, call: Callable[[], Made]) -> Made:
        """The call's result, once it has returned on all ranks. Raises _Failed on all ranks, with
        one outcome: the error of the first failed rank; the memory is torn if any rank's is.
        """
        outcome: Outcome | None = None
        try:
            made = call()
        except Exception as error:
            is_whole = self._restored is not None or self._is_spared
            outcome = Outcome.of(error, "torn" if self._is_torn or not is_whole else "intact")
        failed = [each for each in _of_all_ranks(outcome) if each is not None]
        if failed:
            first = next((each for each in failed if each.kind != "GroupAborted"), failed[0])
            raise _Failed(
                replace(
                    first,
                    memory="torn" if any(each.memory == "torn" for each in failed) else "intact",
                )
            )
        return made

    # --------------------------------------------------------------------------------------------
    # before a byte is written

    def _get_ready(
        self, tensors: Tensors
    ) -> tuple[Order, _Plan | None, Mapping[str, torch.Tensor]]:
        """The plan for this version, and what `load_weights` is to be given. Without a plan: the
        engine has this version.
        """
        if self._restored is None:
            self._is_spared = False
            self._restored = self._probe()
        check_sglang(SGLANG_VERSION)
        order = Order.of(tensors)
        lasting = replace(order, version=0, content_id=None)
        if lasting != self._joined or self._hub is None:
            self.close()
            self._hub = sync.connect(
                order.address, options=Options(host_memory_bytes=order.host_memory_bytes)
            )
            self._joined = lasting
        served = self._served
        if served is not None and not self._is_torn:
            if served.content_id is not None and served.content_id == order.content_id:
                return order, None, {}
            is_older = order.version < served.version
            if (
                is_older
                and order.version
                != self._hub.wait_for(order.model, at_least=0, timeout=order.timeout_s).version
            ):
                text = (
                    f"version {order.version} is older than the one that the engine serves, "
                    f"{served.version}"
                )
                raise VersionConflict(
                    f"{text}; to go back, call "
                    f"hub.rollback({order.model!r}, to=...) and publish anew"
                )
        asked = published_tensors(
            self._hub._async, order.model, order.version, order.timeout_s, self._published
        )
        self._published = finish_blocking(asked)
        if self._plan is None or self._plan.specs != self._published.kinds:
            self._make_plan(self._hub, order, self._published.kinds)
        assert self._plan is not None
        self._check_live(self._plan)
        loaded: Mapping[str, torch.Tensor] = {}
        if names := list(self._plan.loaded):
            loaded = self._hub.fetch(
                order.model, order.version, rank=None, names=names, timeout=order.timeout_s
            )
        return order, self._plan, loaded

    def _make_plan(self, hub: sync.Hub, order: Order, specs: Specs) -> None:
        if self._weights is not None:
            self._weights.close(abandon=True)
        self._weights = self._plan = None
        self._is_agreed = False
        parallel = get_parallel()
        if parallel.pp_size > 1:
            raise StateError(
                f"an engine with pipeline-parallel stages ({parallel.pp_size}) cannot be updated"
            )
        tensors = _tensors(self._model)
        found = record(self._model.load_weights, tensors, specs)  # type: ignore[arg-type]
        missing = [name for name in found.gaps if isinstance(tensors[name], nn.Parameter)]
        if missing:
            differences = tuple(
                f"{name!r}: {found.gaps[name]} elements come from no published tensor"
                for name in missing
            )
            text = (
                f"{len(missing)} parameter(s) of the engine are not in what is published as "
                f"{order.model!r}"
            )
            raise ManifestMismatch(
                f"{text}: {some(differences, '; ', most=100)}", differences=differences
            )
        by_loader = {
            name for name in found.needs if name in found.computed or name in (self._restored or ())
        }
        whole = {each for name in by_loader for each in found.needs[name]}
        in_place = {name: tensors[name].data for name in found.needs if name not in by_loader}
        if in_place:
            self._weights = hub.register(
                order.model,
                in_place,
                sources={name: found.sources.get(name, []) for name in in_place},
                group=order.replica,
                rank=parallel.tp_rank,
                world_size=parallel.tp_size,
                spot=True,
                partial=True,
            )
        self._plan = _Plan(specs, found, in_place, tuple(name for name in specs if name in whole))
        log.info(
            "sglang_plan",
            model=order.model,
            in_place=len(in_place),
            loaded=self._plan.loaded,
            computed=found.computed,
            unread=found.unread,
        )

    def _probe(self) -> set[str]:
        """The parameters of layers that post-processing changes, and that SGLang restores when a
        session begins. Layers of any other kind are refused. The end of the session would do them
        harm although nothing was loaded, so it spares them.
        """
        names = {id(tensor): name for name, tensor in _tensors(self._model).items()}
        found: set[str] = set()
        refused: dict[str, str] = {}
        methods: list[Any] = []  # of layers that are refused
        for layer in self._model.modules():
            own = {
                attribute: tensor
                for attribute, tensor in own_tensors(layer).items()
                if id(tensor) in names
            }
            method = getattr(layer, "quant_method", None)
            if not own or method is None or _does_nothing(method):
                continue
            of_layer = [names[id(tensor)] for tensor in own.values()]
            reason = (
                f"{type(method).__name__} changes what is loaded, and SGLang does not restore it"
            )
            if not type(method).__name__.startswith("Unquantized"):
                reason = f"{type(method).__name__} may pack what is loaded"
            elif _is_spared(method):
                pass
            elif leaves_bytes(layer, own, _process):
                continue
            elif leaves_bytes(layer, own, _process_and_restore, is_exact=False):
                found.update(of_layer)
                continue
            refused.update(dict.fromkeys(of_layer, reason))
            methods.append(method)
        if refused:
            self._is_spared = _spare(self._model, methods)
            text = some([f"{name!r}: {reason}" for name, reason in refused.items()], "; ", most=100)
            raise RegistrationError(
                f"{len(refused)} parameter(s) are not kept in the layout "
                f"of load_weights: {text}. {ADVICE}"
            )
        return found

    def _check_live(self, plan: _Plan) -> None:
        """Raise if the model no longer has the registered tensors."""
        live = _tensors(self._model)
        other = [
            name
            for name, tensor in plan.in_place.items()
            if name not in live or not _is_same(live[name], tensor)
        ]
        if other:
            self._plan = None  # made anew at the next update
            raise RegistrationError(
                f"{len(other)} parameter(s) of the engine were replaced since they were "
                f"registered: "
                f"{some(list(map(repr, other)), most=100)}. What is replaced once may be replaced "
                f"at each update: {ADVICE}"
            )

    def _refuse_unread(self, plan: _Plan, order: Order) -> None:
        """Published tensors that no rank has a place for: SGLang's loaders leave them alone, and
        say nothing.
        """
        if self._is_agreed:
            return
        unread = set.intersection(*(set(each) for each in _of_all_ranks(plan.recording.unread)))
        config = getattr(self._model, "config", None)
        known = [
            *order.unused,
            *(["*lm_head.weight"] if getattr(config, "tie_word_embeddings", False) else []),
        ]
        names = [
            name
            for name in plan.specs
            if name in unread and not any(fnmatchcase(name, each) for each in known)
        ]
        self._is_agreed = not names
        if not names:
            return
        text = (
            f"load_weights has no place for {len(names)} published tensor(s): "
            f"{some(list(map(repr, names)), most=100)}"
        )
        differences = tuple(f"{name!r}: the model's loader leaves it alone" for name in names)
        advice = "publish without them, or name them in Trainer(unused=)"
        error = ManifestMismatch(f"{text}; {advice}", differences=differences)
        raise _Failed(Outcome.of(error, "torn" if self._is_torn else "intact"))

    # ----------------------------------------------------------------------------------------------
    # it is written

    def _fill(self, plan: _Plan, order: Order, loaded: Mapping[str, torch.Tensor]) -> None:
        if self._weights is not None:
            is_staged = plan.nbytes <= order.host_memory_bytes
            try:
                # there is nothing yet that an update would keep, but the engine's weights
                if self._weights.version is None:
                    if is_staged:
                        self._weights.prefetch(order.version, timeout=order.timeout_s)
                    for name, place, value in plan.recording.filled:
                        if name in plan.in_place:
                            plan.in_place[name][place] = value
                self._weights.update(order.version, staged=is_staged, timeout=order.timeout_s)
            except TensorHubError as error:
                self._is_torn = self._is_torn or error.memory != "intact"
                raise
        self._is_torn = True
        if loaded:
            self._model.load_weights(loaded.items())  # type: ignore[operator]
        loader.post_load_weights(self._model)
        self._is_torn = False

    def close(self) -> None:
        """Leave the cluster. The engine keeps what it serves."""
        hub, weights = self._hub, self._weights
        self._hub = self._joined = self._published = self._plan = self._weights = None
        for each in (weights, hub):
            if each is not None:
                with suppress(TensorHubError):
                    each.close()


class _Failed(Exception):
    """An update has failed, on all ranks."""

    def __init__(self, outcome: Outcome) -> None:
        super().__init__(outcome)
        self.outcome = outcome


def _tensors(model: nn.Module) -> dict[str, torch.Tensor]:
    return {**dict(model.named_parameters()), **dict(model.named_buffers())}


def _does_nothing(method: Any) -> bool:
    return (
        getattr(type(method), "process_weights_after_loading", None)
        is QuantizeMethodBase.process_weights_after_loading
    )


def _restores(method: Any) -> bool:
    """Whether the beginning of a session may have changed its layers."""
    if not isinstance(method, QuantizeMethodBase):
        return False
    return (
        type(method).restore_weights_before_loading
        is not QuantizeMethodBase.restore_weights_before_loading
    )


def _spare(model: nn.Module, methods: Sequence[Any]) -> bool:
    """Have the end of this session leave the layers of these methods alone: SGLang post-processes
    all layers then, loaded or not. False: what they were before the session cannot be told any
    more.
    """
    if any(_restores(method) for method in methods):
        return False
    for method in {id(each): each for each in methods}.values():
        _skip(method, sum(each is method for _, each in loader._modules_with_quant_method(model)))
    return True


def _skip(method: Any, times: int) -> None:
    """Have its next calls process nothing."""
    left = iter(range(times - 1, -1, -1))

    def process_weights_after_loading(layer: Any) -> None:
        if not next(left):
            del method.process_weights_after_loading

    method.process_weights_after_loading = process_weights_after_loading


def _is_spared(method: Any) -> bool:
    return "process_weights_after_loading" in vars(method)


def _process(layer: Any) -> None:
    layer.quant_method.process_weights_after_loading(layer)


def _process_and_restore(layer: Any) -> None:
    """What an end of a session and the next begin do."""
    _process(layer)
    if isinstance(layer.quant_method, QuantizeMethodBase):
        layer.quant_method.restore_weights_before_loading(layer)


def _is_same(one: torch.Tensor, other: torch.Tensor) -> bool:
    return (one.data_ptr(), one.shape, one.stride(), one.dtype) == (
        other.data_ptr(),
        other.shape,
        other.stride(),
        other.dtype,
    )


def _of_all_ranks(value: Made) -> list[Made]:
    """What each tensor-parallel rank gives, to all of them. It waits as long as SGLang's own
    barriers do.
    """
    parallel = get_parallel()
    found: list[Any] = [value] * parallel.tp_size
    if parallel.tp_size > 1:
        torch.distributed.all_gather_object(found, value, group=parallel.tp_group.cpu_group)
    return found
