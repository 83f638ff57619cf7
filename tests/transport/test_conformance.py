"""Every transport keeps the rules, on both backends; and the suite notices where one does not."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial

import pytest

from tensorhub.cuda import cupy_device
from tensorhub.protocol.certificates import Certificates
from tensorhub.testing import conformance
from tensorhub.testing.checking import ConformanceBroken, Source
from tensorhub.testing.conformance import CHECKS, transport_conformance
from tensorhub.transport import cma, segments as shm, unix
from tensorhub.transport.base import (
    Arrival,
    Channel,
    Cutter,
    Destination,
    Lacking,
    ReadFailure,
    ReadRight,
    Transport,
)
from tensorhub.transport.cma import CmaTransport
from tensorhub.transport.cuda_ipc import CudaIpcTransport
from tensorhub.transport.nixl import agents as nixl
from tensorhub.transport.nixl.transport import NixlTransport
from tensorhub.transport.parallel import ParallelChannel
from tensorhub.transport.registry import Local
from tensorhub.transport.shm import ShmTransport
from tensorhub.transport.tcp import TcpTransport
from tensorhub.types import Endpoint, Location
from tests.certificates import usual
from tests.cuda.double import Double
from tests.runtime.data_rig import SECRET, busy_threads
from tests.transport.patience import QuietSource, local, note_readers

BACKENDS = ("asyncio", "trio")
needs_shm = pytest.mark.skipif(shm.fault_here() is not None, reason=str(shm.fault_here()))
needs_nixl = pytest.mark.skipif(
    nixl.version() is None, reason=f"NIXL is not installed: {nixl.INSTALL}, or make nixl"
)
needs_cma = pytest.mark.skipif(cma.fault_here() is not None, reason=str(cma.fault_here()))


class Parallel(TcpTransport):
    """As a reader in another site has tcp."""

    lanes = 3

    def open(
        self, endpoint: Endpoint, right: ReadRight, destination: Destination, cutter: Cutter
    ) -> Channel:
        return ParallelChannel(
            partial(super().open, endpoint, right, destination),
            self.lanes,
            destination.sizes,
            cutter,
        )


@pytest.fixture(autouse=True)
def _as_if_elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """A stand-in's memory is opened, as another process' is."""
    note_readers(monkeypatch)
    monkeypatch.setattr(cupy_device, "missing", lambda: None)
    monkeypatch.setattr(unix, "is_this_process", lambda descriptor: False)


def ways(kind: str, backend: str) -> tuple[Transport, Callable[[], Source]]:
    transports: dict[str, Callable[[Local], Transport]] = {
        "tcp": TcpTransport,
        "parallel": Parallel,
        "staged": TcpTransport,
        "tls": TcpTransport,
        "cma": CmaTransport,
        "shm": ShmTransport,
        "nixl": NixlTransport,
        "cuda_ipc": CudaIpcTransport,
    }
    device = Double() if kind in ("staged", "cuda_ipc") else None
    certificates = Certificates(usual()) if kind == "tls" else None
    transport = transports[kind](replace(local(), certificates=certificates))
    return transport, lambda: QuietSource(
        SECRET, backend, transport.serve(), device=device, certificates=certificates
    )


@contextlib.contextmanager
def kept_until_the_end(transport: Transport) -> Iterator[None]:
    try:
        yield
    finally:
        transport.close()


@pytest.mark.parametrize("check", CHECKS)
@pytest.mark.parametrize(
    ("kind", "backend"),
    [
        *(pytest.param("tcp", backend) for backend in BACKENDS),
        *(pytest.param("parallel", backend) for backend in BACKENDS),
        *(pytest.param("cma", backend, marks=needs_cma) for backend in BACKENDS),
        *(pytest.param("shm", backend, marks=needs_shm) for backend in BACKENDS),
        *(
            pytest.param("nixl", backend, marks=[pytest.mark.nixl, needs_nixl])
            for backend in BACKENDS
        ),
        ("staged", "asyncio"),
        ("tls", "trio"),
        pytest.param("cuda_ipc", "asyncio", marks=needs_shm),
    ],
)
def test_a_transport_keeps_the_rule(kind: str, backend: str, check: str) -> None:
    transport, make = ways(kind, backend)
    with kept_until_the_end(transport):
        CHECKS[check](transport, make)
    assert not busy_threads()


def test_all_of_it_in_one_call() -> None:
    transport, make = ways("tcp", "asyncio")
    with kept_until_the_end(transport):
        transport_conformance(transport, make)


# --------------------------------------------------------------------------------- what the suite
# says of bad transports


class Faulty(Transport):
    """A transport that breaks one rule: see `Fault`."""

    name = "faulty"
    lanes = 1

    def __init__(self, inner: Transport, fault: type[_Passes]) -> None:
        self._inner = inner
        self._fault = fault

    def reaches(self, here: Location, there: Location) -> bool:
        return True

    def open(
        self, endpoint: Endpoint, right: ReadRight, destination: Destination, cutter: Cutter
    ) -> Channel:
        heard = Cutter() if self._fault is _Deaf else cutter
        return self._fault(self._inner.open(endpoint, right, destination, heard), destination)


class _Passes:
    """Changes nothing."""

    def __init__(self, inner: Channel, destination: Destination) -> None:
        self.inner = inner
        self.destination = destination

    def submit(self, chunks: Sequence[int]) -> None:
        self.inner.submit(chunks)

    def receive(self, bytes_max: int) -> Arrival | Lacking:
        return self.inner.receive(bytes_max)

    def close(self) -> None:
        self.inner.close()


class _Deaf(_Passes):
    """Does not hear of a cut."""


class _Corrupts(_Passes):
    """Damages a byte of what it brings."""

    def receive(self, bytes_max: int) -> Arrival | Lacking:
        answer = super().receive(bytes_max)
        for chunk, _ in answer.chunks if isinstance(answer, Arrival) else ():
            self.destination.buffer(chunk)[0] ^= 1
        return answer


class _Digests(_Passes):
    """Has no digests."""

    def receive(self, bytes_max: int) -> Arrival | Lacking:
        answer = super().receive(bytes_max)
        if isinstance(answer, Lacking):
            return answer
        return answer._replace(chunks=[(chunk, 0) for chunk, _ in answer.chunks])


class _Scribbles(_Passes):
    """Writes where nobody has asked it to."""

    def receive(self, bytes_max: int) -> Arrival | Lacking:
        self.destination.buffer(3)[:] = bytes(3)
        return super().receive(bytes_max)


class _Greedy(_Passes):
    """Takes no notice of how much is wanted."""

    def receive(self, bytes_max: int) -> Arrival | Lacking:
        return super().receive(2**30)


class _Stale(_Passes):
    """Names what it has not read under the generation: all that was submitted, if that cannot be
    read any more.
    """

    failure: ReadFailure | None = None

    def submit(self, chunks: Sequence[int]) -> None:
        self.left = set(chunks)
        super().submit(chunks)

    def receive(self, bytes_max: int) -> Arrival | Lacking:
        try:
            if self.failure is not None:  # nothing more comes
                raise self.failure
            answer = super().receive(bytes_max)
        except ReadFailure as failure:
            self.failure = failure
            if not self.left:
                raise
            return Arrival([(self.left.pop(), 0)], 0.0, 0.0)
        self.left -= (
            {chunk for chunk, _ in answer.chunks}
            if isinstance(answer, Arrival)
            else set(answer.chunks)
        )
        return answer


class _Forgets(_Passes):
    """Says of nothing that it is lacking, as of chunks that are."""

    def receive(self, bytes_max: int) -> Arrival | Lacking:
        answer = super().receive(bytes_max)
        return Lacking(answer.chunks, ()) if isinstance(answer, Lacking) else answer


@pytest.mark.parametrize(
    ("fault", "check", "rule"),
    [
        (_Deaf, "cut", 5),
        (_Corrupts, "bytes", 1),
        (_Digests, "bytes", 3),
        (_Digests, "spoilt", 3),
        (_Scribbles, "bytes", 1),
        (_Greedy, "bytes_max", 1),
        (_Stale, "taken_back", 2),
        (_Stale, "rights", 4),
        (_Stale, "death", 4),
        (_Forgets, "lacking", 7),
    ],
)
def test_the_suite_finds(
    fault: type[_Passes], check: str, rule: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    if fault is _Deaf:
        monkeypatch.setattr(conformance, "SOON_S", 0.3)
    transport, make = ways("tcp", "asyncio")
    with kept_until_the_end(transport):
        with pytest.raises(ConformanceBroken, match=f"rule {rule} of"):
            CHECKS[check](Faulty(transport, fault), make)
        monkeypatch.undo()  # what keeps the rule may take long
        CHECKS[check](Faulty(transport, _Passes), make)
