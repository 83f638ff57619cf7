"""What a layer's post-processing does is found out on a copy, and the layer stays as it was."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from tensorhub.integrations.probing import kind, leaves_bytes, own_tensors

SHAPE = (4, 6)


class Method:
    """What frameworks hang at a layer: a method that is called once the layer is loaded."""

    def __init__(self, process: Callable[[Any], object]) -> None:
        self.process_weights_after_loading = process


class Layer(nn.Module):
    def __init__(
        self, process: Callable[[Any], object], dtype: torch.dtype = torch.bfloat16
    ) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(SHAPE).to(dtype), requires_grad=False)
        self.register_buffer("scale", torch.ones(2))
        self.register_buffer("cache", torch.ones(3), persistent=False)
        self.register_parameter("bias", None)
        self.quant_method = Method(process)


def swap_halves(layer: Any) -> None:
    layer.weight.data.copy_(layer.weight.data.roll(SHAPE[0] // 2, 0))


def transpose(layer: Any) -> None:
    layer.weight = nn.Parameter(layer.weight.data.t().contiguous(), requires_grad=False)


def turn(layer: Any) -> None:
    """The same numbers, column by column."""
    layer.weight = nn.Parameter(layer.weight.data.t().contiguous().t(), requires_grad=False)


def remove(layer: Any) -> None:
    del layer.scale


def derive_for_method(layer: Any) -> None:
    layer.quant_method.derived = layer.weight.data.float()


def derive_again(layer: Any) -> None:
    layer.kept = layer.weight.data.float()  # in place of what an earlier processing has derived


def enclose(layer: Any) -> None:
    weight = layer.weight.data.float()
    layer.apply_weights = lambda x: x @ weight


def enclose_as_default(layer: Any) -> None:
    weight = layer.weight.data.float()
    layer.apply_weights = lambda x, weight=weight: x @ weight


def derive(layer: Any) -> None:
    layer.derived = layer.weight.data.float()


def add(layer: Any) -> None:
    layer.register_parameter("other", nn.Parameter(torch.ones(2)))


def scale(layer: Any) -> None:
    layer.scale.mul_(2)


def note(layer: Any) -> None:
    layer.is_processed = True
    layer.weight.is_processed = True
    layer._noted = layer.weight.data.float()  # what a framework keeps for itself
    layer.quant_method.kernel = "plain"


def process(layer: Any) -> None:
    layer.quant_method.process_weights_after_loading(layer)


CHANGES = [
    swap_halves,
    transpose,
    turn,
    add,
    remove,
    scale,
    derive,
    derive_for_method,
    derive_again,
]


@pytest.mark.parametrize("change", [*CHANGES, enclose, enclose_as_default])
def test_what_is_changed_is_found_and_the_layer_is_untouched(
    change: Callable[[Any], object],
) -> None:
    layer = Layer(change)
    layer.kept = torch.ones(SHAPE)
    before = {name: (id(tensor), tensor.clone()) for name, tensor in own_tensors(layer).items()}
    attributes = set(layer.__dict__)
    assert not leaves_bytes(layer, own_tensors(layer), process)
    assert set(layer.__dict__) == attributes
    assert {name: id(tensor) for name, tensor in own_tensors(layer).items()} == {
        n: each[0] for n, each in before.items()
    }
    assert all(torch.equal(tensor, before[name][1]) for name, tensor in own_tensors(layer).items())


@pytest.mark.parametrize("change", [note, lambda layer: None])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e4m3fn, torch.int8])
def test_what_stays_as_it_is(change: Callable[[Any], object], dtype: torch.dtype) -> None:
    layer = Layer(change, dtype)
    assert leaves_bytes(layer, own_tensors(layer), process)
    assert not hasattr(layer, "is_processed")
    assert not hasattr(layer.quant_method, "kernel")
    assert not hasattr(layer.weight, "is_processed")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e4m3fn, torch.int8])
def test_a_trial_draws_nothing_from_the_numbers_that_sampling_uses(dtype: torch.dtype) -> None:
    layer = Layer(note, dtype)
    torch.manual_seed(7)
    before = torch.get_rng_state()
    leaves_bytes(layer, own_tensors(layer), process)
    assert torch.equal(torch.get_rng_state(), before)


def test_what_is_undone() -> None:
    layer = Layer(swap_halves)

    def twice(tried: Any) -> None:
        process(tried)
        derive(tried)
        process(tried)

    assert leaves_bytes(layer, own_tensors(layer), twice, is_exact=False)
    assert not leaves_bytes(layer, own_tensors(layer), twice)


def other_shape(layer: Any) -> None:
    layer.weight = nn.Parameter(torch.ones(SHAPE[::-1]).to(torch.bfloat16), requires_grad=False)


def other_dtype(layer: Any) -> None:
    layer.weight = nn.Parameter(torch.ones(SHAPE), requires_grad=False)


def other_method(layer: Any) -> None:
    layer.quant_method = Method(derive)


@pytest.mark.parametrize("change", [turn, remove, other_shape, other_dtype, other_method])
def test_layers_of_one_kind_differ_in_nothing_that_is_processed(
    change: Callable[[Any], object],
) -> None:
    layer, alike = Layer(note), Layer(note)
    for n, each in enumerate((layer, alike)):
        each.__dict__.update(prefix=f"layers.{n}", sizes=[4, (2, True)], act=lambda x: x)
    assert kind(layer, own_tensors(layer)) == kind(alike, own_tensors(alike))
    change(alike)
    assert kind(layer, own_tensors(layer)) != kind(alike, own_tensors(alike))


@pytest.mark.parametrize("size", [5, True, "4", None, [4], (4,)])
def test_a_layer_with_another_attribute_is_of_another_kind(size: object) -> None:
    layer, other = Layer(note), Layer(note)
    layer.__dict__["size"], other.__dict__["size"] = 4, size
    assert kind(layer, own_tensors(layer)) != kind(other, own_tensors(other))


def test_own_tensors_are_parameters_and_persistent_buffers() -> None:
    assert sorted(own_tensors(Layer(note))) == ["scale", "weight"]
