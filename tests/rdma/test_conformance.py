"""The rdma transport keeps the rules of every transport, over a real device."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tensorhub.testing.conformance import CHECKS
from tensorhub.testing.serving import ServedSource
from tensorhub.transport.rdma.ports import usable_ports
from tensorhub.transport.rdma.queues import Fabric
from tensorhub.transport.rdma.reader import RdmaTransport
from tensorhub.transport.registry import Local
from tensorhub.types import Incarnation, Options
from tests.runtime.data_rig import busy_threads
from tests.transport.fabric import OwnRdma

pytestmark = pytest.mark.rdma
SECRET = b"a secret of the test"


@pytest.fixture
def transport() -> Iterator[RdmaTransport]:
    made = RdmaTransport(
        Local(
            Incarnation("reader"), (SECRET,), Options(stall_timeout_s=2.0, connect_timeout_s=15.0)
        )
    )
    yield made
    made.close()
    made.fabric.close()


@pytest.mark.parametrize("check", CHECKS)
@pytest.mark.parametrize("backend", ["asyncio", "trio"])
def test_the_transport_keeps_the_rule(transport: RdmaTransport, backend: str, check: str) -> None:
    CHECKS[check](
        transport, lambda: ServedSource(SECRET, backend, side=OwnRdma(Fabric(usable_ports())))
    )
    assert not busy_threads()
