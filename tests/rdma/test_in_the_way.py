"""What is in the way of RDMA, as users see it: tcp is used, and one warning says why; without tcp
an error does.
"""

from __future__ import annotations

import contextlib
import re
import subprocess
from collections.abc import AsyncIterator, Iterator
from dataclasses import replace
from pathlib import Path

import anyio
import numpy as np
import pytest

from tensorhub.api.hub import Hub
from tensorhub.errors import TransportUnavailable, VersionUnavailable
from tensorhub.transport import built_in
from tensorhub.transport.rdma.reads import WINDOW_BYTES
from tensorhub.transport.registry import Registry
from tensorhub.transport.tcp import TcpTransport
from tensorhub.types import FetchReport
from tests.processes.child_processes import Failed, child_processes
from tests.rig import OPTIONS, Cluster, cluster, connect, gated, holds, tensors, until, worker_of

pytestmark = [pytest.mark.rdma, pytest.mark.anyio, pytest.mark.timeout(120)]
MIB = 2**20
RDMA, BOTH = ("rdma",), ("rdma", "tcp")
HASTY = replace(OPTIONS, stall_timeout_s=2.0, connect_timeout_s=5.0)
NO_WAY = (
    r"from rxe0:1:1 \(10.99.0.1\) to 10.99.1.1: the source does not answer over RDMA: "
    r".*routing between the two networks, a firewall .*Options.rdma_ports"
)
DOWN = r"the RDMA port rxe0:1:1 \(10.99.0.1\) is down: check cable, switch and interface"
DOWN_THERE = r"the RDMA port rxe1:1:1 \(10.99.1.1\) is down: check cable, switch and interface"


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@contextlib.asynccontextmanager
async def published(ports: str, transports: tuple[str, ...]) -> AsyncIterator[Cluster]:
    """A trainer that has published version 1, with these ports."""
    options = replace(HASTY, rdma_ports=ports)
    async with (
        cluster(options=HASTY) as made,
        connect(made.address, "trainer", options, transports=transports) as trainer,
    ):
        await (await trainer.register("m", tensors(1))).publish(1)
        yield made


@contextlib.asynccontextmanager
async def reader(
    made: Cluster, ports: str, transports: tuple[str, ...] | None
) -> AsyncIterator[Hub]:
    async with connect(
        made.address, "reader", replace(HASTY, rdma_ports=ports), transports=transports
    ) as hub:
        yield hub


async def read(hub: Hub) -> list[tuple[str, str]]:
    """By which transports the version came, and how each read ended."""
    memory = tensors()
    weights = await hub.register("m", memory)
    report = await weights.replicate()
    assert holds(memory, 1)
    assert report.reread_bytes == 0
    await weights.close()
    return [(source.transport, source.outcome) for source in report.sources]


def warned(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]


@contextlib.contextmanager
def down(link: str) -> Iterator[None]:
    subprocess.run(["ip", "link", "set", link, "down"], check=True)
    try:
        yield
    finally:
        subprocess.run(["ip", "link", "set", link, "up"], check=True)


# --------------------------------------------------------------------------------------------------
# on this machine


async def test_without_a_usable_port_connect_says_why_or_the_others_are_used(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with cluster(options=HASTY) as made:
        with down("rd0"):
            for transports in (RDMA, BOTH):
                with pytest.raises(
                    TransportUnavailable,
                    match="rxe0:1: the port is DOWN: check its cable, its switch and",
                ):
                    async with reader(made, "rxe0", transports):
                        pass
            async with reader(made, "rxe0", None) as hub:
                assert "rdma" not in repr(worker_of(hub).channels)
        (text,) = warned(caplog)
        assert (
            "event='transport_unavailable' transport='rdma' reason='rxe0:1: the port is DOWN"
            in text
        )
        wrong = {
            "rxe0:1:7": "entry 7 of its GID table is empty: give its interface an IP address",
            "rxe7": "there is no such port here: rxe0, rxe1",
        }
        for ports, why in wrong.items():
            with pytest.raises(TransportUnavailable, match=why):
                async with reader(made, ports, BOTH):
                    pass


# --------------------------------------------------------------------------------------------------
# between two workers


@pytest.mark.parametrize(
    ("theirs", "mine", "why"),
    [
        # the two subnets are not joined: what is sent to the other one comes back on `lo`
        ("rxe1", "rxe0", NO_WAY),
        (
            "rxe0:1:1",
            "rxe0:1:0",
            (
                r"no RDMA port here \(rxe0:1:0 \(fe80::.*\) is on one network "
                r".*\(10.99.0.1\).*rdma_ports"
            ),
        ),
    ],
    ids=["another subnet", "another kind of GID"],
)
async def test_a_peer_that_is_not_reached_is_read_by_tcp(
    theirs: str, mine: str, why: str, caplog: pytest.LogCaptureFixture
) -> None:
    async with published(theirs, BOTH) as made, reader(made, mine, BOTH) as hub:
        assert [await read(hub) for _ in range(2)] == [[("tcp", "used")]] * 2
    (text,) = warned(caplog)
    assert "event='transport_unusable' transport='rdma' source='trainer'" in text
    assert re.search(why, text)


async def test_where_only_rdma_is_allowed_the_error_says_why(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with published("rxe0", RDMA) as made, reader(made, "rxe0", RDMA) as hub:
        weights = await hub.register("m", memory := tensors())
        said = (
            rf"reads that failed: worker 'trainer': none of the transports can be used: .*; "
            rf"rdma: {DOWN}"
        )
        with down("rd0"), pytest.raises(VersionUnavailable, match=said):
            await weights.replicate(timeout=3.0)
        assert len(warned(caplog)) == 1
        report = await weights.replicate()  # it is up again
        assert [(source.transport, source.outcome) for source in report.sources][-1] == (
            "rdma",
            "used",
        )
        assert holds(memory, 1)


@pytest.mark.parametrize(
    ("link", "why"),
    [("rd0", DOWN), ("rd1", rf"at the source: {DOWN_THERE}")],
    ids=["here", "there"],
)
async def test_a_port_that_goes_down_before_a_read(
    link: str, why: str, caplog: pytest.LogCaptureFixture
) -> None:
    async with published("rxe1", BOTH) as made, reader(made, "rxe0", BOTH) as hub:
        with down(link):
            assert await read(hub) == [("tcp", "used")]
    *at_source, text = warned(caplog)
    assert re.search(
        f"event='transport_unusable' transport='rdma' source='trainer' reason='{why}", text
    )
    # it warns of itself
    assert ["rdma_unpaired" in each for each in at_source] == [True] * (link == "rd1")


@pytest.mark.parametrize("comes_back", [True, False])
async def test_a_port_that_goes_down_in_mid_read(
    comes_back: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """Nothing that came is read twice: the rest comes by tcp, or, where only rdma is allowed, once
    the port is up.
    """
    size = 3 * WINDOW_BYTES
    options = replace(HASTY, chunk_bytes=2**20, rdma_ports="rxe0")
    transports = RDMA if comes_back else BOTH
    source = {"w": np.random.default_rng(7).integers(0, 256, size, np.uint8)}
    memory = {"w": np.zeros(size, np.uint8)}
    with gated(3, transport="rdma") as gate:
        built_in.TRANSPORTS = Registry({**built_in.TRANSPORTS.built_in, "tcp": TcpTransport})
        async with (
            cluster(options=options) as made,
            connect(made.address, "trainer", options, transports=transports) as trainer,
            connect(made.address, "reader", options, transports=transports) as hub,
        ):
            await (await trainer.register("m", source)).publish(1)
            weights = await hub.register("m", memory)
            reports: list[FetchReport] = []

            async def fill() -> None:
                reports.append(await weights.replicate())

            async with anyio.create_task_group() as tasks:
                tasks.start_soon(fill)
                await until(lambda: gate.holds)
                with down("rd0"):
                    gate.open()
                    await until(lambda: len(warned(caplog)) > 0)
        (report,) = reports
    assert np.array_equal(memory["w"], source["w"])
    assert report.reread_bytes == 0
    used = [
        (each.transport, each.outcome) for each in report.sources if each.outcome != "unreachable"
    ]
    assert used == [("rdma", "lost"), ("rdma" if comes_back else "tcp", "used")]
    assert report.sources[0].bytes_read >= 3 * 2**20
    (text,) = warned(caplog)
    assert "event='transport_unusable' transport='rdma' source='trainer'" in text
    assert re.search(DOWN, text)


# --------------------------------------------------------------------------------------------------
# locked memory

LIMITED = ["prlimit", f"--memlock={4 * MIB}", "setpriv", "--bounding-set=-ipc_lock"]
LIMIT = (
    rf"\d+ bytes cannot be registered under RLIMIT_MEMLOCK, which is {4 * MIB} bytes: raise it "
    rf"by `ulimit -l unlimited`"
)


@pytest.mark.parametrize("who", ["trainer", "reader"])
def test_a_limit_of_locked_memory_that_is_too_small(who: str, tmp_path: Path) -> None:
    """One of two processes may lock 4 MiB only, and has no capability to do so all the same."""
    whose = "at the source: " if who == "trainer" else "the memory to read into: "
    with child_processes("asyncio") as made:
        names = ("trainer", "reader")
        trainer, reader = [
            made.process(name, LIMITED if name == who else (), tmp_path / name) for name in names
        ]
        address = trainer.do("serve")
        trainer.do("connect", address=address, name="trainer", transports=BOTH)
        trainer.do("register", nbytes=16 * MIB)
        trainer.do("write", content=1)
        trainer.do("publish", version=1)
        reader.do("connect", address=address, name="strict", transports=RDMA)
        reader.do("register", nbytes=16 * MIB)
        with pytest.raises(
            Failed, match=f"none of the transports can be used: .*; rdma: {whose}{LIMIT}"
        ) as caught:
            reader.do("replicate", timeout=2.0)
        assert caught.value.kind == "VersionUnavailable"
        reader.do("connect", address=address, name="reader", transports=BOTH)
        reader.do("register", nbytes=16 * MIB)
        assert reader.do("replicate")["transports"] == {"trainer": "tcp"}
        assert reader.do("sha") == trainer.do("sha")
    warned = [
        line
        for line in (tmp_path / "reader").read_text().splitlines()
        if "transport_unusable" in line
    ]
    assert len(warned) == 2  # one of each hub
    assert all(re.search(whose + LIMIT, line) for line in warned)
