"""What observers are told of calls and of serving: it adds up, and names what was slow."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import anyio
import pytest

from tensorhub.coordinator.entities import Worker
from tensorhub.coordinator.observing import Observations
from tensorhub.errors import TensorHubError
from tensorhub.messages import Took
from tensorhub.observed import LINKS_MAX, PHASE_NAMES, PHASES_MAX, LinkTiming, ServedTiming
from tensorhub.runtime.data import thread_time
from tensorhub.types import VersionInfo
from tests.rig import (
    CHUNK_BYTES,
    CHUNKS,
    OPTIONS,
    WAIT_S,
    cluster,
    published,
    tensors,
    until,
    worker_of,
)

HOOK_S = 0.3


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> list[Took]:
    """What coordinators of this process are told of calls."""
    said: list[Took] = []
    heard = Observations.took

    def took(self: Observations, worker: Worker, message: Took, *, is_its: bool) -> None:
        said.append(message)
        heard(self, worker, message, is_its=is_its)

    monkeypatch.setattr(Observations, "took", took)
    return said


def check(took: Took) -> dict[str, float]:
    phases = dict(took.phases)
    assert list(phases) == [name for name in PHASE_NAMES if name in phases]
    assert len(PHASE_NAMES) <= PHASES_MAX
    assert math.isclose(sum(phases.values()), took.seconds, rel_tol=1e-6, abs_tol=1e-6), took
    for link in took.links:
        parts = parts_of(link)
        assert all(seconds >= 0 for seconds in parts.values()), link
        # one thread at least; the clocks of the parts are read a little earlier than the lane's
        assert link.transport != "tcp" or sum(parts.values()) <= link.seconds + 0.05, link
    return phases


def parts_of(link: LinkTiming) -> dict[str, float]:
    names = ("link_s", "empty_s", "cpu_s", "delay_s", "gil_s", "digest_s", "codec_s")
    return {name: getattr(link, name) for name in names}


@pytest.mark.parametrize("said", [None, "", "0", "a b c"])
async def test_no_read_fails_for_what_the_kernel_counts(
    said: str | None, told: list[Took], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Nothing, or what is none of its figures."""
    if said is not None:
        (tmp_path / "schedstat").write_text(said)
    monkeypatch.setattr(thread_time, "SCHEDSTAT", tmp_path / "schedstat")
    async with cluster("trainer", "reader") as c:
        await published(c.hubs[0])
        weights = await c.hubs[1].register("m", tensors())
        await weights.replicate(timeout=WAIT_S)
        await until(lambda: len(told) == 1)
        check(told[0])


async def test_the_phases_of_each_call_add_up_also_of_one_that_failed(told: list[Took]) -> None:
    async with cluster("trainer", "reader") as c:
        source = await published(c.hubs[0])
        weights = await c.hubs[1].register("m", tensors())
        report = await weights.replicate()
        await until(lambda: len(told) == 1)
        assert {"resolve", "verify", "commit"} <= check(told[0]).keys()
        (link,) = told[0].links
        assert (link.source, link.nbytes, link.kind) == ("trainer", CHUNKS * CHUNK_BYTES, "live")
        assert told[0].key.model == "m"
        assert math.isclose(told[0].seconds, report.seconds, abs_tol=0.5)
        await weights.update()
        await until(lambda: len(told) == 2)
        assert check(told[1]).keys() <= {"resolve", "prepare", "commit"}
        assert told[1].links == ()
        await c.hubs[1].fetch("m")
        await until(lambda: len(told) == 3)
        check(told[2])

        async def refuse(info: VersionInfo) -> None:
            await anyio.sleep(HOOK_S)
            raise ValueError

        await source.unpublish()
        await source.publish(2)
        with pytest.raises(ValueError):  # noqa: PT011 - the hook's own
            await weights.update(before_write=refuse)
        await until(lambda: len(told) == 4)
        phases = check(told[3])
        assert max(phases, key=phases.__getitem__) == "hook"
        with pytest.raises(TensorHubError):
            await weights.update(at_least=7, timeout=HOOK_S)
        await until(lambda: len(told) == 5)
        phases = check(told[4])
        assert max(phases, key=phases.__getitem__) == "resolve"


async def test_a_hook_is_named_before_the_reads_and_behind_them(told: list[Took]) -> None:
    options = replace(OPTIONS, host_memory_bytes=2**26)
    async with cluster("trainer", "reader", options=options) as c:
        source = await published(c.hubs[0])
        weights = await c.hubs[1].register("m", tensors())

        async def pause(info: VersionInfo) -> None:
            await anyio.sleep(HOOK_S)

        await weights.update(before_write=pause)
        await source.unpublish()
        await source.publish(2)
        report = await weights.update(staged=True, before_write=pause)
        await until(lambda: len(told) == 2)
        for took in told:
            phases = check(took)
            assert HOOK_S <= phases["hook"] <= took.seconds
        assert {"room", "apply"} <= dict(told[1].phases).keys()
        assert report.phases["wait"] >= HOOK_S


async def test_a_source_tells_what_each_of_these_lanes_cost_it(
    told: list[Took], monkeypatch: pytest.MonkeyPatch
) -> None:
    served: list[tuple[str, ServedTiming]] = []
    monkeypatch.setattr(
        Observations, "served", lambda self, worker, timing: served.append((worker, timing))
    )
    async with cluster("trainer", "reader") as c:
        source = await published(c.hubs[0])
        weights = await c.hubs[1].register("m", tensors())
        for version in (2, 3):
            await weights.update()
            await source.unpublish()
            await source.publish(version)
        # the connection is kept meanwhile: it is not its end that tells
        await until(lambda: len(told) == len(served) == 2)
        worker = worker_of(c.hubs[0])
        assert {name for name, _ in served} == {worker.incarnation}
        leases = [link.lease for took in told for link in took.links]
        assert [timing.lease for _, timing in served] == leases
        assert all(timing.nbytes == CHUNKS * CHUNK_BYTES for _, timing in served)


def test_there_is_room_for_the_longest_lanes_only() -> None:
    from tensorhub.runtime.reports import CallTimes

    times = CallTimes()
    lanes = [LinkTiming(f"l{n}", "s", "tcp", "live", 1, float(n % 90)) for n in range(90)]
    times.add_links(lanes[:50])
    times.add_links(lanes[50:])
    assert [link.seconds for link in times.links] == [float(n) for n in range(89, 25, -1)]
    assert len(times.links) == LINKS_MAX
