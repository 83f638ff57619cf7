"""Adapters as they are published; the engines' side is tested with the engines."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from tensorhub.errors import InvalidType, InvalidValue, ManifestMismatch
from tensorhub.integrations.adapters import (
    CONFIG,
    Half,
    adapter_tensors,
    check_fits,
    config_of,
    differences,
    named,
    unwrapped,
)

SIZES = {"q": (8, 16), "k": (8, None)}


def halves(**changed: torch.Tensor) -> list[Half]:
    made = {"q.A": torch.zeros(2, 8), "q.B": torch.zeros(16, 2), "k.A": torch.zeros(2, 8)}
    made = {**made, "k.B": torch.zeros(5, 2), **changed}
    return [Half(name, name[0], name.endswith("A"), each) for name, each in made.items()]


def test_the_configuration_is_one_more_tensor() -> None:
    config = {"r": 2, "target_modules": {"q", "k"}}
    made = adapter_tensors({"a": torch.zeros(1)}, config)
    assert set(made) == {"a", CONFIG}
    assert config_of("poet", made) == {"r": 2, "target_modules": ["k", "q"]}
    with pytest.raises(InvalidType, match="cannot be written as JSON"):
        adapter_tensors({}, {"r": object()})
    deep: list[object] = []
    for _ in range(10**5):
        deep = [deep]
    with pytest.raises(InvalidType, match="recursion"):
        adapter_tensors({}, {"r": deep})
    open_list = torch.tensor([ord("[")], dtype=torch.uint8)
    for wrong in (
        {},
        {CONFIG: torch.zeros(3)},
        {CONFIG: open_list},
        {CONFIG: open_list.repeat(10**6)},
    ):
        with pytest.raises(ManifestMismatch, match="'poet' has no tensor"):
            config_of("poet", wrong)


def test_names() -> None:
    assert named("tensorhub:team/poet@3") == ("team/poet", 3)
    for wrong in ("tensorhub:poet", "tensorhub:@3", "tensorhub:poet@x", "tensorhub:poet@-1"):
        with pytest.raises(InvalidValue, match="give tensorhub:MODEL@VERSION"):
            named(wrong)


def test_what_does_not_fit_is_all_listed() -> None:
    config = {"target_modules": ["q", "k"]}
    assert list(differences(halves(), SIZES, lambda half: 2, config)) == []
    found = list(
        differences(
            [
                *halves(**{"q.A": torch.zeros(3, 8), "q.B": torch.zeros(16, 2).to(torch.int8)})[:3],
                Half("x.A", "x", True, torch.zeros(2, 8)),
                Half("x.B", "x", False, torch.zeros(2, 8)),
            ],
            {**SIZES, "v.k": (8, 8)},
            lambda half: 2,
            config,
        )
    )
    assert found == [
        "'q.A': its shape is (3, 8), and has to be (2, 8)",
        "'q.B': int8 is no dtype of an adapter",
        "'x.A': the engine has no module 'x' that takes an adapter",
        "'x.B': the engine has no module 'x' that takes an adapter",
        "'k': 'k.A' is there without its other half",
        "'v.k': it is a target module, and has no weights",
    ]
    with pytest.raises(
        ManifestMismatch, match=r"'poet' does not fit this engine in 6 place"
    ) as error:
        check_fits("poet", found)
    assert error.value.differences == tuple(found)
    check_fits("poet", [])


def test_layers_without_their_wrappers() -> None:
    class Wrapper(nn.Module):
        def __init__(self, base_layer: nn.Module) -> None:
            super().__init__()
            self.base_layer = base_layer

    inner, plain = nn.Linear(2, 2), nn.Sequential(nn.Linear(2, 2))
    model = nn.ModuleDict({"a": nn.Sequential(Wrapper(inner)), "b": plain})
    made = unwrapped(model, Wrapper)
    assert list(dict(made.named_parameters())) == [
        "a.0.weight",
        "a.0.bias",
        "b.0.weight",
        "b.0.bias",
    ]
    assert dict(made.named_parameters())["a.0.weight"] is inner.weight
    assert isinstance(model["a"], nn.Sequential)
    assert isinstance(model["a"][0], Wrapper)
