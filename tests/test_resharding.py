"""Trainers cut by rows, rollouts cut for tensor parallelism, with fused and padded tensors: over
sockets, by whole clusters.

What a reader ends up with is compared with the whole tensors, cut and joined by numpy.
"""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import anyio
import numpy as np
import numpy.typing as npt
import pytest
from safetensors.numpy import save_file

import tensorhub
from tensorhub.api.hub import Hub
from tensorhub.api.tools import register_memory
from tensorhub.api.weights import Weights
from tensorhub.errors import IntegrityError, ManifestMismatch, TensorHubError, VersionUnavailable
from tensorhub.memory.files import FileMemory
from tensorhub.types import FetchReport, Options, VersionInfo
from tests.rig import OPTIONS, Cluster, all_of, cluster, gated, until
from tests.test_coordinator_restart import cluster as restartable

pytestmark = pytest.mark.anyio

Array = npt.NDArray[np.float32]
Tensors = dict[str, Array]

TRAINERS, ROLLOUTS = 4, 2
PAD = -7.0
SHAPES = {
    "embed": (101, 128),  # neither 4 nor 2 divides it
    "q": (96, 128),
    "k": (32, 128),
    "v": (32, 128),
    "o": (128, 96),
    "gate": (256, 128),
    "up": (256, 128),
    "down": (128, 256),
    "norm": (3,),  # one rank has nothing of it
}


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


def whole(content: int) -> Tensors:
    """The model, with bytes that depend on `content`."""
    made = np.random.default_rng(content)
    return {name: made.standard_normal(shape, np.float32) for name, shape in SHAPES.items()}


# -- the trainer: rows, as `torch.chunk` cuts them


def rows(name: str, rank: int) -> slice:
    size = SHAPES[name][0]
    each = -(-size // TRAINERS)
    return slice(min(size, rank * each), min(size, (rank + 1) * each))


def shard(content: int, rank: int) -> Tensors:
    return {name: tensor[rows(name, rank)].copy() for name, tensor in whole(content).items()}


async def trainer(
    hubs: Sequence[Hub], content: int, group: str = "trainer"
) -> tuple[list[Weights], list[Tensors]]:
    """A rank on each of these workers, in turn."""
    memory = [shard(content, rank) for rank in range(TRAINERS)]

    async def register(rank: int) -> Weights:
        sources = {
            name: tensorhub.source(name, shape=shape)[rows(name, rank)]
            for name, shape in SHAPES.items()
        }
        hub = hubs[rank % len(hubs)]
        return await hub.register(
            "m", memory[rank], group=group, rank=rank, world_size=TRAINERS, sources=sources
        )

    return [await register(rank) for rank in range(TRAINERS)], memory


def is_published(memory: Sequence[Tensors], content: int) -> bool:
    return all(
        np.array_equal(mine[name], tensor)
        for rank, mine in enumerate(memory)
        for name, tensor in shard(content, rank).items()
    )


async def new_version(
    weights: Sequence[Weights], memory: Sequence[Tensors], rank: int, content: int
) -> None:
    async with weights[rank].mutate(content):
        for name, tensor in shard(content, rank).items():
            memory[rank][name][...] = tensor


# -- the rollout


def part(name: str, rank: int, dimension: int = 0) -> tuple[slice, ...]:
    each = SHAPES[name][dimension] // ROLLOUTS
    mine = slice(rank * each, (rank + 1) * each)
    return (mine,) if dimension == 0 else (slice(None), mine)


def engine(rank: int) -> tuple[Tensors, dict[str, object]]:
    """Its tensors, and what they are made of."""
    views = {name: tensorhub.source(name) for name in SHAPES}
    sources: dict[str, object] = {
        "norm": views["norm"],
        # tiny, so that it shares a region with the one before
        "padded": [(tensorhub.at[1:4], views["norm"])],
        "qkv": [views[name][part(name, rank)] for name in "qkv"],
        "o": views["o"][part("o", rank, 1)],
        "gate_up": [views[name][part(name, rank)] for name in ("gate", "up")],
        "down": views["down"][part("down", rank, 1)],
        "embed": [(tensorhub.at[: 51 - rank, :128], views["embed"][51 * rank : 51 + 50 * rank])],
    }
    shapes = {
        "norm": (3,),
        "padded": (5,),
        "qkv": (80, 128),
        "o": (128, 48),
        "gate_up": (256, 128),
        "down": (128, 128),
        "embed": (51, 130),
    }
    return {name: np.full(shape, PAD, np.float32) for name, shape in shapes.items()}, sources


def expected(content: int, rank: int) -> Tensors:
    full = whole(content)
    embed = np.full((51, 130), PAD, np.float32)
    embed[: 51 - rank, :128] = full["embed"][51 * rank : 51 + 50 * rank]
    return {
        "norm": full["norm"],
        "padded": np.array([PAD, *full["norm"], PAD], np.float32),
        "qkv": np.concatenate([full[name][part(name, rank)] for name in "qkv"]),
        "o": full["o"][part("o", rank, 1)],
        "gate_up": np.concatenate([full[name][part(name, rank)] for name in ("gate", "up")]),
        "down": full["down"][part("down", rank, 1)],
        "embed": embed,
    }


def is_held(memory: Sequence[Tensors], content: int) -> bool:
    return all(
        np.array_equal(mine[name], tensor)
        for rank, mine in enumerate(memory)
        for name, tensor in expected(content, rank).items()
    )


async def rollout(hubs: Sequence[Hub], group: str) -> tuple[list[Weights], list[Tensors]]:
    """A rank on each of these workers, in turn."""
    made = [engine(rank) for rank in range(ROLLOUTS)]
    weights = [
        await hubs[rank % len(hubs)].register(
            "m", tensors, sources=sources, group=group, rank=rank, world_size=ROLLOUTS
        )
        for rank, (tensors, sources) in enumerate(made)
    ]
    return weights, [tensors for tensors, _ in made]


@asynccontextmanager
async def world(
    *readers: str, options: Options = OPTIONS, transport: str = "tcp"
) -> AsyncIterator[tuple[Cluster, list[Weights], list[Tensors]]]:
    """A published trainer on two workers, and workers for readers behind those."""
    async with cluster(
        "trainer-0", "trainer-1", *readers, transports=[transport], options=options
    ) as c:
        weights, memory = await trainer(c.hubs[:2], 1)
        await all_of(*(each.publish(1) for each in weights))
        yield c, weights, memory


def read_from(reports: Sequence[FetchReport]) -> set[str]:
    return {source.name for report in reports for source in report.sources if source.bytes_read}


async def test_rows_become_columns_and_fused_tensors_and_the_next_version_too(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level("INFO", "tensorhub.worker")
    async with world("one", "two") as (c, trained, memory):
        weights, mine = await rollout(c.hubs[2:], "rollout")
        reports = await all_of(*(each.replicate() for each in weights))
        assert is_held(mine, 1)
        assert read_from(reports) == {"trainer-0", "trainer-1"}
        sizes = [
            sum(tensor.nbytes for tensor in expected(1, rank).values()) for rank in range(ROLLOUTS)
        ]
        padding = [4 * (2 + 51 * 2 + 128 * rank) for rank in range(ROLLOUTS)]
        assert [report.bytes_read for report in reports] == [
            size - pad for size, pad in zip(sizes, padding, strict=True)
        ]

        await all_of(*(new_version(trained, memory, rank, 2) for rank in range(TRAINERS)))
        reports = await all_of(*(each.update(2) for each in weights))
        assert is_held(mine, 2)
        assert [report.version for report in reports] == [2, 2]
        planned = [each for each in caplog.messages if "event='reading_planned'" in each]
        assert len(planned) == ROLLOUTS  # and not again for the second version
        assert all("shards=4 " in each for each in planned)


async def test_of_a_version_that_only_a_rollout_holds_its_own_layout_is_read_and_no_other() -> None:
    async with world("one", "two", "three") as (c, trained, _):
        first, _ = await rollout(c.hubs[2:3], "first")
        await all_of(*(each.replicate() for each in first))
        await all_of(*(each.unpublish() for each in trained))
        third: Mapping[str, Array] = {
            name: np.zeros(shape, np.float32) for name, shape in SHAPES.items()
        }
        weights = await c.hubs[3].register("m", third)
        for selector, seconds in ((1, 60.0), ("latest", 0.2)):
            with pytest.raises(
                VersionUnavailable,
                match=r"held in other layouts only .*of group 'first'.*tensorhub seed",
            ):
                await weights.replicate(selector, timeout=seconds)
        second, theirs = await rollout(c.hubs[4:], "second")
        reports = await all_of(*(each.replicate(1) for each in second))
        assert is_held(theirs, 1)
        assert read_from(reports) == {"one"}


async def replicas(c: Cluster) -> list[tuple[list[Weights], list[Tensors]]]:
    """Replicas in the trainer's layout on all workers but the first, where the trainer was, and the
    last.
    """
    trained, _ = await trainer(c.hubs[:1], 1)
    await all_of(*(each.publish(1) for each in trained))
    held = []
    for number, hub in enumerate(c.hubs[1:-1]):
        ranks, memory = await trainer([hub], 0, f"replica-{number}")
        await all_of(*(each.replicate() for each in ranks))
        held.append((ranks, memory))
    await all_of(*(each.close() for each in trained))
    return held


@pytest.mark.parametrize("is_there", [True, False])
async def test_a_report_says_whose_digests_the_bytes_have(is_there: bool) -> None:
    async with cluster("trainer", "replica", "reader", transports=["tcp"], options=OPTIONS) as c:
        if is_there:
            trained, _ = await trainer(c.hubs[:1], 1)
            await all_of(*(each.publish(1) for each in trained))
        else:
            await replicas(c)
        ranks, mine = await rollout(c.hubs[-1:], "rollout")
        reports = await all_of(*(each.replicate(1) for each in ranks))
        assert is_held(mine, 1)
        assert {report.verified_by for report in reports} == {"publisher" if is_there else "source"}
        reports = await all_of(*(each.update(1) for each in ranks))
        assert {(report.changed, report.verified_by) for report in reports} == {
            (False, "publisher" if is_there else "source")
        }


async def test_a_publisher_that_goes_before_it_has_told_digests_is_made_up_for() -> None:
    with gated(2) as gate:
        async with cluster(
            "trainer", "replica", "reader", transports=["tcp"], options=OPTIONS
        ) as c:
            trained, _ = await trainer(c.hubs[:1], 1)
            await all_of(*(each.publish(1) for each in trained))
            gate.open()
            copies, _ = await trainer(c.hubs[1:2], 0, "replica")
            await all_of(*(each.replicate() for each in copies))
            gate.close(2)
            ranks, mine = await rollout(c.hubs[-1:], "rollout")
            async with anyio.create_task_group() as tasks:
                for each in ranks:
                    tasks.start_soon(each.replicate)
                await until(lambda: gate.holds)
                await all_of(*(each.close() for each in trained))
                gate.open()
            assert is_held(mine, 1)
            assert [each.state for each in ranks] == ["ready"] * ROLLOUTS


async def test_what_is_not_there_is_said_with_everything_that_is_wrong() -> None:
    async with world("one") as (c, _, _):
        mine = {
            "q": np.zeros((96, 128), np.float64),
            "norm": np.zeros(3, np.float32),
            "other": np.zeros(3, np.float32),
        }
        weights = await c.hubs[2].register("m", mine, partial=True)
        with pytest.raises(ManifestMismatch) as caught:
            await weights.replicate()
        text = str(caught.value)
        assert "'q' is float32 (96, 128) at the source and float64 (96, 128) at the reader" in text
        assert "publish a copy in the reader's dtype" in text
        assert "tensor 'other' is unknown to the source" in text


async def test_what_is_left_unread_is_named_unless_that_is_wanted() -> None:
    async with world("one") as (c, _, _):
        with pytest.raises(ManifestMismatch, match=r"'embed'.*is read by no rank"):
            await (await c.hubs[2].register("m", {"norm": np.zeros(3, np.float32)})).replicate()
        mine = {"norm": np.zeros(3, np.float32)}
        weights = await c.hubs[2].register("m", mine, partial=True)
        report = await weights.replicate()
        assert np.array_equal(mine["norm"], whole(1)["norm"])
        assert report.bytes_read == 12


async def test_what_no_rank_of_a_group_reads_is_named_to_all_and_nothing_is_overwritten() -> None:
    """The next version has more than the one before: the group keeps that one, and goes on serving
    it.
    """
    async with world("one", "two") as (c, trained, _):
        weights, mine = await rollout(c.hubs[2:], "rollout")
        await all_of(*(each.replicate() for each in weights))
        for each in trained:
            await each.close(abandon=True)
        full = whole(2) | {"new": np.ones((4, 3), np.float32)}
        larger = await c.hubs[0].register("m", full)
        await larger.publish(2)
        paused = []

        async def before_write(info: VersionInfo) -> None:
            paused.append(info.version)

        async def fails(each: Weights) -> None:
            with pytest.raises(ManifestMismatch, match="partial=True") as caught:
                await each.update(2, before_write=before_write)
            assert caught.value.differences == (
                "tensor 'new' (48 bytes) is read by no rank of the group",
            )
            assert caught.value.memory == "intact"

        await all_of(*(fails(each) for each in weights))
        assert paused == [2] * ROLLOUTS
        assert [(each.state, each.version) for each in weights] == [("ready", 1)] * ROLLOUTS
        assert is_held(mine, 1)
        second, theirs = await rollout(c.hubs[2:], "second")
        await all_of(*(each.replicate(1) for each in second))
        assert is_held(theirs, 1)


async def test_a_fetch_puts_the_whole_model_together() -> None:
    async with world("one", "two") as (c, _, _):
        full = whole(1)
        fetched, some = await all_of(
            c.hubs[2].fetch("m", rank=None), c.hubs[3].fetch("m", rank=None, names=["q", "*n*"])
        )
        assert fetched.keys() == SHAPES.keys()
        assert all(np.array_equal(fetched[name].numpy(), full[name]) for name in SHAPES)
        assert some.keys() == {"q", "norm", "down"}
        assert all(np.array_equal(tensor.numpy(), full[name]) for name, tensor in some.items())
        assert some.report.bytes_read == sum(full[name].nbytes for name in some)
        part = await c.hubs[2].fetch("m", rank=1, names="q")
        assert np.array_equal(part["q"].numpy(), full["q"][rows("q", 1)])


async def test_the_whole_model_of_one_rank_has_the_published_tensors_and_not_the_ranks_own() -> (
    None
):
    full = whole(1)
    kv = np.concatenate([full["k"], full["v"]])
    sources = {"kv": [tensorhub.source(name, shape=SHAPES[name]) for name in "kv"]}
    async with cluster("trainer", "reader", transports=["tcp"]) as c:
        trainer = await c.hubs[0].register("m", {"kv": kv, "q": full["q"]}, sources=sources)
        await trainer.publish(1)
        fetched = await c.hubs[1].fetch("m", rank=None)
        assert fetched.keys() == {"k", "v", "q"}
        assert all(np.array_equal(tensor.numpy(), full[name]) for name, tensor in fetched.items())
        assert (await c.hubs[1].fetch("m", rank=0)).keys() == {"kv", "q"}


async def test_of_the_whole_model_those_tensors_that_are_described_can_be_fetched() -> None:
    """The publisher has said of `w` what its ranks hold, and not of the buffer `freq`."""
    async with cluster("trainer", "reader", transports=["tcp"]) as c:
        full = np.arange(8, dtype=np.float32)
        ranks = []
        for rank in range(2):
            tensors = {"freq": np.zeros(3, np.float32), "w": full[4 * rank : 4 * rank + 4].copy()}
            sources = {"w": tensorhub.source("w", shape=(8,))[4 * rank : 4 * rank + 4]}
            ranks.append(
                await c.hubs[0].register(
                    "m", tensors, sources=sources, group="t", rank=rank, world_size=2
                )
            )
        await all_of(*(each.publish(1) for each in ranks))
        fetched = await c.hubs[1].fetch("m", rank=None, names="w")
        assert fetched.keys() == {"w"}
        assert np.array_equal(fetched["w"].numpy(), full)
        for names in (None, ["w", "f*"]):
            with pytest.raises(
                ManifestMismatch, match=r"tensor 'freq' is plain and local.*others only \(names=\)"
            ):
                await c.hubs[1].fetch("m", rank=None, names=names)


async def test_which_plain_tensor_without_elements_is_the_whole_one_is_not_guessed() -> None:
    async with cluster("trainer", "reader", transports=["tcp"]) as c:
        ranks = []
        for rank in range(2):
            tensors = {"w": np.ones(1, np.uint8), "plain": np.zeros((rank, 0), np.uint8)}
            sources = {"w": tensorhub.source("w", shape=(2,))[rank : rank + 1]}
            ranks.append(
                await c.hubs[0].register(
                    "m", tensors, sources=sources, group="t", rank=rank, world_size=2
                )
            )
        await all_of(*(each.publish(1) for each in ranks))
        with pytest.raises(ManifestMismatch, match=r"tensor 'plain' is plain and local"):
            await c.hubs[1].fetch("m", rank=None)
        assert (await c.hubs[1].fetch("m", rank=None, names="w")).keys() == {"w"}
        assert tuple((await c.hubs[1].fetch("m", rank=1))["plain"].shape) == (1, 0)


@pytest.mark.parametrize("is_read_before", [False, True])
async def test_a_published_file_that_is_made_shorter_costs_its_readers_an_error(
    tmp_path: Path, is_read_before: bool
) -> None:
    """And its publisher nothing: whoever touched the mapping would be ended by SIGBUS."""
    path = tmp_path / "m.safetensors"
    save_file(whole(1), path)
    with FileMemory(path) as memory:
        async with cluster("files", "one", transports=["tcp"]) as c:
            await (await register_memory(c.hubs[0], "m", memory)).publish(1)
            if is_read_before:  # so that digests are known
                first, _ = await rollout(c.hubs[1:], "first")
                await all_of(*(each.replicate() for each in first))
                await all_of(*(each.close(abandon=True) for each in first))
            os.truncate(path, 100)
            second, _ = await rollout(c.hubs[1:], "second")

            async def fails(each: Weights) -> None:
                with pytest.raises(TensorHubError):
                    await each.replicate(timeout=1)

            await all_of(*(fails(each) for each in second))


@pytest.mark.parametrize("gone", [1, 2])
async def test_after_a_restart_a_new_reader_of_another_layout_reads_from_holders_of_its_own_layout(
    tmp_path: Path, gone: int
) -> None:
    """Some ranks of the trainer have gone, or all of them. The coordinator's state says what was
    published where.
    """
    async with restartable("trainer", "second", "one", "late", state_dir=tmp_path) as (
        coordinator,
        hubs,
    ):
        trained, _ = await trainer(hubs[:2], 1)
        await all_of(*(each.publish(1) for each in trained))
        first, mine = await rollout(hubs[2:3], "rollout")
        await all_of(*(each.replicate() for each in first))
        for hub in hubs[:gone]:
            await hub.close()
        await coordinator.restart(*hubs[gone:])
        second, theirs = await rollout(hubs[3:], "late")
        reports = await all_of(*(each.replicate(1) for each in second))
        assert is_held(theirs, 1)
        assert is_held(mine, 1)
        assert read_from(reports) == {"one"}


async def halves(hubs: Sequence[Hub], group: str, content: int, ranks: int) -> list[Weights]:
    """Ranks that have one half of the rows each, in turn: replicas of one another, as of HSDP, if
    there are more than 2.
    """
    made = []
    for rank in range(ranks):
        cuts = {
            name: slice(*((0, -(-n // 2)) if rank % 2 == 0 else (-(-n // 2), n)))
            for name, (n, *_) in SHAPES.items()
        }
        memory = {name: tensor[cuts[name]].copy() for name, tensor in whole(content).items()}
        sources = {
            name: tensorhub.source(name, shape=shape)[cuts[name]] for name, shape in SHAPES.items()
        }
        hub = hubs[rank // 2 % len(hubs)]
        made.append(
            await hub.register(
                "m", memory, group=group, rank=rank, world_size=ranks, sources=sources
            )
        )
    return made


async def test_replicas_of_hsdp_that_have_drifted_apart_are_named() -> None:
    """The gate: else a reader might have everything before that is known, all of it from equal
    ranks.
    """
    with gated(1) as gate:
        async with cluster("trainer", "reader", transports=["tcp"]) as c:
            full = np.arange(64 * 128, dtype=np.float32).reshape(64, 128)
            halves = [slice(0, 32), slice(32, 64)] * 2
            memory = [full[half].copy() for half in halves]
            memory[3][7, 5] += 1
            view = tensorhub.source("w", shape=full.shape)
            trained = [
                await c.hubs[0].register(
                    "m",
                    {"w": mine},
                    group="hsdp",
                    rank=rank,
                    world_size=4,
                    sources={"w": view[halves[rank]]},
                )
                for rank, mine in enumerate(memory)
            ]
            await all_of(*(each.publish(1) for each in trained))
            reader = await c.hubs[1].register("m", {"w": np.zeros_like(full)})
            with pytest.raises(IntegrityError, match=r"ranks 1 and 3 of group 'hsdp' .*\('w'\)"):
                await reader.replicate()
            gate.open()
            assert [each.state for each in trained] == ["ready"] * 4
            memory[3][7, 5] -= 1
            for each in trained:
                await each.unpublish()
            await all_of(*(each.publish(2) for each in trained))
            assert (await reader.replicate()).version == 2


async def test_the_next_version_may_come_from_a_trainer_of_another_size() -> None:
    async with world("one", "other") as (c, trained, _):
        weights, mine = await rollout(c.hubs[2:3], "rollout")
        await all_of(*(each.replicate() for each in weights))
        smaller = await halves(c.hubs[3:], "smaller", 2, 2)
        await all_of(*(each.publish(2) for each in smaller))
        reports = await all_of(*(each.update() for each in weights))
        assert is_held(mine, 2)
        assert [report.version for report in reports] == [2, 2]
        assert read_from(reports) == {"other"}
        assert [each.version for each in trained] == [1] * TRAINERS


async def test_what_is_nobodys_in_tensors_that_are_packed_stays_as_it_is() -> None:
    async with world("one", options=replace(OPTIONS, pack_bytes=64)) as (c, _, _):
        weights, mine = await rollout(c.hubs[2:], "rollout")
        await all_of(*(each.replicate() for each in weights))
        assert is_held(mine, 1)
