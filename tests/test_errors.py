"""Every error of the public API, provoked through it: what it says, whether trying again helps, and
what the memory is.
"""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from typing import Any, TypeVar

import anyio
import numpy as np
import pytest
import torch

import tensorhub
from tensorhub import errors
from tensorhub.api.hub import Hub
from tensorhub.api.weights import Weights
from tensorhub.errors import (
    AuthenticationFailed,
    CoordinatorUnavailable,
    DrainTimeout,
    GroupAborted,
    IntegrityError,
    InvalidType,
    InvalidValue,
    LeaseLost,
    ManifestMismatch,
    MutabilityViolation,
    OperationTimeout,
    ProtocolError,
    RegistrationError,
    StateError,
    TensorHubError,
    TransportUnavailable,
    VersionConflict,
    VersionUnavailable,
)
from tensorhub.memory.tensors import RegisteredMemory
from tensorhub.messages import ErrorInfo
from tensorhub.runtime.data.serving import SharedOwner
from tensorhub.types import ContentId, Options, RegistrationId, VersionInfo, parse_address
from tests.rig import (
    CHUNK_BYTES,
    CHUNKS,
    WAIT_S,
    Cluster,
    Restartable,
    cluster,
    connect,
    gated,
    handle_of,
    holds,
    nothing_left,
    published,
    tensors,
    until,
    write,
)
from tests.runtime.data_rig import waited_out_s

E = TypeVar("E", bound=TensorHubError)
Test = Callable[..., Awaitable[None]]
PROVOKED_BY: dict[str, list[str]] = {}
PROVOKED_ELSEWHERE = {"ArchiveUnavailable", "RetentionError"}


def provokes(*kinds: type[TensorHubError]) -> Callable[[Test], Test]:
    def note(test: Test) -> Test:
        for kind in kinds:
            PROVOKED_BY.setdefault(kind.__name__, []).append(test.__name__)
        return test

    return note


def test_every_error_is_provoked() -> None:
    assert errors.BY_NAME.keys() - PROVOKED_BY.keys() - {"TensorHubError"} == PROVOKED_ELSEWHERE


@contextlib.contextmanager
def raises(kind: type[E], *says: str, retryable: bool, memory: str = "intact") -> Iterator[list[E]]:
    """This very class, each of these words in its text, and these attributes."""
    caught: list[E] = []
    with pytest.raises(kind) as info:
        yield caught
    error = info.value
    caught.append(error)
    assert type(error) is kind
    for part in says:
        assert part in str(error)
    assert (error.retryable, error.memory) == (retryable, memory)


async def readable(hub: Hub, version: int, content: int) -> None:
    """Somebody else can fetch that version, and gets those bytes."""
    mine = tensors()
    weights = await hub.register("m", mine)
    assert (await weights.replicate(version)).version == version
    assert holds(mine, content)
    await weights.close()


async def mutate_in_vain(weights: Weights, version: int, timeout: float | None = None) -> None:
    async with weights.mutate(version, timeout):
        raise AssertionError("the body must not run")


async def ranks_of(c: Cluster, group: str, content: int | None = None) -> list[Weights]:
    return [
        await hub.register("m", tensors(content), group=group, rank=r, world_size=2)
        for r, hub in enumerate(c.hubs)
    ]


async def all_call(*calls: Callable[[], Awaitable[object]]) -> None:
    async def call(one: Callable[[], Awaitable[object]]) -> None:
        await one()

    async with anyio.create_task_group() as tasks:
        for each in calls:
            tasks.start_soon(call, each)


# --------------------------------------------------------------------------------------------------
# versions


@provokes(VersionUnavailable)
async def test_a_version_that_there_is_not() -> None:
    async with cluster("trainer", "reader") as c:
        source = await published(c.hubs[0], 1)
        async with source.mutate(3):
            pass
        weights = await c.hubs[1].register("m", tensors())
        with raises(
            VersionUnavailable,
            "version 4 of 'm' is not published yet",
            "wait_for()",
            retryable=True,
        ):
            await weights.replicate(4)
        with raises(
            VersionUnavailable,
            "version 2 of 'm' was never published, or no worker holds it any more; held now: version 3",
            retryable=False,
        ):
            await weights.replicate(2)
        with raises(
            VersionUnavailable,
            "'m' (the newest version is 3)",
            "no live worker holds 'latest-1'",
            retryable=True,
        ):
            await weights.replicate("latest-1", timeout=0.05)
        with raises(
            VersionUnavailable, "no model 'n' is known here; known models: m", retryable=True
        ):
            await c.hubs[1].describe("n")
        assert weights.state == "empty"


@provokes(VersionUnavailable)
async def test_a_version_whose_only_source_leaves_in_mid_read() -> None:
    with gated(2) as gate:
        async with cluster("trainer", "reader") as c:
            source = await published(c.hubs[0])
            weights = await c.hubs[1].register("m", tensors())

            async def replicate() -> None:
                says = (
                    "version 1 of 'm': its last holder has left on purpose",
                    "ask again for a newer version",
                )
                with raises(VersionUnavailable, *says, retryable=True, memory="torn"):
                    await weights.replicate(1)

            async with anyio.create_task_group() as tasks:
                tasks.start_soon(replicate)
                await until(lambda: gate.holds)
                await source.unpublish()
            assert (weights.state, weights.version) == ("torn", None)
            gate.open()
            await source.publish(2)
            assert (await weights.replicate()).version == 2


@provokes(VersionConflict)
async def test_a_number_that_is_used() -> None:
    async with cluster("one", "two") as c:
        source = await published(c.hubs[0], 5)
        await source.unpublish()
        says = (
            "version 5 of 'm' cannot be published: the newest number so far is 5; publish 6 or more"
        )
        with raises(VersionConflict, says, retryable=False):
            await source.publish(5)
        assert source.state == "empty"
        ranks = await ranks_of(c, "g", 1)
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(ranks[0].publish, 6)
            await until(lambda: ranks[0]._handle.member.running is not None)
            await c.hubs[0].describe("m")  # so that the coordinator has heard of it
            with raises(
                VersionConflict,
                "version 6 of 'm' is being published by group 'g'",
                "try again",
                retryable=True,
            ):
                await source.publish(6)
            tasks.cancel_scope.cancel()
        await source.publish(6)  # that one has failed


@provokes(ManifestMismatch)
async def test_tensors_that_are_not_those_of_the_version() -> None:
    async with cluster("trainer", "reader") as c:
        await published(c.hubs[0])
        mine: dict[str, Any] = {
            "a": np.zeros(7, np.uint8),
            "b": np.zeros(4 * CHUNK_BYTES, np.int8),
            "d": np.zeros(1),
        }
        weights = await c.hubs[1].register("m", mine)
        with raises(ManifestMismatch, "difference(s)", retryable=False) as caught:
            await weights.replicate()
        for says in (
            "tensor 'a' has shape (262144,) at the source and (7,) at the reader",
            "tensor 'b' is uint8 at the source and int8 at the reader",
            "tensor 'c' is missing at the reader",
            "tensor 'd' is unknown to the source",
        ):
            assert says in str(caught[0])
            assert says in caught[0].differences
        assert weights.state == "empty"
        assert not mine["b"].any()


async def test_the_advice_of_a_mismatch_leads_to_a_fill() -> None:
    async with cluster("trainer", "reader") as c:
        await published(c.hubs[0])
        mine: dict[str, Any] = {"a": np.zeros(4 * CHUNK_BYTES, np.uint8), "mine": np.full(3, 7.0)}
        with raises(ManifestMismatch, "register(..., partial=True)", retryable=False) as caught:
            await (await c.hubs[1].register("m", mine)).replicate()
        assert "sources={'mine': []}" in str(caught[0])
        with raises(ManifestMismatch, "sources={'mine': []}", retryable=False):
            await (await c.hubs[1].register("m", mine, partial=True)).replicate()
        await (await c.hubs[1].register("m", mine, partial=True, sources={"mine": []})).replicate()
        assert mine["a"].any()
        assert mine["mine"].tolist() == [7.0] * 3


# --------------------------------------------------------------------------------------------------
# registering


@provokes(RegistrationError)
async def test_tensors_that_cannot_be_registered_are_all_named() -> None:
    big = torch.zeros(8)
    faults: dict[str, tuple[Any, str]] = {
        "meta": (
            torch.zeros(2, device="meta"),
            "it is on the meta device and has no bytes; materialize it",
        ),
        "strided": (
            torch.zeros(4, 4).t(),
            "it is not contiguous (shape (4, 4), stride (1, 4)); register `.T` of it",
        ),
    }
    async with cluster("trainer") as c:
        hub = c.hubs[0]
        with raises(
            RegistrationError, f"{len(faults)} tensor(s) cannot be registered", retryable=False
        ) as caught:
            await hub.register(
                "m", {"good": big, **{name: tensor for name, (tensor, _) in faults.items()}}
            )
        lines = str(caught[0]).splitlines()
        for name, (_, says) in faults.items():
            assert any(line.strip().startswith(f"{name!r}: ") and says in line for line in lines), (
                name
            )
        with raises(
            RegistrationError,
            "'x' and 'y'",
            "Register the larger one alone, or copy",
            retryable=False,
        ):
            await hub.register("m", {"x": big[:5], "y": big[3:]})
        with raises(
            RegistrationError,
            "give an nn.Module or a mapping of names to tensors, not builtins.list",
            retryable=False,
        ):
            await hub.register("m", [big])  # type: ignore[arg-type]
        with raises(RegistrationError, "there are none; give at least one", retryable=False):
            await hub.register("m", {})
        assert await hub.describe() == ()


@provokes(RegistrationError)
async def test_tensors_that_were_replaced() -> None:
    async with cluster("trainer") as c:
        mine = {"p": torch.nn.Parameter(torch.zeros(4)), "q": torch.zeros(1)}
        weights = await c.hubs[0].register("m", mine)
        mine["p"].data = torch.ones(4)
        for call in (lambda: weights.publish(1), weights.replicate, weights.update):
            with raises(
                RegistrationError,
                "1 tensor(s) were replaced",
                "'p': its storage",
                "`copy_`",
                retryable=False,
            ):
                await call()
        assert weights.state == "empty"


@provokes(RegistrationError)
async def test_a_rank_that_is_taken() -> None:
    async with cluster("one", "two") as c:
        first = await c.hubs[0].register("m", tensors(), group="g")
        with raises(
            RegistrationError,
            "rank 0 of group 'g' of 'm'",
            "'one', which is connected: close it",
            retryable=True,
        ):
            await c.hubs[1].register("m", tensors(), group="g")
        with raises(
            RegistrationError, "registered by this worker already: close it first", retryable=False
        ):
            await c.hubs[0].register("m", tensors(), group="g")
        with raises(
            RegistrationError,
            "group 'g' of 'm' has 1 ranks, not 2: give every rank",
            retryable=True,
        ):
            await c.hubs[1].register("m", tensors(), group="g", rank=1, world_size=2)
        await first.close()
        await c.hubs[1].register("m", tensors(), group="g")


# -------------------------------------------------------------------------------------------------
# memory that is written


def model() -> dict[str, torch.Tensor]:
    return {name: torch.zeros(CHUNK_BYTES, dtype=torch.uint8) for name in "abcdefgh"}


WRITTEN = (
    "version 1 of 'm'",
    "rank 0) was written while it was published: 'b'.",
    "unpublish() before you write",
    "mutate()",
)


@provokes(MutabilityViolation)
async def test_published_memory_that_is_written_is_told_when_it_is_taken_back() -> None:
    async with cluster("trainer") as c:
        mine = model()
        source = await c.hubs[0].register("m", mine)
        await source.publish(1)
        mine["b"].add_(1)
        with raises(MutabilityViolation, *WRITTEN, retryable=False, memory="torn"):
            await source.unpublish()
        assert (source.state, source.version) == ("empty", None)
        mine["c"].add_(1)  # as it may, now
        await source.publish(2)
        for tensor in mine.values():
            tensor.add_(1)
        says = ("version 2 of 'm'", "published: 'a', 'b', 'c', 'd', 'e' (and 3 more).")
        with raises(MutabilityViolation, *says, retryable=False, memory="torn"):
            await mutate_in_vain(source, 3)
        assert source.state == "empty"
        async with source.mutate(3):
            mine["a"].add_(1)
        await source.unpublish()
        await source.publish(4)
        mine["b"].add_(1)
        with raises(MutabilityViolation, "version 4 of 'm'", retryable=False, memory="torn"):
            await source.close()
        assert source.state == "closed"


@provokes(MutabilityViolation)
async def test_a_filled_memory_that_is_written_is_not_taken_for_its_version() -> None:
    async with cluster("trainer", "reader") as c:
        source, mine = await c.hubs[0].register("m", model()), model()
        await source.publish(1)
        weights = await c.hubs[1].register("m", mine)
        await weights.replicate()
        assert not (await weights.update()).changed  # the library's own writes do not count
        mine["b"].add_(1)
        for _ in range(2):
            with raises(MutabilityViolation, *WRITTEN, retryable=False, memory="torn"):
                await weights.update()
            assert (weights.state, weights.version) == ("ready", 1)
        with raises(MutabilityViolation, *WRITTEN, retryable=False, memory="torn"):
            await weights.unpublish()
        assert (await weights.update()).changed
        assert not mine["b"].any()
        async with source.mutate(2):
            memory_of(source)["b"].add_(2)
        mine["b"].add_(1)
        with raises(MutabilityViolation, *WRITTEN, retryable=False, memory="torn"):
            await weights.update()  # before it does anything
        assert (weights.version, int(mine["b"].sum())) == (1, CHUNK_BYTES)


@provokes(MutabilityViolation)
async def test_a_rank_whose_memory_was_written_ends_its_groups_mutate() -> None:
    async with cluster("one", "two") as c:
        sets = [model(), model()]
        ranks = [
            await hub.register("m", mine, group="g", rank=rank, world_size=2)
            for rank, (hub, mine) in enumerate(zip(c.hubs, sets, strict=True))
        ]
        await all_call(*(lambda rank=rank: rank.publish(1) for rank in ranks))
        sets[1]["b"].add_(1)

        async def good() -> None:
            says = ("rank 1: unpublish() in mutate(2) raised MutabilityViolation", "'b'")
            with raises(GroupAborted, *says, retryable=True):
                async with ranks[0].mutate(2):
                    sets[0]["b"].add_(1)

        async def bad() -> None:
            with raises(MutabilityViolation, "rank 1)", retryable=False, memory="torn"):
                await mutate_in_vain(ranks[1], 2)

        await all_call(good, bad)


# --------------------------------------------------------------------------------------------------
# draining

LARGE = 48 * 2**20  # more than what the sockets' buffers hold
PATIENT = Options(op_timeout_s=WAIT_S, chunk_bytes=2**26, drain_grace_s=WAIT_S)
STAYS = (
    "'m'",
    "version 1 is still being read",
    "it stays published and must not be written",
    "with a longer timeout",
)


@provokes(DrainTimeout)
async def test_memory_that_cannot_be_taken_back_in_time() -> None:
    """The reader holds still in the midst of a chunk; the owner's lane is inside its send call."""
    with gated(0, heeds_cuts=False) as gate:
        async with cluster("trainer", "reader", options=PATIENT) as c:
            mine = np.full(LARGE, 1, np.uint8)
            source = await c.hubs[0].register("m", {"a": mine})
            await source.publish(1)
            copy = np.zeros(LARGE, np.uint8)
            weights = await c.hubs[1].register("m", {"a": copy})
            generations = [generation_of(source)]

            async def replicate() -> None:
                # its source was leaving, as far as it could be seen
                with contextlib.suppress(VersionUnavailable):
                    await weights.replicate()
                await weights.update()

            async with anyio.create_task_group() as tasks:
                tasks.start_soon(replicate)
                await until(lambda: gate.holds and "1 accesses" in repr(handle_of(source)._owner))
                with raises(DrainTimeout, *STAYS, "after 0 s", retryable=True) as caught:
                    await source.unpublish(timeout=0)
                assert isinstance(caught[0], TimeoutError)
                assert (source.state, source.version) == ("ready", 1)
                generations.append(generation_of(source))
                gate.open()  # the memory can be read again, under its new generation
            assert (copy == 1).all()
            assert weights.version == 1
            assert generations[0] != generations[1]
            # The reader may have all of it before the owner's lane knows that its send call is
            # over.
            await until(lambda: "0 accesses" in repr(handle_of(source)._owner))
            await source.unpublish(timeout=0)
            assert source.state == "empty"
            mine[:] = 2
            await source.publish(2)


def generation_of(weights: Weights) -> int:
    content = weights._handle.member.content
    assert content is not None
    return content.generation


@contextlib.contextmanager
def accessed(weights: Weights) -> Iterator[None]:
    """One of the owner's own accesses runs, which no fence can end: as a digest, or a copy off a
    device.
    """
    content = weights._handle.member.content
    assert content is not None
    right = (
        handle_of(weights)._registration,
        content.generation,
        ContentId(content.version.content_id),
    )
    with handle_of(weights)._owner.access(None, *right, [0], 1, 0.0) as access:
        assert isinstance(access, tuple)
        yield


@provokes(DrainTimeout)
async def test_each_call_that_takes_memory_back_leaves_it_published_if_it_cannot() -> None:
    async with cluster("trainer", "reader", "other") as c:
        source = await published(c.hubs[0])
        weights = await c.hubs[1].register("m", tensors())
        await weights.replicate()
        async with source.mutate(2):
            write(memory_of(source), 2)
        with accessed(weights):
            with raises(DrainTimeout, *STAYS, "after 0.2 s", retryable=True):
                await weights.unpublish(timeout=0.2)
            with raises(DrainTimeout, *STAYS, retryable=True):
                await mutate_in_vain(weights, 3, waited_out_s(0.2))
            with raises(DrainTimeout, *STAYS, retryable=True):
                await weights.update(timeout=waited_out_s(0.2))
            assert (weights.state, weights.version) == ("ready", 1)
            await readable(c.hubs[2], 1, 1)
        assert (await weights.update()).version == 2


async def test_a_fence_is_not_tried_for_longer_than_its_call_has_left(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    tried, fence = list[float](), SharedOwner.fence_async

    async def counted(self: SharedOwner, registration: RegistrationId, timeout_s: float) -> None:
        tried.append(timeout_s)
        await fence(self, registration, timeout_s)

    monkeypatch.setattr(SharedOwner, "fence_async", counted)
    async with cluster("trainer") as c:
        source = await published(c.hubs[0])
        with accessed(source), pytest.raises(DrainTimeout):
            await source.unpublish(timeout=0.2)
        assert 0.0 < max(tried) <= 0.2
        await source.unpublish()


@provokes(DrainTimeout)
async def test_a_handle_that_cannot_be_closed_stays_open() -> None:
    quick = Options(op_timeout_s=0.3, chunk_bytes=CHUNK_BYTES)
    async with cluster("reader") as c, connect(c.address, "trainer", quick) as hub:
        source = await published(hub)
        with accessed(source):
            with raises(DrainTimeout, *STAYS, retryable=True):
                await source.close()
            assert (source.state, source.version) == ("ready", 1)
            await readable(c.hubs[0], 1, 1)
        await source.close()
        assert source.state == "closed"


def memory_of(weights: Weights) -> Any:
    """The very tensors that were registered."""
    memory = handle_of(weights).memory
    assert isinstance(memory, RegisteredMemory)
    return memory._given


# --------------------------------------------------------------------------------------------------
# calls


@provokes(StateError)
async def test_calls_that_the_handles_state_forbids() -> None:
    async with cluster("trainer") as c:
        weights = await c.hubs[0].register("m", tensors(1))
        with raises(StateError, "'m'", "is empty: there is nothing to unpublish", retryable=False):
            await weights.unpublish()
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(weights.replicate)
            await until(lambda: weights._handle.member.running is not None)
            with raises(
                StateError,
                "'m' (group",
                "a call is still running on this handle; one call at a time",
                retryable=True,
            ):
                await weights.publish(1)
            tasks.cancel_scope.cancel()
        await weights.publish(1)
        says = ("holds version 1, which is published: unpublish() first, or use mutate()",)
        with raises(StateError, *says, retryable=False):
            await weights.publish(2)
        with raises(StateError, "holds version 1: update() replaces it", retryable=False):
            await weights.replicate()
        with raises(
            StateError,
            "update(staged=True) needs host memory: set Options.host_memory_bytes",
            retryable=False,
        ):
            await weights.update(staged=True)
        assert (weights.state, weights.version) == ("ready", 1)
        await weights.close()
        with raises(StateError, "'m'", "is closed; register again", retryable=False):
            await weights.publish(2)


@provokes(StateError, InvalidType, InvalidValue)
async def test_arguments_and_addresses_that_cannot_be() -> None:
    async with cluster("trainer") as c:
        hub = c.hubs[0]
        with raises(InvalidValue, "-1 is not a version: give an integer", retryable=False):
            await hub.wait_for("m", at_least=-1)
        with raises(InvalidType, "'1' is not a version: give an integer", retryable=False):
            await hub.wait_for("m", at_least="1")  # type: ignore[arg-type]
        with raises(InvalidValue, "timeout=-1: give seconds, 0 or more", retryable=False):
            await hub.wait_for("m", at_least=1, timeout=-1)
        with raises(
            InvalidValue,
            "'http://x' is not a TensorHub address: give \"tcp://HOST:PORT\"",
            retryable=False,
        ):
            async with connect("http://x"):
                pass
        port = parse_address(c.address)[1]
        with raises(
            StateError, f"port {port} of 127.0.0.1 is in use", "choose another port", retryable=True
        ):
            async with tensorhub.serve(port=port, token=""):
                pass
        with raises(
            InvalidValue, "Options.chunk_bytes = 1: give 4096 to 2**30 bytes", retryable=False
        ):
            Options(chunk_bytes=1)


@provokes(OperationTimeout)
async def test_deadlines() -> None:
    with gated(2) as gate:
        async with cluster("trainer", "reader") as c:
            with raises(
                OperationTimeout, "version 3 of 'm' was not published within 0.05 s", retryable=True
            ) as caught:
                await c.hubs[1].wait_for("m", at_least=3, timeout=0.05)
            assert isinstance(caught[0], TimeoutError)
            ranks = await ranks_of(c, "g", 1)
            says = ("waited 0.05 s for group 'g'; these ranks did not call: 1",)
            with raises(OperationTimeout, "publish of 'm'", *says, retryable=True):
                await ranks[0].publish(1, timeout=0.05)
            assert ranks[0].state == "empty"
            await published(c.hubs[0], 2)
            weights = await c.hubs[1].register("m", tensors())
            timeout = waited_out_s()
            says = (f"'m': version 2 was not complete after {timeout:g} s on rank(s) [0]",)
            with raises(OperationTimeout, *says, retryable=True, memory="torn"):
                await weights.replicate(timeout=timeout)
            assert weights.state == "torn"
            gate.open()
            assert (await weights.replicate()).version == 2


@provokes(GroupAborted)
async def test_what_another_rank_does_ends_the_groups_call() -> None:
    async with cluster("one", "two") as c:
        ranks = await ranks_of(c, "g", 1)

        async def good() -> None:
            with raises(
                GroupAborted, "of group 'g' ended on all ranks: rank 1", retryable=True
            ) as caught:
                async with ranks[0].mutate(1):
                    pass
            assert caught[0].causes == {1: "the body of mutate(1) raised ValueError: mine"}

        async def bad() -> None:
            with pytest.raises(ValueError, match="mine"):
                async with ranks[1].mutate(1):
                    raise ValueError("mine")

        await all_call(good, bad)
        assert [rank.state for rank in ranks] == ["empty", "empty"]

        async def differs(rank: Weights, number: int) -> None:
            says = (
                "the ranks of group 'g' made different calls",
                "publish(1) on rank",
                "publish(2) on rank",
            )
            with raises(GroupAborted, *says, retryable=False) as caught:
                await rank.publish(number)
            assert caught[0].causes == {0: "called publish(1)", 1: "called publish(2)"}

        await all_call(lambda: differs(ranks[0], 1), lambda: differs(ranks[1], 2))
        await all_call(lambda: ranks[0].publish(1), lambda: ranks[1].publish(1))


@provokes(GroupAborted)
async def test_a_rank_that_leaves_in_mid_read_tears_the_others() -> None:
    with gated(2) as gate:
        async with cluster("one", "two") as c:
            publishers = await ranks_of(c, "p", 1)
            await all_call(*(lambda rank=rank: rank.publish(1) for rank in publishers))
            hubs = [connect(c.address, name) for name in ("three", "four")]
            async with contextlib.AsyncExitStack() as stack:
                one, two = [await stack.enter_async_context(hub) for hub in hubs]
                first = await one.register("m", tensors(), group="g", rank=0, world_size=2)
                second = await two.register("m", tensors(), group="g", rank=1, world_size=2)

                async def stays() -> None:
                    says = (
                        (
                            "replicate of group 'g' ended on all ranks: rank 1: the call was cancelled "
                            "by its caller"
                        ),
                    )
                    with raises(GroupAborted, *says, retryable=True, memory="torn") as caught:
                        await first.replicate()
                    assert set(caught[0].causes) == {1}

                async with anyio.create_task_group() as tasks:
                    tasks.start_soon(stays)
                    async with anyio.create_task_group() as cancelled:
                        cancelled.start_soon(second.replicate)
                        await until(lambda: [first.state, second.state] == ["filling", "filling"])
                        cancelled.cancel_scope.cancel()
                assert [first.state, second.state] == ["torn", "torn"]
                gate.open()
                await all_call(first.replicate, second.replicate)


@provokes(LeaseLost)
async def test_a_version_that_was_given_up_while_its_holder_was_away() -> None:
    async with restartable() as coordinator, connect(coordinator.address, "trainer") as hub:
        source = await published(hub, 3)
        await coordinator.stop()
        await coordinator.start()
        await until(lambda: source.state == "empty")
        says = (
            "'m'",
            "version 3, which it held, is unknown to the coordinator",
            "write it, and publish a new version",
        )
        with raises(LeaseLost, *says, retryable=False):
            await source.unpublish()
        with raises(StateError, "there is nothing to unpublish", retryable=False):
            await source.unpublish()
        assert (await source.publish(1)).version == 1


@contextlib.asynccontextmanager
async def restartable() -> AsyncIterator[Restartable]:
    async with nothing_left():
        coordinator = Restartable()
        await coordinator.start()
        try:
            yield coordinator
        finally:
            await coordinator.stop()


# --------------------------------------------------------------------------------------------------
# integrity


@provokes(IntegrityError)
async def test_bytes_that_do_not_have_their_digest_at_any_source() -> None:
    """The array is written by a way that nobody counts, after its digests were made for a first
    reader.
    """
    async with cluster("trainer", "first", "second") as c:
        mine = tensors(1)
        source = await c.hubs[0].register("m", mine)
        await source.publish(1)
        first = await c.hubs[1].register("m", tensors())
        await first.replicate()
        await first.close()
        mine["b"][CHUNK_BYTES] ^= 1
        weights = await c.hubs[2].register("m", tensors())
        chunk = CHUNKS // 3 + 1
        says = (
            (
                "replicate of 'm': version 1: every source that rank 0 tried sent bytes that do not "
                "have their digest"
            ),
            (
                f"reads that failed: worker 'trainer': chunk {chunk} does not "
                "have its digest (tensor 'b')"
            ),
            "have it published anew, then call again",
        )
        with raises(IntegrityError, *says, retryable=True, memory="torn"):
            await weights.replicate(timeout=waited_out_s())
        assert (weights.state, weights.version) == ("torn", None)
        spoiled = (
            "version 1 of 'm'",
            f"while it was published: 'b' (chunk {chunk} does not have its digest any more)",
        )
        with raises(MutabilityViolation, *spoiled, retryable=False, memory="torn"):
            await source.unpublish()
        async with source.mutate(2):
            write(mine, 2)
        assert (await weights.replicate()).version == 2
        assert holds(memory_of(weights), 2)


# --------------------------------------------------------------------------------------------------
# connecting


@provokes(AuthenticationFailed)
async def test_secrets_that_differ_and_open_access_beyond_loopback() -> None:
    async with cluster(token="right") as c:
        with raises(AuthenticationFailed, "TENSORHUB_TOKEN", retryable=False) as caught:
            async with connect(c.address, token="wrong"):
                pass
        assert "wrong" not in str(caught[0]).split()
        with raises(
            AuthenticationFailed,
            "open access is for loopback only",
            "TENSORHUB_TOKEN",
            retryable=False,
        ):
            async with tensorhub.serve("0.0.0.0", token=""):
                pass


@provokes(ProtocolError)
async def test_a_server_that_is_no_coordinator() -> None:
    async with nothing_left():
        with socket.create_server(("127.0.0.1", 0)) as listener:

            def answer() -> None:
                with listener.accept()[0] as peer, contextlib.suppress(OSError):
                    peer.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")
                    while peer.recv(65536):
                        pass

            thread = threading.Thread(target=answer)
            thread.start()
            says = ("not a TensorHub peer: its first bytes are b'HTTP/1.1 400", "check the address")
            with raises(ProtocolError, *says, retryable=False):
                async with connect(f"tcp://127.0.0.1:{listener.getsockname()[1]}"):
                    pass
            thread.join()


@provokes(TransportUnavailable)
async def test_a_transport_that_there_is_not() -> None:
    async with cluster() as c:
        with raises(
            TransportUnavailable,
            "there is no transport 'carrier pigeon'; there are cuda_ipc, shm, cma, rdma, nixl, archive, tcp",
            retryable=False,
        ):
            async with tensorhub.connect(c.address, token="", transports=["carrier pigeon"]):
                pass
        with raises(
            TransportUnavailable,
            "no transport is allowed; there are cuda_ipc, shm, cma, rdma, nixl, archive, tcp",
            retryable=False,
        ):
            async with tensorhub.connect(c.address, token="", transports=[]):
                pass


@provokes(CoordinatorUnavailable)
async def test_a_coordinator_that_is_not_there() -> None:
    async with restartable() as coordinator, contextlib.AsyncExitStack() as stack:
        hub, peer = [
            await stack.enter_async_context(connect(coordinator.address, name))
            for name in ("worker", "peer")
        ]
        held, empty = await published(hub), await hub.register("n", tensors())
        ranks = [
            await each.register("g", tensors(1), group="g", rank=r, world_size=2)
            for r, each in enumerate((hub, peer))
        ]

        async def publish() -> None:
            timeout = waited_out_s(2)
            says = f"(group 'g', rank 0): publish: the coordinator could not be reached within {timeout:g} s"
            with raises(CoordinatorUnavailable, says, retryable=True, memory="in_doubt"):
                await ranks[0].publish(1, timeout=timeout)
            assert ranks[0].state == "in_doubt"

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(publish)
            await until(lambda: ranks[0]._handle.member.running is not None)
            await hub.describe("g")  # so that its vote was heard
            await coordinator.stop()
            await until(lambda: "offline" in repr(hub))
            with raises(
                CoordinatorUnavailable,
                "describe",
                "could not be reached within 0.05 s",
                coordinator.address,
                retryable=True,
            ):
                await hub.describe(timeout=0.05)
            with raises(
                CoordinatorUnavailable,
                "version 9 of 'm'",
                "cannot be reached",
                coordinator.address,
                retryable=True,
            ):
                await hub.wait_for("m", at_least=9, timeout=0.05)
            with raises(
                CoordinatorUnavailable,
                "'n'",
                "replicate: the coordinator could not be reached",
                coordinator.address,
                retryable=True,
            ):
                await empty.replicate(timeout=0.05)
            assert empty.state == "empty"
            await held.unpublish(timeout=5)  # needs nobody
            assert held.state == "empty"
        with raises(
            CoordinatorUnavailable,
            "no coordinator can be reached",
            "is one running there?",
            retryable=True,
        ):
            async with connect(coordinator.address):
                pass
        await coordinator.start()
        await until(lambda: ranks[0].state == "empty")  # the doubt is resolved: nobody knows of it


@provokes(OperationTimeout)
async def test_a_before_write_that_is_late() -> None:
    async with cluster("trainer", "reader") as c:
        source = await published(c.hubs[0])
        weights = await c.hubs[1].register("m", tensors())
        await weights.replicate()
        async with source.mutate(2):
            pass
        entered, passed = anyio.Event(), anyio.Event()

        async def late(info: VersionInfo) -> None:
            entered.set()
            await passed.wait()

        async with anyio.create_task_group() as tasks:

            async def update() -> None:
                with raises(OperationTimeout, "update of 'm'", retryable=True):
                    await weights.update(before_write=late, timeout=waited_out_s(0.1))

            tasks.start_soon(update)
            await entered.wait()
            await until(lambda: weights._handle.member.running is None)
            passed.set()
        assert (weights.state, weights.version) == ("ready", 1)


def test_what_another_process_says_of_its_error_is_no_command_to_a_terminal() -> None:
    hostile, shown = "a\x1b[2J\x9b1m\nb\rc\u202e", "a\\x1b[2J\\x9b1m\nb\\rc\\u202e"
    info = ErrorInfo("GroupAborted", hostile, False, ((1, hostile),))
    error = info.error()
    assert isinstance(error, GroupAborted)
    assert (str(error), error.causes) == (shown, {1: shown})
    differ = ErrorInfo("ManifestMismatch", hostile, False, (), (hostile,)).error()
    assert isinstance(differ, ManifestMismatch)
    assert (str(differ), differ.differences) == (shown, (shown,))
