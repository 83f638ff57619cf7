"""A version never has the bytes of tensors that its publisher has replaced, and autograd sees what
the library writes.
"""

from __future__ import annotations

import contextlib
import threading
import warnings
from collections.abc import Awaitable, Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any

import anyio
import numpy as np
import pytest
import torch
from torch import nn

import tensorhub
from tensorhub.api.weights import Weights
from tensorhub.errors import (
    GroupAborted,
    MutabilityViolation,
    RegistrationError,
    StaleWeightsWarning,
    StateError,
)
from tests.rig import OPTIONS, Cluster, cluster, gated, ranks_of, until

HOST_MEMORY = replace(OPTIONS, host_memory_bytes=2**20)


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


class Policy(nn.Module):
    def __init__(self, value: float = 0.0) -> None:
        super().__init__()
        self.body = nn.Linear(8, 8)
        self.norm = nn.BatchNorm1d(8)
        for tensor in self.state_dict().values():
            tensor.fill_(value)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.body(x)
        return y


def step(policy: nn.Module) -> None:
    with torch.no_grad():
        for parameter in policy.parameters():
            parameter.add_(1)


def assign(policy: Policy) -> None:
    policy.load_state_dict(
        {name: tensor.clone() for name, tensor in policy.state_dict().items()}, assign=True
    )


def parameter(policy: Policy) -> None:
    policy.body.weight = nn.Parameter(torch.ones(8, 8))


def data(policy: Policy) -> None:
    policy.body.weight.data = torch.ones(8, 8)


def resize(policy: Policy) -> None:
    policy.body.requires_grad_(False).weight.resize_(1000, 8)


def half(policy: Policy) -> None:
    policy.half()


def to_empty(policy: Policy) -> None:
    policy.to_empty(device="cpu")


def buffer(policy: Policy) -> None:
    policy.norm.running_mean = torch.zeros(8)


def remove(policy: Policy) -> None:
    del policy.norm


def add(policy: Policy) -> None:
    policy.head = nn.Linear(1, 1)


Replacing = Callable[[Policy], None]
Given = Callable[[Policy], Any]  # what of it is registered
REPLACED: dict[Replacing, str] = {  # what the error says
    assign: "'body.weight': its storage is another one",
    parameter: "'body.weight': its storage is another one",
    data: "'body.weight': its storage is another one",
    resize: "'body.weight': its shape is torch.Size([1000, 8]), not torch.Size([8, 8])",
    half: "'body.weight': its dtype is torch.float16, not torch.float32, its storage is another "
    "one",
    to_empty: "'body.weight': its storage is another one",
    buffer: "'norm.running_mean': its storage is another one",
    remove: "'norm.weight': the module has it no more",
    add: "'head.weight': the module did not have it",
}
replaced = pytest.mark.parametrize("how", REPLACED, ids=lambda how: how.__name__)


def says(error: BaseException, how: Replacing) -> bool:
    mend = (
        "were replaced since they were registered",
        "`copy_`",
        "or close this handle and register anew",
    )
    return all(part in str(error) for part in (REPLACED[how], *mend))


# --------------------------------------------------------------------------------------------------
# replaced tensors


@replaced
async def test_a_module_with_other_tensors_is_neither_published_nor_filled(how: Replacing) -> None:
    async with cluster("trainer", "reader", options=HOST_MEMORY) as c:
        policy, mine = Policy(1), Policy()
        source = await c.hubs[0].register("m", policy)
        async with source.mutate(1):
            step(policy)
        weights = await c.hubs[1].register("m", mine)
        await weights.replicate()
        assert mine.body.weight.eq(2).all()
        how(policy)
        how(mine)
        calls: list[Callable[[], Awaitable[object]]] = [
            lambda: mutate(source, 2),
            weights.update,
            weights.prefetch,
        ]
        for call in calls:
            with pytest.raises(RegistrationError) as caught:
                await call()
            assert says(caught.value, how), str(caught.value)
            assert (caught.value.memory, source.version, weights.version) == ("intact", 1, 1)
        for handle in source, weights:
            # a resized tensor's published bytes are gone
            with contextlib.suppress(MutabilityViolation):
                await handle.unpublish()
        last: list[Callable[[], Awaitable[object]]] = [lambda: source.publish(2), weights.replicate]
        for call in last:
            with pytest.raises(RegistrationError) as caught:
                await call()
            assert says(caught.value, how), str(caught.value)
        assert (source.state, weights.state) == ("empty", "empty")
        await source.close()
        await (await c.hubs[0].register("m", policy)).publish(2)  # as the error says


async def mutate(weights: Weights, version: int) -> None:
    async with weights.mutate(version):
        raise AssertionError("the body must not run")


@replaced
async def test_what_the_body_of_mutate_replaces_is_not_published(how: Replacing) -> None:
    async with cluster("trainer") as c:
        policy = Policy()
        source = await c.hubs[0].register("m", policy)

        async def train() -> None:
            async with source.mutate(1):
                step(policy)
                how(policy)

        with pytest.raises(RegistrationError) as caught:
            await train()
        assert says(caught.value, how), str(caught.value)
        assert (source.state, c.hubs[0].newest("m")) == ("empty", None)


async def test_tensors_are_looked_up_in_the_callers_thread() -> None:
    here, asked = threading.get_ident(), list[int]()

    class Lazily(dict[str, torch.Tensor]):
        def __getitem__(self, name: str) -> torch.Tensor:
            raise AssertionError("see get")

        def get(self, name: str, default: object = None) -> torch.Tensor:
            asked.append(threading.get_ident())
            return super().__getitem__(name)

    async with cluster("trainer", "reader") as c:
        mine = Lazily(w=torch.zeros(4))
        await (await c.hubs[0].register("m", {"w": torch.ones(4)})).publish(1)
        weights = await c.hubs[1].register("m", mine)
        asked.clear()
        await weights.replicate()
        await weights.unpublish()
        await weights.publish(2)
    assert len(asked) == 2
    assert set(asked) == {here}


async def test_what_mappings_show() -> None:
    """Parameters show what is done to them; aliases, what is done to their storage; either, what is
    under their names.
    """
    shown: dict[str, tuple[Given, set[Replacing]]] = {
        "parameters": (
            lambda policy: dict(policy.named_parameters()),
            {data, half, to_empty, resize},
        ),
        "aliases": (lambda policy: policy.state_dict(), {resize}),
        "nested": (
            lambda policy: {"body": dict(policy.body.named_parameters())},
            {data, half, to_empty, resize},
        ),
    }
    async with cluster("trainer") as c:
        for kind, (given, hows) in shown.items():
            for how in (assign, parameter, data, half, to_empty, resize):
                policy = Policy()
                weights = await c.hubs[0].register(f"{kind}-{how.__name__}", given(policy))
                how(policy)
                with pytest.raises(RegistrationError) if how in hows else contextlib.nullcontext():
                    await weights.publish(1)


async def test_elements_that_are_not_what_the_bytes_say_are_not_published() -> None:
    """torch conjugates and negates views of the same memory when they are read."""
    async with cluster("trainer") as c:
        for how in (torch.conj, torch._neg_view):
            module = nn.Module()
            module.weight = nn.Parameter(torch.ones(2, dtype=torch.complex64) * 1j)
            weights = await c.hubs[0].register(how.__name__, module)
            module.weight.data = how(module.weight.data)
            with pytest.raises(
                RegistrationError, match="'weight': its conjugation or negation is still to be done"
            ):
                await weights.publish(1)


async def test_names_that_differ_by_a_wrappers_prefix() -> None:
    async with cluster("trainer", "reader") as c:
        source = await c.hubs[0].register(
            "m", {"_orig_mod.w": torch.ones(2), "_orig_mod.b": torch.ones(2)}
        )
        await source.publish(1)
        weights = await c.hubs[1].register("m", {"w": torch.ones(2), "b": torch.ones(2)})
        with pytest.raises(
            tensorhub.ManifestMismatch,
            match=r"'_orig_mod\.' at the source.*register the module that it wraps",
        ):
            await weights.replicate()


# --------------------------------------------------------------------------------------------------
# nothing written


@pytest.fixture
def told() -> Iterator[list[warnings.WarningMessage]]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", StaleWeightsWarning)
        yield caught


Told = list[warnings.WarningMessage]


@pytest.mark.parametrize("how", [assign, parameter], ids=lambda how: how.__name__)
async def test_a_mutate_that_writes_no_registered_tensor_is_told(
    how: Replacing, told: Told
) -> None:
    async with cluster("trainer") as c:
        policy = Policy()
        source = await c.hubs[0].register("m", {"w": policy.body.weight.detach()})
        async with source.mutate(1):
            step(policy)
        assert not told
        how(policy)
        async with source.mutate(2):
            step(policy)
        (one,) = told
        assert (one.category, one.filename, source.version) == (StaleWeightsWarning, __file__, 2)
        for part in (
            "mutate() of 'm'",
            "written no registered tensor",
            "Register the module itself",
        ):
            assert part in str(one.message)


def by_data(tensor: torch.Tensor) -> None:
    tensor.data.add_(1)


def by_numpy(tensor: torch.Tensor) -> None:
    tensor.numpy()[-1] = 7


def by_address(tensor: torch.Tensor) -> None:
    torch.frombuffer(tensor.numpy(), dtype=torch.uint8)[:4] = 9


@pytest.mark.parametrize("write", [by_data, by_numpy, by_address], ids=lambda write: write.__name__)
async def test_what_moves_no_count_is_seen_by_its_bytes(
    write: Callable[[torch.Tensor], None], told: Told
) -> None:
    async with cluster("trainer") as c:
        tensor = torch.zeros(3_000_000)
        source = await c.hubs[0].register(
            "m", {"w": tensor, "none": torch.zeros(0), "other": torch.zeros(5)}
        )
        async with source.mutate(1):
            write(tensor)
        assert not told


def uncounted() -> dict[str, Mapping[str, Any]]:
    with torch.inference_mode():
        inference = torch.zeros(4)
    return {
        "numpy": {"w": np.zeros(4), "t": torch.zeros(2)},
        "flat": {"w": torch.zeros(8)[:4], "t": torch.zeros(2)},
        "inference": {"w": inference, "t": torch.zeros(2)},
    }


@pytest.mark.parametrize("kind", uncounted())
async def test_nothing_is_told_of_what_has_no_count(kind: str, told: Told) -> None:
    async with cluster("trainer") as c:
        source = await c.hubs[0].register("m", uncounted()[kind])
        async with source.mutate(1):
            pass
        assert not told


async def test_a_stale_mutate_may_be_an_error_or_silent(told: Told) -> None:
    async with cluster("one", "two", options=replace(OPTIONS, stale_weights="error")) as c:
        given = [{"w": torch.zeros(4)}, {"w": torch.zeros(4)}]
        ranks = await ranks_of(c.hubs, given, "g")

        async def stale() -> None:
            with pytest.raises(StateError, match="written no registered tensor"):
                async with ranks[0].mutate(1):
                    pass

        async def other() -> None:
            with pytest.raises(
                GroupAborted, match=r"rank 0: after its body, mutate\(1\) raised StateError"
            ):
                async with ranks[1].mutate(1):
                    given[1]["w"].add_(1)

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(stale)
            tasks.start_soon(other)
        assert [rank.state for rank in ranks] == ["empty", "empty"]
    async with cluster("trainer", options=replace(OPTIONS, stale_weights="ignore")) as c:
        source = await c.hubs[0].register("m", given[0])
        async with source.mutate(1):
            pass
    assert not told
    with pytest.raises(
        StateError, match=r"stale_weights = 'never': give 'warn', 'error' or 'ignore'"
    ):
        tensorhub.Options(stale_weights="never")  # type: ignore[arg-type]


async def test_a_fill_within_mutate_is_a_write(told: Told) -> None:
    """Two registrations of the same tensors: what one fills, the other publishes."""
    async with cluster("trainer", "relay") as c:
        await (await c.hubs[0].register("m", Policy(3))).publish(1)
        mine = Policy()
        inflow, outflow = (
            await c.hubs[1].register("m", mine),
            await c.hubs[1].register("copy", mine),
        )
        async with outflow.mutate(1):
            await inflow.replicate()
        assert not told
        assert (await c.hubs[0].fetch("copy"))["body.weight"].eq(3).all()


# --------------------------------------------------------------------------------------------------
# autograd

OVERWRITTEN = "modified by an inplace operation"


async def two_versions(c: Cluster, given: Given = lambda policy: policy) -> tuple[Policy, Weights]:
    """The reader holds version 1, and version 2 is published."""
    policy, mine = Policy(1), Policy()
    source = await c.hubs[0].register("m", given(policy))
    await source.publish(1)
    weights = await c.hubs[1].register("m", given(mine))
    await weights.replicate()
    async with source.mutate(2):
        step(policy)
    return mine, weights


def loss_of(policy: Policy) -> torch.Tensor:
    """Its gradient needs the weight that it was made with."""
    loss: torch.Tensor = policy(torch.ones(2, 8, requires_grad=True)).square().sum()
    return loss


@pytest.mark.parametrize("staged", [False, True])
@pytest.mark.parametrize("prefetched", [False, True])
@pytest.mark.parametrize(
    "given", [lambda policy: policy, lambda policy: policy.state_dict()], ids=["module", "aliases"]
)
async def test_an_update_between_forward_and_backward_is_noticed(
    given: Given, prefetched: bool, staged: bool
) -> None:
    async with cluster("trainer", "reader", options=HOST_MEMORY) as c:
        mine, weights = await two_versions(c, given)
        if prefetched:
            await weights.prefetch()
        loss = loss_of(mine)
        assert (await weights.update(staged=staged)).version == 2
        with pytest.raises(RuntimeError, match=OVERWRITTEN):
            torch.autograd.backward(loss)
        torch.autograd.backward(loss_of(mine))
        assert not (await weights.update()).changed  # the library's writes are no violation
        await weights.unpublish()


async def test_what_is_read_in_the_midst_of_an_update_is_noticed_too_and_so_is_one_that_is_broken_off() -> (
    None
):
    losses = []
    with gated(0) as gate:
        gate.open()
        async with cluster("trainer", "reader") as c:
            mine, weights = await two_versions(c)
            losses.append(loss_of(mine))
            gate.close(0)
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(weights.update)
                await until(lambda: gate.holds)
                losses.append(loss_of(mine))
                tasks.cancel_scope.cancel()
            assert weights.state == "torn"
    for loss in losses:
        with pytest.raises(RuntimeError, match=OVERWRITTEN):
            torch.autograd.backward(loss)
