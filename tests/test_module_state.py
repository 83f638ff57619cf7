"""A module's state that is no parameter or buffer is carried, or said to stay behind. Ordinary
modules say nothing.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import replace
from io import BytesIO
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations, prune

import tensorhub
from examples import encoder
from tensorhub import LeftOutStateWarning, Options, conversion
from tensorhub.errors import RegistrationError, StateError
from tensorhub.memory.resolving import resolve_all
from tests.rig import OPTIONS, cluster

PRUNE: Any = prune.l1_unstructured


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


class Scaled(nn.Module):
    """A linear layer with a scale that is extra state: as `made` makes it out of the module's own
    tensor.
    """

    def __init__(self, scale: float, made: Callable[[torch.Tensor], Any]) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.full((4,), scale))
        self._scale = torch.tensor([scale])
        self._made = made

    def get_extra_state(self) -> Any:
        return self._made(self._scale)

    def set_extra_state(self, state: Any) -> None:
        self._scale = state

    def forward(self, given: torch.Tensor) -> torch.Tensor:
        return given * self.weight * self._scale


def in_bytes(scale: torch.Tensor) -> BytesIO:
    torch.save(scale, made := BytesIO())
    return made


class SavesItself(nn.Linear):
    """Its class has its own way of saving: a tensor in place, and a number."""

    def __init__(self) -> None:
        super().__init__(2, 2)
        self._table, self._bits = torch.arange(4.0), 4

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        destination |= {
            f"{prefix}table": self._table,
            f"{prefix}bits": self._bits,
            f"{prefix}same": self.weight.data,
        }


class QuantState:
    """As bitsandbytes': what packed weights are made sense of with."""

    def __init__(self) -> None:
        self.absmax = torch.ones(2)


def packed(**attributes: Any) -> nn.Module:
    layer, weight = (
        nn.Module(),
        nn.Parameter(torch.zeros(8, dtype=torch.uint8), requires_grad=False),
    )
    vars(weight).update(attributes)
    layer.weight = weight
    return layer


def plain(**attributes: Any) -> nn.Module:
    layer: nn.Module = nn.Linear(2, 2)
    for name, value in attributes.items():
        setattr(layer, name, value)
    return layer


def quantized() -> nn.Module:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch means to give these up
        layer: nn.Module = torch.ao.nn.quantized.dynamic.Linear(2, 2)  # type: ignore[no-untyped-call]
    return layer


# --------------------------------------------------------------------------------------------------
# carried


async def test_extra_state_in_place_arrives() -> None:
    async with cluster("trainer", "rollout") as c:
        trainer, rollout = (
            nn.Sequential(nn.Linear(1, 1), Scaled(scale, lambda own: own)) for scale in (2.0, 1.0)
        )
        theirs: Any = rollout[1]
        weights, mine = (
            await c.hubs[0].register("m", trainer),
            await c.hubs[1].register("m", rollout),
        )
        await weights.publish(1)
        await mine.replicate(1)
        assert theirs._scale.item() == 2.0
        assert theirs(torch.ones(4)).tolist() == [4.0] * 4
        fetched = await c.hubs[1].fetch("m")
        assert fetched["1._extra_state"].item() == 2.0
        async with weights.mutate(2):
            trainer[1]._scale.fill_(3.0)  # type: ignore[operator]
        await mine.update(2)
        assert theirs._scale.item() == 3.0
        theirs._scale = torch.ones(1)
        with pytest.raises(
            RegistrationError, match=r"'1\._extra_state': its storage is another one"
        ):
            await mine.update(2)
        assert (await c.hubs[1].plan("m", rollout)).nbytes == sum(
            each.nbytes for each in fetched.values()
        )


async def test_what_a_class_saves_in_place_arrives() -> None:
    async with cluster(
        "trainer", "rollout", options=replace(OPTIONS, left_out_state="ignore")
    ) as c:
        trainer, rollout = SavesItself(), SavesItself()
        trainer._table.fill_(7)
        await (await c.hubs[0].register("m", trainer)).publish(1)
        mine = await c.hubs[1].register("m", rollout)
        await mine.replicate(1)
        assert rollout._table.tolist() == [7.0] * 4
        assert sorted(await c.hubs[0].fetch("m")) == ["bias", "table", "weight"]


# --------------------------------------------------------------------------------------------------
# named


@pytest.mark.parametrize(
    ("module", "names"),
    [
        (Scaled(2.0, torch.clone), ["_extra_state"]),
        (Scaled(2.0, in_bytes), ["_extra_state"]),
        (Scaled(2.0, lambda own: {"scale": own}), ["_extra_state"]),
        (Scaled(2.0, lambda own: own.item()), ["_extra_state"]),
        (Scaled(2.0, lambda own: own.view(7)), ["_extra_state"]),
        (Scaled(2.0, lambda own: own.to_sparse()), ["_extra_state"]),
        (SavesItself(), ["bits"]),
        (packed(quant_state=QuantState()), ["weight.quant_state"]),
        (packed(SCB=torch.ones(2)), ["weight.SCB"]),
        (packed(scales=torch.ones(2), weight_loader=len), ["weight.scales"]),
        (packed(meta={"scale": torch.ones(2)}), ["weight.meta"]),
        (plain(scale=torch.ones(1), zero=torch.zeros(1)), ["scale", "zero"]),
        (nn.Sequential(nn.ModuleDict({"a": plain(scale=torch.ones(1))})), ["0.a.scale"]),
        (
            quantized(),
            ["_packed_params._packed_params", "_packed_params.dtype", "scale", "zero_point"],
        ),
    ],
)
def test_what_stays_behind_is_named(module: nn.Module, names: list[str]) -> None:
    found = resolve_all(module)
    assert sorted(found.left_out) == names
    assert not found.carried - {"table"}


async def test_registering_says_what_stays_behind(recwarn: pytest.WarningsRecorder) -> None:
    async with cluster("trainer") as c:
        layer = Scaled(2.0, torch.clone)
        await c.hubs[0].register("m", layer)
        (one,) = recwarn
        assert (one.category, one.filename) == (LeftOutStateWarning, __file__)
        assert str(one.message).startswith(
            "register 'm': 1 part(s) of the module's state are not carried"
        )
        assert "'_extra_state'" in str(one.message)
        # whoever gives tensors has chosen them
        await c.hubs[0].register("m", dict(layer.named_parameters()))
        assert len(recwarn) == 1


@pytest.mark.parametrize("converted", [False, True])
async def test_the_option_makes_it_an_error_or_nothing(
    recwarn: pytest.WarningsRecorder, *, converted: bool
) -> None:
    layer = Scaled(2.0, torch.clone)

    async def register(hub: tensorhub.Hub) -> None:
        if converted:
            await conversion.register_converted(
                hub, "m", conversion.cast(layer, torch.bfloat16), group="g"
            )
        else:
            await hub.register("m", layer)

    async with cluster("trainer", options=replace(OPTIONS, left_out_state="error")) as c:
        with pytest.raises(RegistrationError, match="'_extra_state'"):
            await register(c.hubs[0])
        assert await c.hubs[0].describe() == ()
    async with cluster("trainer", options=replace(OPTIONS, left_out_state="ignore")) as c:
        await register(c.hubs[0])
    assert not list(recwarn)
    async with cluster("trainer") as c:
        with pytest.warns(LeftOutStateWarning, match="'_extra_state'") as told:
            await register(c.hubs[0])
        assert [each.filename for each in told] == [__file__]
    with pytest.raises(
        StateError, match=r"left_out_state = 'never': give 'warn', 'error' or 'ignore'"
    ):
        Options(left_out_state="never")  # type: ignore[arg-type]


# --------------------------------------------------------------------------------------------------
# nothing to say


def with_buffers() -> nn.Module:
    layer = nn.Linear(2, 2)
    # what can be made anew is no state
    layer.register_buffer("table", torch.ones(2), persistent=False)
    layer.register_buffer("mean", torch.ones(2))
    layer.original_table = layer.table  # as transformers' rotary embeddings keep theirs
    layer.alias = layer.weight.data
    layer.key_cache = layer._mask = torch.ones(2)
    layer.graph = layer.weight * 2
    return layer


def after_forward(layer: nn.Module) -> nn.Module:
    with torch.no_grad():
        layer(torch.zeros(1, 3))
    return layer


ORDINARY: dict[str, Callable[[], Any]] = {
    "attention": lambda: nn.MultiheadAttention(8, 2),
    "lstm": lambda: nn.LSTM(4, 4, 2, bidirectional=True),
    "gru": lambda: nn.GRU(3, 3),
    "transformer": lambda: nn.Transformer(8, 2, 1, 1, 8, batch_first=True),
    "layers": lambda: nn.Sequential(
        nn.Conv2d(1, 1, 1), nn.BatchNorm2d(1), nn.Embedding(2, 2), nn.LayerNorm(2), nn.PReLU()
    ),
    "loss": lambda: nn.BCEWithLogitsLoss(pos_weight=torch.ones(2)),
    "lazy": lambda: after_forward(nn.LazyLinear(3)),
    "weight norm": lambda: parametrizations.weight_norm(nn.Linear(3, 3)),
    "orthogonal": lambda: parametrizations.orthogonal(nn.Linear(3, 3)),
    "spectral norm": lambda: parametrizations.spectral_norm(nn.Linear(3, 3)),
    "former spectral norm": lambda: after_forward(nn.utils.spectral_norm(nn.Linear(3, 3))),
    "former weight norm": lambda: after_forward(nn.utils.weight_norm(nn.Linear(3, 3))),
    "pruned": lambda: after_forward(PRUNE(nn.Linear(3, 3), "weight", 1)),
    "buffers": with_buffers,
    "attributes": lambda: packed(tensor_model_parallel=True, weight_loader=len),
    "no extra state": lambda: Scaled(1.0, lambda own: None),
    "an empty tensor": lambda: Scaled(1.0, lambda own: own[:0]),  # TransformerEngine's, without fp8
    "no bytes": lambda: Scaled(1.0, lambda own: BytesIO()),
}


@pytest.mark.parametrize("kind", ORDINARY)
def test_ordinary_modules_leave_nothing_behind(kind: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch means to give some of these up
        module = ORDINARY[kind]()
    found = resolve_all(module)
    assert (found.left_out, found.carried) == ({}, frozenset())
    state = module.state_dict(keep_vars=True)
    state.pop("_extra_state", None)
    assert list(found.tensors) == list(state)
    vars(module).pop("alias", None)  # of the weight no more
    assert not resolve_all(module.half()).left_out


def test_a_real_model_leaves_nothing_behind() -> None:
    module = encoder.load().registered()
    assert isinstance(module, nn.Module)
    found = resolve_all(module)
    assert (len(found.tensors) > 100, found.left_out, found.carried) == (True, {}, frozenset())
