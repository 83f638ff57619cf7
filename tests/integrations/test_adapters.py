"""Adapters as they are published; the engines' side is tested with the engines."""

from __future__ import annotations

from types import SimpleNamespace

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
    outputs_of,
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
    assert named("tensorhub:me@team/poet@3") == ("me@team/poet", 3)
    for wrong in (
        "tensorhub:poet",
        "tensorhub:@3",
        "tensorhub:poet@x",
        "tensorhub:poet@-1",
        "tensorhub:@",
        f"tensorhub:poet@{'9' * 5000}",
        "tensorhub:poet@\u00b2",
    ):
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


def test_dtypes_and_dimensions_that_no_adapter_has() -> None:
    wrong = {"q.A": torch.zeros(2, 8).to(torch.float8_e4m3fn), "q.B": torch.zeros(16)}
    assert list(differences(halves(**wrong), SIZES, lambda half: 2, {})) == [
        "'q.A': float8_e4m3fn is no dtype of an adapter",
        "'q.B': it has 1 dimensions, and has to have 2",
    ]


def test_modules_that_need_no_weights() -> None:
    """Names that end alike, and what a configuration leaves out, are no lack."""
    sizes = {**SIZES, "task": (8, 8), "layers.1.q": (8, 8)}
    config = {"target_modules": ["q", "k"], "exclude_modules": ["layers.1.q"]}
    assert list(differences(halves(), sizes, lambda half: 2, config)) == []
    del sizes["layers.1.q"], config["exclude_modules"]
    assert list(differences(halves(), sizes, lambda half: 2, config)) == []


def test_a_module_that_is_published_as_a_base_layer() -> None:
    found = differences(
        [
            Half("q.base_layer.A", "q.base_layer", True, torch.zeros(2, 8)),
            Half("q.base_layer.B", "q.base_layer", False, torch.zeros(16, 2)),
        ],
        {"q": (8, 16)},
        lambda half: 2,
        {},
    )
    assert list(found) == []


def test_outputs_of_fused_layers() -> None:
    heads = {"total_num_heads": 8, "total_num_kv_heads": 2, "head_size": 4}
    assert outputs_of(SimpleNamespace(**heads), 3) == (32, 8, 8)
    assert outputs_of(SimpleNamespace(**heads, v_head_size=16), 3) == (32, 8, 32)
    assert outputs_of(SimpleNamespace(output_sizes=[5, 6]), 2) == [5, 6]
    assert outputs_of(SimpleNamespace(output_sizes=[5, 6]), 3) == [None] * 3
    assert outputs_of(SimpleNamespace(), 2) == [None] * 2


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
