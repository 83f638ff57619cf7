"""Which transport reads a source: the choice, its log, and, where one fails again and again, the
next one in mid-fetch.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import cast

import pytest

import tensorhub
from tensorhub import deltas
from tensorhub.errors import TransportUnavailable
from tensorhub.memory.base import Base
from tensorhub.memory.chunks import ChunkMemory
from tensorhub.messages import Grant
from tensorhub.protocol.certificates import TLS_VARIABLES
from tensorhub.runtime.data.channels import FAILURES_MAX, LEFT_S, Channels
from tensorhub.runtime.data.source_lane import Opened
from tensorhub.transport import built_in
from tensorhub.transport.base import (
    Arrival,
    Channel,
    Cutter,
    Destination,
    Lacking,
    ReadFailure,
    ReadRight,
    Reason,
    Transport,
    Unusable,
)
from tensorhub.transport.dialect import Dialect
from tensorhub.transport.owner import OwnerSide
from tensorhub.transport.parallel import ParallelChannel
from tensorhub.transport.registry import Local, Registry
from tensorhub.transport.shm import ShmTransport
from tensorhub.transport.tcp import TcpTransport
from tensorhub.types import ContentId, DeltaUse, Endpoint, Incarnation, Location, Options
from tests.certificates import usual
from tests.conftest import has_rdma
from tests.rig import CHUNK_BYTES, CHUNKS, OPTIONS, Cluster, cluster, connect, holds, tensors
from tests.runtime.data_rig import Nowhere

pytestmark = pytest.mark.anyio
ENOUGH = 2**40  # bytes that are left to read


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


class Faulty(Transport):
    """A transport by which some arrivals come, and then none, `times` times; from then on it is as
    the inner one.
    """

    lanes = 1

    def __init__(
        self, name: str, inner: Transport, reason: Reason, arrivals: int, times: int = 10**9
    ) -> None:
        self.name = name
        self._inner = inner
        self._reason: Reason = reason
        self._arrivals = arrivals
        self._times = times
        self.opened = 0

    def serve(self) -> OwnerSide | None:
        side = self._inner.serve()
        assert side is not None
        side.dialect = Dialect(self.name, {}, {})
        return side

    def reaches(self, here: Location, there: Location) -> bool:
        return True

    def open(
        self, endpoint: Endpoint, right: ReadRight, destination: Destination, cutter: Cutter
    ) -> Channel:
        self.opened += 1
        channel = self._inner.open(endpoint, right, destination, cutter)
        return (
            channel
            if self.opened > self._times
            else _Failing(channel, self._reason, self._arrivals)
        )

    def sweep(self) -> None:
        """Nothing is kept for so long here."""

    def close(self) -> None:
        self._inner.close()


class _Failing:
    def __init__(self, inner: Channel, reason: Reason, arrivals: int) -> None:
        self._inner = inner
        self._reason: Reason = reason
        self._left = arrivals

    def submit(self, chunks: Sequence[int]) -> None:
        self._inner.submit(chunks)

    def receive(self, bytes_max: int) -> Arrival | Lacking:
        if not self._left:
            raise ReadFailure(self._reason, "on purpose")
        self._left -= 1
        return self._inner.receive(CHUNK_BYTES)

    def close(self) -> None:
        self._inner.close()


@contextlib.contextmanager
def having(**factories: Callable[[Local], Transport]) -> Iterator[None]:
    """Workers that connect in this block have these, best first."""
    usual, built_in.TRANSPORTS = built_in.TRANSPORTS, Registry(factories)
    try:
        yield
    finally:
        built_in.TRANSPORTS = usual


async def fetched(c: Cluster, *, timeout: float = 30) -> tensorhub.FetchReport:
    source = await c.hubs[0].register("m", tensors(1))
    await source.publish(1)
    memory = tensors()
    report = await (await c.hubs[1].register("m", memory)).replicate(timeout=timeout)
    assert holds(memory, 1)
    return report


def said(caplog: pytest.LogCaptureFixture, event: str) -> list[str]:
    return [
        record.getMessage()
        for record in caplog.records
        if f"event='{event}'" in record.getMessage()
    ]


class Bare(TcpTransport):
    private = False


@pytest.mark.parametrize("encrypts", [True, False])
async def test_with_tls_a_transport_that_does_not_encrypt_is_told_of(
    encrypts: bool, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    if encrypts:
        for name, variable in TLS_VARIABLES.items():
            monkeypatch.setenv(variable, str(getattr(usual(), name)))

    def bare(local: Local) -> Transport:
        made = Bare(local)
        made.name = "bare"
        return made

    with having(bare=bare, shm=ShmTransport, tcp=TcpTransport):
        async with cluster("trainer"):
            pass
        async with cluster("reader", transports=["tcp"]):
            pass
    told = said(caplog, "transport_not_encrypted")
    assert len(told) == encrypts
    assert all("transport='bare'" in each and "leave it out" in each for each in told)


@pytest.mark.parametrize("reason", ["lost", "stalled", "corrupt"])
async def test_a_fetch_goes_on_by_the_next_transport(
    reason: Reason, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "tensorhub.worker")
    with having(cma=lambda local: Faulty("cma", TcpTransport(local), reason, 2), tcp=TcpTransport):
        async with cluster("trainer", "reader") as c:
            report = await fetched(c)
    used = [(source.transport, source.outcome) for source in report.sources]
    assert used == [("cma", reason)] * FAILURES_MAX + [("tcp", "used")]
    assert report.reread_bytes == 0  # what came by the first one stays
    assert [source.bytes_read for source in report.sources] == [2 * CHUNK_BYTES] * 3 + [
        (CHUNKS - 6) * CHUNK_BYTES
    ]
    (left,) = said(caplog, "transport_left")
    assert "transport='cma' source='trainer'" in left
    assert f"{FAILURES_MAX} reads failed, the last one as {reason}: on purpose" in left
    first, then = said(caplog, "transport_chosen")  # once each
    assert "transport='cma' why='the best one here'" in first
    assert f"transport='tcp' why='cma: {FAILURES_MAX} reads failed" in then


# --------------------------------------------------------------------------------------------------
# the choice by itself


class Way(Transport):
    """A transport that only says why not, if it does."""

    lanes = 1

    def __init__(self, name: str, says: Exception | None = None) -> None:
        self.name = name
        self.says = says
        self.opened = 0
        self.right: ReadRight | None = None

    def reaches(self, here: Location, there: Location) -> bool:
        return self.name != "shm" or here.host == there.host

    def open(
        self, endpoint: Endpoint, right: ReadRight, destination: Destination, cutter: Cutter
    ) -> Channel:
        self.opened += 1
        self.right = right
        if self.says is not None:
            raise self.says
        return _Nothing()


class _Nothing:
    def submit(self, chunks: Sequence[int]) -> None: ...

    def receive(self, bytes_max: int) -> Arrival | Lacking:
        return Arrival((), 0.0, 0.0)

    def close(self) -> None: ...


class InPieces(Nowhere):
    is_strided = True


def grant(*offered: str, host: str = "there") -> Grant:
    endpoints = tuple(Endpoint(name, "somewhere") for name in offered)
    return Grant("l", "source", "i", "r", 1, endpoints, Location(host=host), True)


def chosen(channels: Channels, granted: Grant) -> str:
    return channels.opener(ContentId("c"))(granted, Nowhere(8, 5), Cutter(), ENOUGH).transport


def channels_of(*ways: Way, options: Options | None = None) -> Channels:
    """Of a worker that has these, in this order."""
    with having(**{way.name: lambda local, way=way: way for way in ways}):
        made = Channels([b""], options or Options(), Location(host="here"), None)
        made.become(Incarnation("reader"))
        return made


def test_the_reason_of_each_choice_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "tensorhub.worker")
    channels = channels_of(
        Way("shm"), Way("rdma"), Way("nixl", Unusable("no way: but")), Way("tcp")
    )
    for _ in range(2):
        assert chosen(channels, grant("tcp", "nixl", "shm")) == "tcp"
    (text,) = said(caplog, "transport_chosen")
    assert (
        "why='shm: does not reach it; rdma: the source does not offer it; nixl: no way: but'"
        in text
    )
    assert chosen(channels, grant("tcp", "nixl", "shm", host="here")) == "shm"


OPEN = (DeltaUse.UNDECIDED, DeltaUse.TRANSPORT)  # what the worker itself would read by deltas


@pytest.mark.parametrize(
    ("options", "host", "carries", "has_base", "use"),
    [
        (Options(), "there", True, True, DeltaUse.UNDECIDED),
        (Options(), "there", False, True, DeltaUse.TRANSPORT),
        (Options(), "there", True, False, DeltaUse.NO_BASE),
        (Options(), "here", True, True, DeltaUse.SAME_HOST),
        (Options(deltas="off"), "there", True, True, DeltaUse.OFF),
        (Options(deltas="off"), "there", False, False, DeltaUse.OFF),
    ],
)
def test_why_a_source_is_asked_for_no_deltas(
    options: Options,
    host: str,
    carries: bool,
    has_base: bool,
    use: DeltaUse,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    channels = channels_of(way := Way("tcp"), options=options)
    way.deltas = carries
    base = Base(cast("ChunkMemory", None), ContentId("b"), (), bytearray()) if has_base else None
    opens = channels.opener(ContentId("c"), base=base)
    monkeypatch.setattr(deltas, "fault_here", lambda: None)
    found = opens(grant("tcp", host=host), Nowhere(), Cutter(), ENOUGH)
    assert found.use is use
    assert way.right is not None
    assert (way.right.base is not None) == (base is not None and use in OPEN)
    monkeypatch.setattr(deltas, "fault_here", lambda: "no zstandard")
    found = opens(grant("tcp", host=host), Nowhere(), Cutter(), ENOUGH)
    assert found.use is (DeltaUse.NO_EXTRA if use in OPEN else use)


def opened(options: Options, site: str, *, strided: bool = False, left: int = ENOUGH) -> Opened:
    """By a tcp, whose source is in that site, and this worker in the default one."""
    way = Way("tcp")
    way.lanes, way.connections, way.strides = 3, options.wan_connections, True
    with having(tcp=lambda local: way):
        channels = Channels([b""], options, Location(host="here"), None)
        channels.become(Incarnation("reader"))
    granted = replace(grant("tcp"), location=Location(site=site, host="there"))
    opens = channels.opener(ContentId("c"))
    found = opens(granted, InPieces(8, 5) if strided else Nowhere(8, 5), Cutter(), left)
    assert way.opened == 1  # the first one; threads that help open the others
    return found


@pytest.mark.parametrize("strided", [False, True])
def test_a_source_in_another_site_is_read_by_several_connections(strided: bool) -> None:
    near, far = (opened(Options(), site, strided=strided) for site in ("default", "elsewhere"))
    assert (near.lanes, near.waits, type(near.channel)) == (3, False, _Nothing)
    assert (far.lanes, far.waits, type(far.channel)) == (4, True, ParallelChannel)
    alone, two = (opened(Options(wan_connections=each), "elsewhere") for each in (1, 2))
    assert (alone.lanes, alone.waits, type(alone.channel)) == (3, False, _Nothing)
    assert (two.lanes, two.waits, type(two.channel)) == (2, True, ParallelChannel)


def test_what_was_left_comes_last_and_is_tried_again_later(monkeypatch: pytest.MonkeyPatch) -> None:
    failing = Way("nixl", ReadFailure("lost", "always"))
    channels = channels_of(failing, Way("tcp"))
    for _ in range(FAILURES_MAX):
        with pytest.raises(ReadFailure, match="always"):
            chosen(channels, grant("nixl", "tcp"))
    assert chosen(channels, grant("nixl", "tcp")) == "tcp"
    with pytest.raises(ReadFailure, match="always"):  # there is no other one
        chosen(channels, grant("nixl"))
    monkeypatch.setattr(time, "monotonic", lambda: 2.0**62)
    with pytest.raises(ReadFailure, match="always"):
        chosen(channels, grant("nixl", "tcp"))


def test_what_cannot_be_used_is_tried_again_later_and_each_time_twice_as_late(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    now = [1000.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    way = Way("rdma", Unusable("the port is down"))
    channels = channels_of(way, Way("tcp"))
    for waited_s in (0.0, LEFT_S, 2 * LEFT_S):
        now[0] += waited_s
        assert chosen(channels, grant("rdma", "tcp")) == "tcp"
        opened = way.opened
        now[0] += 0.9 * LEFT_S
        assert chosen(channels, grant("rdma", "tcp")) == "tcp"
        assert way.opened == opened  # it was not tried
        now[0] -= 0.9 * LEFT_S
    # the same reason is no news
    assert (way.opened, len(said(caplog, "transport_unusable"))) == (3, 1)
    way.says = Unusable("another reason")
    with pytest.raises(
        ReadFailure, match=r"none of the transports can be used: .*; rdma: another reason"
    ):
        chosen(channels, grant("rdma"))  # there is no other one: it is tried all the same
    assert len(said(caplog, "transport_unusable")) == 2
    way.says = None
    assert chosen(channels, grant("rdma")) == "rdma"
    # that it opens is not all: a read has to end well
    assert chosen(channels, grant("rdma", "tcp")) == "tcp"
    channels.opener(ContentId("c"))(grant("rdma"), Nowhere(8, 5), Cutter(), ENOUGH).ended(None)
    assert chosen(channels, grant("rdma", "tcp")) == "rdma"


def test_what_is_read_in_pieces_is_read_by_a_transport_that_can() -> None:
    ways = [Way("ours"), Way("rdma"), Way("tcp")]
    ways[2].strides = True
    channels = channels_of(*ways)
    opener = channels.opener(ContentId("c"))
    assert opener(grant("ours", "rdma", "tcp"), InPieces(8, 5), Cutter(), ENOUGH).transport == "tcp"
    assert [way.opened for way in ways] == [0, 0, 1]
    with pytest.raises(ReadFailure, match=r"of these, tcp can read across layouts"):
        opener(grant("ours", "rdma"), InPieces(8, 5), Cutter(), ENOUGH)
    with pytest.raises(
        ReadFailure, match=r"refused: it is granted for a selection that this rank does not read"
    ):
        opener(replace(grant("tcp"), selection="unknown"), InPieces(8, 5), Cutter(), ENOUGH)


@pytest.mark.skipif(has_rdma(), reason="this machine has an RDMA device")
async def test_a_transport_that_is_named_and_not_there_ends_connect_with_the_reason(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with cluster() as c:
        for transports in (("rdma",), ("tcp", "rdma")):
            with pytest.raises(TransportUnavailable, match="this machine has no RDMA device"):
                async with connect(c.address, transports=transports):
                    pass
        assert not said(caplog, "transport_unavailable")
        async with connect(c.address, options=replace(OPTIONS, rdma_ports="mlx5_0")):
            pass  # by the others
    (text,) = said(caplog, "transport_unavailable")
    assert "transport='rdma'" in text
