"""How a publication gets into an SGLang engine, and whether it fits: it has to fill what the
engine's own load has filled, no less and no more. SGLang's loaders say nothing of either.

Responsible for that decision, on one rank. Not responsible for carrying it out (`sglang_engine`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase

import torch
from torch import nn

from tensorhub.errors import ManifestMismatch, RegistrationError, StateError, some
from tensorhub.integrations.given import wrapped
from tensorhub.integrations.probing import pattern, same_bytes
from tensorhub.integrations.recorder import Specs
from tensorhub.integrations.recording import Parts, Recording, left_out
from tensorhub.integrations.sglang_layers import (
    Layer,
    SecondModel,
    checkpoint,
    has_random_weights,
    pads_itself,
)

BATCH_BYTES = 256 * 2**20  # of layers that are loaded together
ADVICE = (
    "serve with a backend that leaves weights as they are loaded (--moe-runner-backend triton, "
    "without SGLANG_USE_AITER and "
    "without AMX), or update such a model by SGLang's update_weights_from_disk"
)


@dataclass(frozen=True)
class Batch:
    """Layers that are loaded together, of these published tensors."""

    layers: tuple[Layer, ...]
    names: tuple[str, ...]


@dataclass(frozen=True)
class Faults:
    """What keeps a publication from fitting, on one rank: `missing`, parameters that it does not
    fill, and `refused`, tensors that do not fit, by name with the reason; `unexpected`, other
    reasons. `unread`: published tensors that this rank leaves alone, and others perhaps do not;
    `parts`: what it reads of those that it does not read as wholes.
    """

    missing: Mapping[str, str] = field(default_factory=dict)
    refused: Mapping[str, str] = field(default_factory=dict)
    unexpected: tuple[str, ...] = ()
    unread: tuple[str, ...] = ()
    parts: Mapping[str, Parts] = field(default_factory=dict)

    def __bool__(self) -> bool:
        return bool(self.missing or self.refused or self.unexpected)


@dataclass(frozen=True)
class Plan:
    """How a publication of these tensors gets into the model: `in_place` where they lie, `loaded`
    by SGLang's loader. `parameters`: the names of all.
    """

    specs: Specs
    recording: Recording
    in_place: dict[str, torch.Tensor]
    loaded: tuple[Batch, ...]
    faults: Faults
    parameters: tuple[str, ...]

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.in_place.values())


def make(second: SecondModel, specs: Specs) -> Plan:
    """Raises RegistrationError: the engine has layers that nothing can update, all named."""
    refused = {
        name: layer.reason for layer in second.layers if layer.reason for name in layer.tensors
    }
    if refused:
        text = some([f"{name!r}: {reason}" for name, reason in refused.items()], "; ", most=100)
        raise RegistrationError(
            f"{len(refused)} parameter(s) are not kept in the layout of load_weights: {text}. "
            f"{ADVICE}"
        )
    usual = checkpoint(second.draft is not None) or {}
    found = second.record(specs, usual)
    filled = [layer for layer in second.layers if any(n in found.needs for n in layer.tensors)]
    by_loader = [
        layer
        for layer in filled
        if not layer.is_in_place or any(name in found.computed for name in layer.tensors)
    ]
    tensors = tensors_of(second.live)
    in_place = {
        name: tensors[name].data
        for layer in filled
        if layer not in by_loader
        for name in layer.tensors
        if name in found.needs
    }
    loaded = tuple(batches(by_loader, found))
    faults = _faults(second, specs, found, usual)
    return Plan(specs, found, in_place, loaded, faults, tuple(second.tensors))


def mismatch(
    model_name: str, plan: Plan, faults: Sequence[Faults], known: Sequence[str]
) -> ManifestMismatch | None:
    """What is wrong with a publication, given this rank's plan and each rank's faults: every rank
    needs what it has, and every published tensor a place on some rank. SGLang's loaders say nothing
    of either. `known`: names, with `*`, of tensors that need no place.
    """
    missing = {name: why for rank in faults for name, why in rank.missing.items()}
    refused = {name: why for rank in faults for name, why in rank.refused.items()}
    refused = {**left_out([rank.parts for rank in faults]), **refused}
    unexpected = list(dict.fromkeys(each for rank in faults for each in rank.unexpected))
    unread = set.intersection(*(set(rank.unread) for rank in faults))
    unexpected += [
        f"{name!r}: the model's loader leaves it alone"
        for name in plan.specs
        if name in unread and not any(fnmatchcase(name, each) for each in known)
    ]
    listed = [[f"{name!r}: {why}" for name, why in each.items()] for each in (refused, missing)]
    texts = []
    if refused:
        texts.append(
            f"the engine refuses {len(refused)} published tensor(s): "
            f"{some(listed[0], '; ', most=100)}"
        )
    if missing:
        texts.append(
            f"{len(missing)} parameter(s) of the engine are not in what is published as "
            f"{model_name!r}: {some(listed[1], '; ', most=100)}; publish them under the names "
            f"of the checkpoint{wrapped(plan.specs, plan.parameters)}"
        )
    if unexpected:
        texts.append(
            f"load_weights has no place for {len(unexpected)} published tensor(s): "
            f"{some(unexpected, '; ', most=100)}; publish without them, or, for an "
            f"engine of no fleet, name them in Trainer(unused=)"
        )
    if not texts:
        return None
    return ManifestMismatch("; and ".join(texts), differences=(*listed[0], *listed[1], *unexpected))


def probe(second: SecondModel, plan: Plan) -> None:
    """Raise StateError unless each parameter that is read in place gets, by the plan, the bytes
    that SGLang's own loader gives it. Tried with random numbers, beside the engine's tensors.
    """
    wrong: list[str] = []
    layers = [each for each in second.layers if plan.in_place.keys() & each.tensors]
    for batch in batches(layers, plan.recording):
        published = {}
        for name in batch.names:
            dtype, shape = plan.specs[name]
            like = torch.empty(shape, dtype=getattr(torch, dtype), device="meta")
            published[name] = pattern(like, torch.device("cpu"))
        made = second.blank(batch.layers)
        for layer in second.loaded(batch.layers, published):
            for name in plan.in_place.keys() & layer.tensors:
                plan.recording.make(name, made[name], published)
                if not same_bytes(layer.tensors[name].cpu(), made[name]):
                    wrong.append(repr(name))
    if wrong:
        raise StateError(f"{len(wrong)} parameter(s) would get other bytes: {some(sorted(wrong))}")


def tensors_of(model: nn.Module) -> dict[str, torch.Tensor]:
    """Parameters and buffers, by name."""
    return {**dict(model.named_parameters()), **dict(model.named_buffers())}


def _faults(second: SecondModel, specs: Specs, found: Recording, usual: Specs) -> Faults:
    """What of the engine's own load a publication leaves out, and what it has beyond that.

    The engine's own load is that of its checkpoint, whose tensors are the `usual` ones. An engine
    without one, as with random weights, needs all of its parameters. A tensor of which no file says
    the shape has to be all of its place, and to be read as a whole.
    """
    tensors, is_loaded = second.tensors, bool(usual) and not has_random_weights()
    own = second.record(usual, usual) if is_loaded else Recording()
    gaps = _gaps(second, specs, found)
    allowed = _gaps(second, usual, own) if is_loaded else {}
    missing, unexpected = {}, []
    for name, tensor in tensors.items():
        more = gaps.get(name, 0) - allowed.get(name, 0)
        its = own.needs.get(name, ())
        is_lost = is_loaded and not set(its).issubset(found.needs.get(name, ()))
        if isinstance(tensor, nn.Parameter) and (more > 0 or is_lost):
            missing[name] = found.gap(name, more, its)
        elif is_loaded and more < 0:
            unexpected.append(f"{name!r}: the engine's own load has left {-more} elements alone")
    checked = {name for layer in second.layers if pads_itself(layer) for name in layer.tensors}
    return Faults(
        missing,
        {**found.too_small(specs, checked), **found.miscast(usual), **found.refused},
        tuple(unexpected),
        found.unread,
        found.parts,
    )


def _gaps(second: SecondModel, specs: Specs, found: Recording) -> dict[str, int]:
    """By parameter, how many elements nothing is loaded into; parameters that the loader casts
    included: they are recorded once more as if they were published in the engine's dtype.
    """
    if not found.computed:
        return found.gaps
    tensors = second.tensors
    dtypes = {
        each: _dtype(tensors[name]) for name in found.computed for each in found.needs.get(name, ())
    }
    as_loaded = {name: (dtypes.get(name, dtype), shape) for name, (dtype, shape) in specs.items()}
    return second.record(as_loaded).gaps


def batches(layers: Sequence[Layer], recording: Recording) -> Iterator[Batch]:
    taken: list[Layer] = []
    for number, layer in enumerate(layers):
        taken.append(layer)
        is_last = number + 1 == len(layers)
        if is_last or sum(e.nbytes for e in (*taken, layers[number + 1])) > BATCH_BYTES:
            names = [
                each for one in taken for n in one.tensors for each in recording.needs.get(n, ())
            ]
            yield Batch(tuple(taken), tuple(dict.fromkeys(names)))
            taken = []


def _dtype(tensor: torch.Tensor) -> str:
    return f"{tensor.dtype}".removeprefix("torch.")
