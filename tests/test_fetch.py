"""`hub.fetch`: tensors that nobody registered, over real sockets: what arrives, what is refused,
what is left.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import anyio
import anyio.lowlevel
import pytest
import torch

import tensorhub
from tensorhub import errors
from tensorhub.api.hub import Hub
from tensorhub.api.tools import fetch_into
from tensorhub.api.weights import Weights
from tensorhub.memory.allocated import AllocatedMemory
from tensorhub.memory.regions import MappedRegions
from tensorhub.model.manifest import Manifest
from tensorhub.runtime.worker import fill
from tests.rig import (
    CHUNK_BYTES,
    CHUNKS,
    all_of,
    cluster,
    connect,
    gated,
    ranks_of,
    tensors,
    until,
    worker_of,
)

NBYTES = CHUNKS * CHUNK_BYTES
Tensors = Mapping[str, torch.Tensor]


def layers() -> dict[str, torch.Tensor]:
    tied = torch.arange(60_000.0).view(200, 300)
    return {
        "layers.0.weight": torch.randn(300, 200),
        "layers.0.bias": torch.randn(200),
        "layers.1.weight": torch.randint(0, 255, (1000, 300), dtype=torch.uint8),
        "layers[1]": torch.tensor(7.5),
        "head": tied,
        "embedding": tied,
        "flat": tied.view(-1),
        "empty": torch.empty(0, 4, dtype=torch.int64),
    }


def equal(some: Tensors, other: Tensors) -> bool:
    same = [
        torch.equal(some[name], other[name]) and some[name].dtype is other[name].dtype
        for name in other
    ]
    return list(some) == list(other) and all(same)


async def published(hub: Hub, what: Mapping[str, Any] | None = None, version: int = 1) -> Weights:
    weights = await hub.register("m", layers() if what is None else what)
    await weights.publish(version)
    return weights


async def nothing_of_it_is_left(fetcher: Hub) -> None:
    """Neither the coordinator nor the worker knows of a fetch any more."""
    await until(lambda: worker_of(fetcher).router.is_empty)
    info = await fetcher.describe("m")  # on the connection that the fetch has spoken on
    assert [(replica.group.split("-")[0], replica.state) for replica in info.replicas] == [
        ("trainer", "ready")
    ]
    assert info.leases == ()
    assert [worker.name for worker in info.workers] == ["trainer"]


# --------------------------------------------------------------------------------------------------
# what arrives


async def test_every_tensor_arrives_as_it_was_published() -> None:
    async with cluster("trainer", "reader") as c:
        source = layers()
        await published(c.hubs[0], source, 3)
        fetched = await c.hubs[1].fetch("m")
        assert equal(fetched, source)
        assert len(fetched) == len(source)
        assert (fetched.info.version, fetched.info.model, fetched.info.world_size) == (3, "m", 1)
        report = fetched.report
        assert (report.version, report.changed, report.bytes_read, report.reread_bytes) == (
            3,
            True,
            fetched.info.nbytes,
            0,
        )
        assert [(used.name, used.outcome) for used in report.sources] == [("trainer", "used")]
        assert repr(fetched) == "<Fetched m version 3: 8 tensors>"
        await nothing_of_it_is_left(c.hubs[1])


async def test_what_is_fetched_is_the_callers_and_ties_stay_ties() -> None:
    async with cluster("trainer", "reader") as c:
        source = layers()
        await published(c.hubs[0], source)
        fetched = await c.hubs[1].fetch("m")
        fetched["head"].fill_(1)
        assert fetched["embedding"].eq(1).all()
        assert fetched["flat"].eq(1).all()
        assert (
            fetched["head"].untyped_storage().data_ptr()
            == fetched["flat"].untyped_storage().data_ptr()
        )
        assert not fetched["head"]._is_view()
        assert all(
            tensor.is_contiguous() and not tensor.requires_grad for tensor in fetched.values()
        )
        assert equal(await c.hubs[1].fetch("m"), source)


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        ("layers.0.bias", ["layers.0.bias"]),
        ("layers.0.*", ["layers.0.weight", "layers.0.bias"]),
        (["*.bias", "layers.1.*"], ["layers.0.bias", "layers.1.weight"]),
        ("layers[1]", ["layers[1]"]),  # a name that looks like a glob is a name
        (("embedding",), ["embedding"]),
        (["empty", "empty"], ["empty"]),
        ("*", list(layers())),
    ],
)
async def test_names(names: Any, expected: list[str]) -> None:
    async with cluster("trainer", "reader") as c:
        source = layers()
        await published(c.hubs[0], source)
        fetched = await c.hubs[1].fetch("m", 1, names=names)
        assert equal(fetched, {name: source[name] for name in expected})
        storages = {
            tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes()
            for tensor in fetched.values()
        }
        assert fetched.report.bytes_read == sum(storages.values())  # what is not wanted is not read


async def test_progress_counts_what_is_wanted() -> None:
    async with cluster("trainer", "reader") as c:
        await published(c.hubs[0], tensors(1))
        memory, seen = AllocatedMemory("b"), list[tuple[int, int]]()
        info, report = await fetch_into(
            c.hubs[1], "m", 1, memory, progress=lambda *now: seen.append(now)
        )
        assert (info.version, report.bytes_read) == (1, NBYTES // 3)
        assert seen[-1] == (NBYTES // 3, NBYTES // 3)
        assert torch.equal(memory.tensors()["b"], torch.from_numpy(tensors(1)["b"]))
        assert repr(memory) == "<AllocatedMemory of 1 tensors on cpu>"


async def test_a_progress_listener_that_raises_ends_nothing() -> None:
    async with cluster("trainer", "reader") as c:
        await published(c.hubs[0], tensors(1))

        def broken(done: int, wanted: int) -> None:
            raise ZeroDivisionError

        await fetch_into(c.hubs[1], "m", 1, AllocatedMemory(), progress=broken)
        await c.hubs[1].fetch("m")


async def test_the_ranks_of_a_version_are_fetched_one_by_one() -> None:
    async with cluster("trainer", "other", "reader") as c:
        sources = [{"w": torch.full((1000 + rank,), float(rank))} for rank in range(2)]
        ranks = await ranks_of(c.hubs, sources, "g")
        await all_of(*(weights.publish(1) for weights in ranks))
        for rank in (1, 0, 1):  # the reader knows both manifests by then
            fetched = await c.hubs[2].fetch("m", rank=rank)
            assert equal(fetched, sources[rank])
            assert fetched.info.world_size == 2
            assert [source.name for source in fetched.report.sources] == [
                ("trainer", "other")[rank]
            ]
        with pytest.raises(
            errors.ManifestMismatch, match=r"has no rank 2: its world_size is 2, so fetch .* 0 to 1"
        ) as caught:
            await c.hubs[2].fetch("m", rank=2)
        assert (caught.value.retryable, caught.value.memory) == (False, "intact")


async def test_a_worker_fetches_what_it_holds_itself() -> None:
    async with cluster("trainer") as c:
        source = layers()
        await published(c.hubs[0], source)
        fetched = await c.hubs[0].fetch("m")
        assert equal(fetched, source)
        assert fetched["head"].data_ptr() != source["head"].data_ptr()


# --------------------------------------------------------------------------------------------------
# versions


async def test_a_number_that_is_not_visible_fails_at_once_and_latest_at_the_deadline() -> None:
    async with cluster("trainer", "reader") as c:
        await published(c.hubs[0])
        with pytest.raises(
            errors.VersionUnavailable, match="version 2 of 'm' is not published yet"
        ):
            await c.hubs[1].fetch("m", 2)
        with pytest.raises(
            errors.VersionUnavailable,
            match="fetch of 'x': nothing was published under the model 'x'",
        ):
            await c.hubs[1].fetch("x", timeout=0.05)
        await nothing_of_it_is_left(c.hubs[1])


# -------------------------------------------------------------------------------------------------
# what is refused


@pytest.mark.parametrize(
    ("settings", "match"),
    [
        ({"names": []}, r"names=\[\]: give a name, a glob"),
        ({"names": ["w", 7]}, "names="),
        ({"rank": -1}, "rank=-1"),
        ({"rank": True}, "rank=True"),
        ({"rank": 2**20}, "ranks are integers"),
        ({"selector": "newest"}, "is not a version selector"),
        ({"selector": "7"}, "a number is an integer here, not text"),
        ({"timeout": -1}, "timeout=-1"),
        ({"model": ""}, "cannot name a model"),
        ({"device": "nowhere"}, "device='nowhere' cannot be used: Expected one of cpu"),
        ({"device": "meta"}, "device='meta': there are no bytes there"),
        ({"device": "mps"}, "device='mps' cannot be used"),
    ],
)
async def test_bad_arguments_are_refused_before_anything_is_sent(
    settings: dict[str, Any], match: str
) -> None:
    async with cluster("reader") as c:
        with pytest.raises(errors.StateError, match=match) as caught:
            await c.hubs[0].fetch(**{"model": "m", **settings})
        assert (caught.value.retryable, caught.value.memory) == (False, "intact")
        assert await c.hubs[0].describe() == ()


async def test_without_torch_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> Any:
        raise ModuleNotFoundError(name)

    monkeypatch.setattr(importlib, "import_module", missing)
    async with cluster("reader") as c:
        with pytest.raises(errors.StateError, match=r"pip install 'tensorhub-ros\[torch\]'"):
            await c.hubs[0].fetch("m")


async def test_a_name_that_no_tensor_has_is_named() -> None:
    async with cluster("trainer", "reader") as c:
        await published(c.hubs[0])
        match = (
            r"no tensor is called 'layer\.\*'; there are 'layers.0.weight', 'layers.0.bias', "
            r".* \(and \d+ more\)"
        )
        with pytest.raises(errors.ManifestMismatch, match=match) as caught:
            await c.hubs[1].fetch("m", names=["head", "layer.*"])
        assert (caught.value.retryable, caught.value.memory) == (False, "intact")
        assert len(caught.value.differences) == 1
        await nothing_of_it_is_left(c.hubs[1])


async def test_a_dtype_that_this_torch_lacks_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    async with cluster("trainer", "reader") as c:
        await published(c.hubs[0], {"w": torch.zeros(4, dtype=torch.uint16)})
        memory = AllocatedMemory()
        monkeypatch.delattr(torch, "uint16")
        with pytest.raises(
            errors.ManifestMismatch, match=r"'w' is uint16, which torch .* lacks"
        ) as caught:
            await fetch_into(c.hubs[1], "m", "latest", memory)
        assert caught.value.memory == "intact"


async def test_memory_that_cannot_be_had_is_an_error_that_says_how_much(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with cluster("trainer", "reader") as c:
        await published(c.hubs[0], {"w": torch.zeros(4)})

        def no_memory(self: AllocatedMemory, nbytes: int) -> torch.Tensor:
            return torch.empty(2**50)

        monkeypatch.setattr(AllocatedMemory, "_allocate", no_memory)
        with pytest.raises(
            errors.StateError,
            match=r"16 bytes of host memory cannot be allocated \(.*\): free some",
        ) as caught:
            await c.hubs[1].fetch("m")
        assert (caught.value.retryable, caught.value.memory) == (False, "intact")
        await nothing_of_it_is_left(c.hubs[1])


class Elsewhere(AllocatedMemory):
    """As if the tensors belonged on a device, which the test's `then` stands for."""

    def __init__(self, then: Callable[[], None]) -> None:
        super().__init__()
        self._then = then

    def map(self, manifest: Manifest) -> MappedRegions:
        return replace(super().map(manifest), then=self._then)


async def test_what_cannot_be_brought_to_its_device_is_an_error() -> None:
    async with cluster("trainer", "reader") as c:
        source = layers()
        await published(c.hubs[0], source)
        memory = Elsewhere(lambda: memory._move())
        _, report = await fetch_into(c.hubs[1], "m", 1, memory)
        assert equal(memory.tensors(), source)
        assert report.phases["unpack"] > 0

        def fail() -> None:
            raise errors.StateError("the device is full")

        with pytest.raises(errors.StateError, match="the device is full") as caught:
            await fetch_into(c.hubs[1], "m", 1, Elsewhere(fail))
        assert caught.value.memory == "intact"


@pytest.mark.gpu
async def test_tensors_on_a_gpu() -> None:
    async with cluster("trainer", "reader") as c:
        source = layers()
        await published(c.hubs[0], source)
        fetched = await c.hubs[1].fetch("m", device="cuda")
        assert all(tensor.is_cuda for tensor in fetched.values())
        assert equal({name: tensor.cpu() for name, tensor in fetched.items()}, source)
        assert (
            fetched["head"].untyped_storage().data_ptr()
            == fetched["flat"].untyped_storage().data_ptr()
        )


# --------------------------------------------------------------------------------------------------
# failures


class Fetching:
    """A fetch that is held at a gate."""

    def __init__(self) -> None:
        self.result: tensorhub.Fetched | None = None
        self.error: errors.TensorHubError | None = None

    async def run(
        self, hub: Hub, names: str | None = "[ab]", selector: int | str = "latest"
    ) -> None:
        try:
            self.result = await hub.fetch("m", selector, names=names)
        except errors.TensorHubError as error:
            self.error = error

    def is_whole(self) -> bool:
        expected = {
            name: torch.from_numpy(array) for name, array in tensors(1).items() if name != "c"
        }
        return self.result is not None and equal(self.result, expected)


async def test_it_is_moved_when_the_source_leaves() -> None:
    async with cluster("trainer", "keeper") as c:
        source = await published(c.hubs[0], tensors(1))
        keeper = await c.hubs[1].register("m", tensors())
        await keeper.replicate()
        with gated(2) as gate:
            async with connect(c.address, "fetcher") as fetcher, anyio.create_task_group() as tasks:
                fetching = Fetching()
                tasks.start_soon(fetching.run, fetcher)
                await until(lambda: gate.holds)
                (lease,) = (await fetcher.describe("m")).leases
                assert (lease.reader, lease.version, lease.rank) == ("fetcher", 1, 0)
                leaving, other = (
                    (keeper, "trainer") if lease.source == "keeper" else (source, "keeper")
                )
                await leaving.unpublish()
                gate.open()
                await until(lambda: fetching.result is not None)
                assert fetching.result is not None
                report = fetching.result.report
                assert fetching.is_whole()
                assert {(used.name, used.outcome) for used in report.sources} >= {(other, "used")}
                assert report.reread_bytes == 0


async def test_a_source_that_leaves_with_nobody_else_there_ends_it_at_once() -> None:
    with gated(2) as gate:
        async with cluster("trainer", "reader") as c, anyio.create_task_group() as tasks:
            # more than the sockets hold
            source = await published(c.hubs[0], {"a": torch.zeros(2**25)})
            fetching = Fetching()
            # by number: "latest" waits for a newer version
            tasks.start_soon(fetching.run, c.hubs[1], "[ab]", 1)
            await until(lambda: gate.holds)
            await source.unpublish()
            await until(lambda: fetching.error is not None)
            assert isinstance(fetching.error, errors.VersionUnavailable)
            assert (fetching.error.retryable, fetching.error.memory) == (True, "intact")
            await until(lambda: not worker_of(c.hubs[1]).router.handles)


async def test_cancelled_in_mid_fetch_nothing_is_left() -> None:
    with gated(2) as gate:
        async with cluster("trainer", "reader") as c:
            await published(c.hubs[0], tensors(1))
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(Fetching().run, c.hubs[1])
                await until(lambda: gate.holds)
                tasks.cancel_scope.cancel()
            assert not gate.holds
            await nothing_of_it_is_left(c.hubs[1])
            gate.open()
            await c.hubs[1].fetch("m")


async def test_what_has_arrived_is_noted_when_a_fetch_is_broken_off(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A later process goes on with it, also if the fetch ends before it has told its progress
    once.
    """
    monkeypatch.setattr(fill, "PROGRESS_S", 1000.0)
    noted = list[int]()

    class Noting(AllocatedMemory):
        def note(self, digests: Sequence[int | None]) -> None:
            noted.append(sum(digest is not None for digest in digests))

    async with cluster("trainer") as c:
        await (await c.hubs[0].register("m", tensors(1))).publish(1)
        with gated(2) as gate:
            async with connect(c.address, "reader") as hub, anyio.create_task_group() as tasks:
                tasks.start_soon(fetch_into, hub, "m", 1, Noting())
                await until(lambda: gate.holds)
                tasks.cancel_scope.cancel()
    assert noted
    assert noted[-1] > 0
