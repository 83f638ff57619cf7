"""A transport that is not TensorHub's own reads and serves: it needs an entry point, and nothing
else.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

import tensorhub
from tensorhub.errors import TransportUnavailable
from tensorhub.testing.conformance import CHECKS
from tensorhub.testing.serving import ServedSource
from tensorhub.transport.base import Transport, Unusable
from tensorhub.transport.built_in import TRANSPORTS
from tests.rig import CHUNK_BYTES, cluster, connect, holds, tensors, write
from tests.runtime.data_rig import SECRET, busy_threads
from tests.transport.patience import QuietSource, local, note_readers


@pytest.fixture(autouse=True)
def _installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As a package of somebody else's is."""
    info = tmp_path / "spool-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: spool\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(
        "[tensorhub.transports]\nspool = tests.transport.spool:SpoolTransport\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    note_readers(monkeypatch)


@pytest.fixture
def transport() -> Iterator[Transport]:
    (made,) = TRANSPORTS.make(local(), ["spool"])
    yield made
    made.close()
    assert not busy_threads()


@pytest.mark.parametrize("check", CHECKS)
@pytest.mark.parametrize("backend", ["asyncio", "trio"])
def test_it_keeps_the_rule(transport: Transport, check: str, backend: str) -> None:
    CHECKS[check](transport, lambda: QuietSource(SECRET, backend, transport.serve()))


@pytest.mark.anyio
async def test_workers_use_it_when_they_name_it() -> None:
    async with (
        cluster("any") as c,
        connect(c.address, "trainer", transports=["spool"]) as trainer,
        connect(c.address, "reader", transports=["spool"]) as reader,
    ):
        source, memory = tensors(1), tensors()
        published = await trainer.register("m", source)
        await published.publish(1)
        weights = await reader.register("m", memory)
        report = await weights.replicate()
        assert [(each.transport, each.outcome) for each in report.sources] == [("spool", "used")]
        assert holds(memory, 1)
        async with published.mutate(report.version + 1):
            write(source, 2)
        assert [each.transport for each in (await weights.update()).sources] == ["spool"]
        assert holds(memory, 2)
        await published.close()


@pytest.mark.anyio
async def test_across_layouts_another_one_is_taken_or_asked_for() -> None:
    """It reads whole chunks only, as its author has left it."""
    async with (
        cluster("any") as c,
        connect(c.address, "trainer", transports=["spool"]) as trainer,
        connect(c.address, "other", transports=["spool", "tcp"]) as other,
        connect(c.address, "reader", transports=["spool", "tcp"]) as reader,
        connect(c.address, "narrow", transports=["spool"]) as narrow,
    ):
        source, half = tensors(1), {"half": np.zeros(CHUNK_BYTES, np.uint8)}
        name = next(iter(source))
        sources = {"half": [tensorhub.source(name)[CHUNK_BYTES // 2 : CHUNK_BYTES // 2 * 3]]}
        published = await trainer.register("m", source)
        await published.publish(1)
        weights = await reader.register("m", half, sources=sources, partial=True)
        cramped = await narrow.register(
            "m", {"half": np.zeros(CHUNK_BYTES, np.uint8)}, sources=sources, partial=True
        )
        for each in (weights, cramped):
            with pytest.raises(
                TransportUnavailable, match=r"across layouts.*let both sides have tcp"
            ):
                await each.replicate(timeout=math.inf)
        await (await other.register("m", tensors())).replicate()
        report = await weights.replicate()
        assert [(each.name, each.transport) for each in report.sources] == [("other", "tcp")]
        assert (half["half"] == source[name][CHUNK_BYTES // 2 : CHUNK_BYTES // 2 * 3]).all()
        with pytest.raises(TransportUnavailable, match="which of its transports none can"):
            await cramped.replicate(timeout=math.inf)


def test_who_is_not_read_by_it_says_so(transport: Transport) -> None:
    source = ServedSource(SECRET)
    with pytest.raises(
        Unusable, match="at the source: this worker's memory is not to be read this way"
    ):
        CHECKS["bytes"](transport, lambda: source)
    source.close()
