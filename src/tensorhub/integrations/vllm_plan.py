"""How a publication gets into a vLLM model, and whether it is all that the model needs.

The source of each parameter is recorded from the model's own `load_weights`. Then there are three
ways:

- *in place*: parameters that post-processing leaves as they are loaded are registered where they
  lie. All workers of a tensor-parallel engine are one group.
- *by layer*: the tensors of any other layer are read in load format, as this worker has them, some
  layers at a time, while earlier layers are processed. Such memory is filled and freed: it is no
  source for other workers.
- *by `load_weights`*: parameters that the loader computes, of whole tensors.

A publication has to fill each element that the engine's own first load has filled, and to hold
nothing that no worker reads. Where the first load is not known (dummy weights), each element of
each parameter has to be filled.

Responsible for that plan. Not responsible for carrying it out (`vllm_updater`).
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import nn

from tensorhub.errors import ManifestMismatch, RegistrationError, some
from tensorhub.integrations import vllm_layers as layers
from tensorhub.integrations.drafts import PREFIX
from tensorhub.integrations.lost_memory import sampled
from tensorhub.integrations.recorder import Specs
from tensorhub.integrations.recording import Loader, Parts, Recording, left_out, record
from tensorhub.integrations.vllm_first_load import first_load
from tensorhub.logs import get_logger

log = get_logger(__name__)
BATCH_BYTES = 256 * 2**20  # of layers that are read together

# what loaders of vLLM's leave alone in any checkpoint: it is computed from the configuration
COMPUTED_NAMES = (
    "*rotary_emb.inv_freq",
    "*rotary_emb.cos_cached",
    "*rotary_emb.sin_cached",
    "*.g_idx",  # of GPTQ; an engine whose kernels need it reads it
)


@dataclass
class Layer:
    """One module with tensors to read: `names` by their attribute."""

    name: str
    module: nn.Module
    names: dict[str, str]
    nbytes: int


@dataclass(frozen=True)
class Faults:
    """What keeps a publication from being all that a worker needs, by name, with the reason.
    `unread`: published tensors that this worker leaves alone, and others perhaps do not; `parts`:
    what it reads of those that it does not read as wholes.
    """

    missing: Mapping[str, str] = field(default_factory=dict)
    refused: Mapping[str, str] = field(default_factory=dict)
    unread: tuple[str, ...] = ()
    parts: Mapping[str, Parts] = field(default_factory=dict)


@dataclass
class Plan:
    """How a publication of these tensors gets into the model. `computed`: of what load_weights
    computes; `loaded`: the whole published tensors that it is given for that.
    """

    specs: Specs
    recording: Recording
    faults: Faults = field(default_factory=Faults)
    in_place: list[Layer] = field(default_factory=list)
    processed: list[Layer] = field(default_factory=list)
    computed: list[Layer] = field(default_factory=list)
    loaded: list[str] = field(default_factory=list)

    @property
    def layers(self) -> Iterator[Layer]:
        yield from (*self.in_place, *self.processed, *self.computed)

    @property
    def nbytes(self) -> int:
        return sum(layer.nbytes for layer in (*self.in_place, *self.processed))

    def needs(self, layer: Layer) -> set[str]:
        """The published tensors that any part of a layer comes from."""
        return {each for name in layer.names.values() for each in self.recording.needs[name]}

    def sampled(self) -> torch.Tensor | None:
        """Some bytes of each tensor of the model."""
        return sampled(
            tensor for layer in self.layers for tensor in layers.own_tensors(layer.module).values()
        )


class Planner:
    """Made once a model is loaded: it tries which layers post-processing leaves alone."""

    def __init__(self, model: nn.Module, model_config: Any) -> None:
        self._model = model
        self._ties = bool(getattr(model_config.hf_config, "tie_word_embeddings", False))
        self._first = first_load(model)
        left, once = dict[Hashable, bool](), dict[Hashable, bool]()
        self._unprocessed = {
            layer for layer in model.modules() if layers.is_unprocessed(layer, left)
        }
        self._acting_once = [
            name for name, layer in model.named_modules() if layers.acts_once(layer, once)
        ]

    def plan(self, model_name: str, specs: Specs, ignored: Sequence[str] = ()) -> Plan:
        """Raises RegistrationError: the loader cannot be recorded, or the layers be updated."""
        given = {
            name: each
            for name, each in sorted(specs.items(), key=lambda each: each[0].startswith(PREFIX))
            if not any(fnmatchcase(name, pattern) for pattern in ignored)
        }
        modules = dict(self._model.named_modules())
        with layers.load_format(self._model):
            parameters = {
                f"{prefix}.{attribute}".removeprefix("."): (prefix, attribute, tensor)
                for prefix, module in modules.items()
                for attribute, tensor in layers.own_tensors(module).items()
            }
            tensors = {name: each[2] for name, each in parameters.items()}
            load: Loader = self._model.load_weights  # type: ignore[assignment]
            found = record(load, tensors, given, self._first)
            first = None if self._first is None else self._recorded_first(tensors)
        plan = Plan(specs, found)
        owners = {name: (modules[prefix], it) for name, (prefix, it, _) in parameters.items()}
        plan.faults = self._faults(given, found, first, owners, ignored)
        by_module: dict[str, dict[str, str]] = {}
        for name, (prefix, attribute, _) in parameters.items():
            if name in found.needs:
                by_module.setdefault(prefix, {})[attribute] = name
        self._refuse_acting_once(by_module)
        computed, plan.loaded = self._computed(plan, modules, by_module)
        for prefix, names in by_module.items():
            module = modules[prefix]
            nbytes = sum(tensors[name].nbytes for name in names.values())
            ways = plan.in_place if module in self._unprocessed else plan.processed
            (plan.computed if prefix in computed else ways).append(
                Layer(prefix, module, names, nbytes)
            )
        log.info(
            "vllm_plan",
            model=model_name,
            in_place=len(plan.in_place),
            processed=len(plan.processed),
            loaded=plan.loaded,
            computed=found.computed,
            unread=found.unread,
        )
        return plan

    def _recorded_first(self, tensors: Mapping[str, torch.Tensor]) -> Recording | None:
        assert self._first is not None
        try:
            return record(self._model.load_weights, tensors, self._first)  # type: ignore[arg-type]
        except RegistrationError as error:
            log.warning("vllm_first_load_unknown", reason=f"{error}")
            return None

    def _faults(
        self,
        specs: Specs,
        found: Recording,
        first: Recording | None,
        owners: Mapping[str, tuple[nn.Module, str]],
        ignored: Sequence[str],
    ) -> Faults:
        live = {name: layers.own_tensors(of).get(it) for name, (of, it) in owners.items()}
        written = {id(live[name]) for name in found.needs if live[name] is not None}
        missing = {}
        for name, gap in found.gaps.items():
            if name not in found.needs and id(live[name]) in written:
                continue  # a tied one is written under another name
            if name.startswith(PREFIX) and any(fnmatchcase(name, each) for each in ignored):
                continue  # a draft that is to stay
            if first is None:
                owner = owners[name][0]
                is_wanted = isinstance(live[name], nn.Parameter) and not layers.is_deferred(owner)
            else:
                is_wanted = gap > first.gaps.get(name, 0)
            if is_wanted:
                missing[name] = found.gap(name, gap, self._parts(name, first))
        known = set(first.unread) if first is not None else set()
        unread = [
            name
            for name in found.unread
            if name not in known
            and not (self._ties and name.endswith("lm_head.weight"))
            and not any(fnmatchcase(name, pattern) for pattern in COMPUTED_NAMES)
        ]
        checked = {name for name, (owner, _) in owners.items() if layers.pads_itself(owner)}
        refused = {
            **found.too_small(specs, checked),
            **found.refused,
            **found.miscast(self._first or {}),
        }
        return Faults(missing, refused, tuple(unread), found.parts)

    def _parts(self, name: str, first: Recording | None) -> Sequence[str]:
        """The tensors that a parameter comes from: in the first load, or by the model's own list of
        what it fuses.
        """
        if first is not None:
            return first.needs.get(name, ())
        *path, module, attribute = name.split(".")
        fused = getattr(self._model, "packed_modules_mapping", {}).get(module, ())
        return [".".join((*path, part, attribute)) for part in fused]

    def _refuse_acting_once(self, by_module: Mapping[str, object]) -> None:
        if refused := [name for name in self._acting_once if name in by_module]:
            raise RegistrationError(
                f"vLLM lays {len(refused)} layer(s) out for their kernels when it loads them "
                f"first, and never again, so that neither an update nor vLLM's own reload would be "
                f"right: {some(list(map(repr, refused)))}. Start the engine with another kernel "
                f"for them (moe_backend), or with the new weights"
            )

    @staticmethod
    def _computed(
        plan: Plan, modules: Mapping[str, nn.Module], by_module: Mapping[str, Mapping[str, str]]
    ) -> tuple[set[str], list[str]]:
        """The modules that load_weights has to load, and the published tensors that it is given: it
        also loads modules that share a published tensor with these.
        """
        found = plan.recording
        needs = {
            prefix: {each for name in names.values() for each in found.needs[name]}
            for prefix, names in by_module.items()
        }
        more = {
            prefix
            for prefix, names in by_module.items()
            if layers.is_deferred(modules[prefix])
            or any(name in found.computed for name in names.values())
        }
        computed: set[str] = set()
        whole: set[str] = set()
        while more:
            computed |= more
            whole |= {each for prefix in more for each in needs[prefix]}
            more = {
                prefix for prefix in by_module if prefix not in computed and needs[prefix] & whole
            }
        return computed, [name for name in plan.specs if name in whole]


def mismatch(model_name: str, faults: Sequence[Faults]) -> ManifestMismatch | None:
    """What is wrong with a publication, given each worker's faults. A tensor is unexpected if no
    worker reads it.
    """
    missing = {name: reason for each in faults for name, reason in each.missing.items()}
    refused = {name: reason for each in faults for name, reason in each.refused.items()}
    refused = {**left_out([each.parts for each in faults]), **refused}
    unread = set(faults[0].unread).intersection(*[each.unread for each in faults])
    for name in sorted(unread):
        refused.setdefault(name, "no worker of the engine reads it")
    texts = []
    if missing:
        texts.append(
            f"{len(missing)} parameter(s) of the engine are not in what is published as "
            f"{model_name!r}: {_listed(missing)}"
        )
    if refused:
        texts.append(f"the engine refuses {len(refused)} published tensor(s): {_listed(refused)}")
    if not texts:
        return None
    differences = tuple(
        f"{name!r}: {why}" for each in (missing, refused) for name, why in each.items()
    )
    return ManifestMismatch("; ".join(texts), differences=differences)


def _listed(reasons: Mapping[str, str]) -> str:
    return some([f"{name!r}: {reason}" for name, reason in reasons.items()], "; ", most=100)


def batches(all_: Iterable[Layer]) -> list[list[Layer]]:
    """Layers that are read together: some, of so many bytes, or one that is larger."""
    made: list[list[Layer]] = []
    room = 0
    for layer in all_:
        if not made or layer.nbytes > room:
            made.append([])
            room = BATCH_BYTES
        made[-1].append(layer)
        room -= layer.nbytes
    return made
