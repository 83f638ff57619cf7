"""What is registered of a module or of a mapping: names, order, wrappers, and what is refused."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.tensor import DTensor, Partial, Shard

from tensorhub.errors import RegistrationError
from tensorhub.layouts.views import source
from tensorhub.memory.describing import describe
from tensorhub.memory.resolving import resolve
from tensorhub.memory.tensors import RegisteredMemory


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(4, 2)
        self.blocks = nn.ModuleList([nn.Linear(2, 2, bias=False), nn.BatchNorm1d(2)])
        self.again = self.blocks[0]  # one module under two names
        self.head = nn.Linear(2, 4, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("kept", torch.ones(3))
        self.register_buffer("scratch", torch.ones(3), persistent=False)
        self.register_buffer("nothing", None)
        self.register_parameter("none", None)
        self.absent: nn.Module | None
        self.register_module("absent", None)
        self.tensor = torch.ones(1)  # neither a parameter nor a buffer


MODULES: dict[str, Callable[[], Any]] = {
    "tied": Tied,
    "lstm": lambda: nn.LSTM(2, 3, num_layers=2),
    "attention": lambda: nn.MultiheadAttention(4, 2),
    "transformer": lambda: nn.TransformerEncoderLayer(4, 2),
    "parametrized": lambda: nn.utils.parametrizations.weight_norm(nn.Linear(2, 2)),
    "scripted": lambda: torch.jit.script(nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))),
    "parameters": lambda: nn.ParameterDict({"a": nn.Parameter(torch.ones(2))}),
}


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning")
@pytest.mark.parametrize("kind", MODULES)
def test_a_module_is_what_its_state_dict_names(kind: str) -> None:
    module = MODULES[kind]()
    found, expected = resolve(module), module.state_dict()
    assert list(found) == list(expected)
    assert [tensor.data_ptr() for tensor in found.values()] == [
        tensor.data_ptr() for tensor in expected.values()
    ]


def plain() -> nn.Sequential:
    return nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))


@pytest.fixture
def process_group() -> Iterator[None]:
    distributed: Any = torch.distributed
    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    yield
    distributed.destroy_process_group()


def alone() -> DeviceMesh:
    return init_device_mesh("cpu", (1,))


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of torch, as it imports itself
def test_prefixes_of_wrappers_are_left_out(process_group: None) -> None:
    names = list(plain().state_dict())
    assert list(resolve(torch.compile(plain()))) == names
    assert list(resolve(nn.parallel.DataParallel(plain()))) == names
    assert list(resolve(nn.parallel.DistributedDataParallel(plain()))) == names
    assert list(resolve(checkpoint_wrapper(plain()))) == names
    assert list(resolve(torch.compile(nn.parallel.DistributedDataParallel(plain())))) == names
    compiled: Any = torch.compile(nn.Linear(2, 2))
    within = nn.Sequential(compiled, checkpoint_wrapper(nn.BatchNorm1d(2)))
    assert list(resolve(within)) == names


def test_a_module_of_ones_own_that_is_called_like_a_wrappers_keeps_its_name() -> None:
    class Mine(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.module = nn.Linear(1, 1)

    assert list(resolve(Mine())) == ["module.weight", "module.bias"]


@pytest.mark.filterwarnings("ignore")
def test_what_fsdp_makes_of_a_module_is_refused_with_the_mend(process_group: None) -> None:
    flattened = nn.Sequential(FullyShardedDataParallel(plain(), device_id=torch.device("cpu")))
    with pytest.raises(
        RegistrationError, match=r"the module '0' is wrapped in Fully.*register tensors of your own"
    ):
        RegisteredMemory(flattened)
    sharded: Any = fully_shard(plain(), mesh=alone())
    memory, local = (
        RegisteredMemory(sharded),
        {name: tensor.to_local() for name, tensor in sharded.named_parameters()},
    )
    assert memory.descriptions[:4] == describe(local)
    assert set(memory.shardings) == set(local)


def test_a_module_that_is_sharded_after_it_was_registered(process_group: None) -> None:
    module = plain()
    memory = RegisteredMemory(module)
    fully_shard(module, mesh=alone())
    with pytest.raises(
        RegistrationError,
        match=r"4 tensor\(s\) were replaced.*\n.*'0\.weight': .*it is a DTensor now",
    ):
        memory.check_current()


def test_a_sharded_module_that_has_changed_since(process_group: None) -> None:
    module: Any = fully_shard(plain(), mesh=alone())
    memory = RegisteredMemory(module)
    versions = memory.versions()
    memory.check_current()
    module(torch.ones(2, 2))  # and is gathered, until it is resharded
    for refused in (memory.check_current, partial(RegisteredMemory, module)):
        with pytest.raises(
            RegistrationError, match=r"4 parameter\(s\) are gathered .*'0\.weight', .*`reshard\(\)`"
        ):
            refused()
    module.reshard()
    memory.check_current()
    memory.count_write()
    assert memory.versions() != versions
    module.half()  # the same parameters, with other local parts
    with pytest.raises(
        RegistrationError, match=r"'0\.weight': its dtype is torch\.float16, not torch\.float32"
    ):
        memory.check_current()


def test_a_part_of_a_module_that_is_gathered_by_hand(process_group: None) -> None:
    """Nothing else of it is: the parameters of the other part, and one that FSDP leaves alone."""
    module: Any = plain()
    ignored = {next(iter(module.children())).bias}
    for layer in module.children():
        fully_shard(layer, mesh=alone(), ignored_params=ignored)
    module[0].unshard()
    with pytest.raises(
        RegistrationError, match=r"^1 parameter\(s\) are gathered by FSDP now \('0\.weight'\): "
    ):
        resolve(module)
    module[0].reshard()
    memory = RegisteredMemory(module)
    assert set(memory.shardings) == {"0.weight", "1.weight", "1.bias"}
    module[0].unshard()
    with pytest.raises(RegistrationError, match=r"'0\.weight'"):
        memory.check_current()


def test_dtensors_that_cannot_be_used_and_sources_that_say_nothing_are_all_named(
    process_group: None,
) -> None:
    mesh = alone()
    partial = DTensor.from_local(torch.ones(2), mesh, [Partial()])
    sharded = DTensor.from_local(torch.ones(2), mesh, [Shard(0)])
    transposed = DTensor.from_local(torch.ones(2, 3).T, mesh, [Shard(0)])
    given = {
        "partial": partial,
        "x": {"sharded": sharded},
        "transposed": transposed,
        "listed": torch.ones(1),
    }
    with pytest.raises(RegistrationError) as caught:
        RegisteredMemory(given, {"listed": ["w"], "absent": source("w")})
    text = str(caught.value)
    assert text.startswith("4 tensor(s) cannot be registered")
    assert "'partial': it is a DTensor with a Partial placement" in text
    assert "'transposed': it is not contiguous" in text
    assert "sources of 'listed': give a view" in text
    assert "sources names 'absent', and no tensor of that name is registered" in text
    memory = RegisteredMemory(
        {"partial": partial, "w": sharded}, lambda name: source("w") if name == "partial" else None
    )
    assert (set(memory.entries), set(memory.shardings)) == ({"partial"}, {"w"})


def test_nested_mappings() -> None:
    a, b, c = (torch.ones(1) for _ in range(3))
    assert resolve({"a": a, "x": {"b": b, "y": {"c": c}, "empty": {}}}) == {
        "a": a,
        "x.b": b,
        "x.y.c": c,
    }


def itself() -> dict[str, Any]:
    given: dict[str, Any] = {}
    given["again"] = given
    return given


@pytest.mark.parametrize(
    ("given", "why"),
    [
        ({"a": {"b": 1}, "a.b": 2}, r"two entries have one name \('a\.b'\)"),
        (itself(), "nested too deeply"),
        (
            [torch.ones(1)],
            r"give an nn\.Module or a mapping of names to tensors, not builtins\.list",
        ),
        (
            nn.Linear(1, 1).named_parameters(),
            "give an nn.Module or a mapping of names to tensors, not builtins.generator",
        ),
        (nn.Linear, "not builtins.type"),
        (None, "not builtins.NoneType"),
    ],
)
def test_what_cannot_be_resolved(given: object, why: str) -> None:
    with pytest.raises(RegistrationError, match=why):
        resolve(given)


def test_what_is_in_a_mapping_is_a_tensor_or_a_mapping() -> None:
    with pytest.raises(
        RegistrationError, match=r"'m': a torch\.nn\.modules\.linear\.Linear is neither"
    ):
        RegisteredMemory({"m": nn.Linear(1, 1)})
    with pytest.raises(RegistrationError, match=r"7: a name is a string"):
        RegisteredMemory({"a": {7: torch.ones(1)}})
    with pytest.raises(RegistrationError, match="there are none; give at least one"):
        RegisteredMemory(nn.ReLU())


def test_a_parameter_that_is_put_back_is_no_change() -> None:
    module = plain()
    memory = RegisteredMemory(module)
    linear: Any = module[0]
    kept = linear.weight
    linear.weight = nn.Parameter(torch.ones(2, 2))
    with pytest.raises(RegistrationError, match=r"'0\.weight'"):
        memory.check_current()
    linear.weight = nn.Parameter(kept.data)  # another object, the same memory
    memory.check_current()


def test_many_changes_are_not_all_listed() -> None:
    module = nn.ModuleList(nn.Linear(1, 1, bias=False) for _ in range(30))
    memory = RegisteredMemory(module)
    module.double()
    with pytest.raises(
        RegistrationError, match=r"(?s)30 tensor\(s\) were replaced.*and 10 more"
    ) as caught:
        memory.check_current()
    assert str(caught.value).count("dtype") == 20
