"""Several addresses of a coordinator: the first that takes the connection, whatever the others do with it."""

from __future__ import annotations

import contextlib
import errno
import os
import socket
import threading
from collections.abc import Iterator

import anyio.abc
import pytest

from tensorhub.errors import CoordinatorUnavailable, ProtocolError
from tensorhub.runtime.control.link import CoordinatorLink
from tensorhub.types import Options
from tests.rig import WAIT_S, cluster, connect, holds, tensors


@contextlib.contextmanager
def a_proxy_with_nobody_behind_it(connections: int) -> Iterator[str]:
    """It accepts so often, and closes when it has heard something."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.settimeout(WAIT_S)

        def close_each() -> None:
            for _ in range(connections):
                connection, _ = listener.accept()
                with connection:
                    connection.recv(65_536)

        closing = threading.Thread(target=close_each)
        closing.start()
        yield f"tcp://127.0.0.1:{listener.getsockname()[1]}"
        closing.join(WAIT_S)


async def test_an_address_that_closes_in_the_handshake_is_passed_over() -> None:
    """For that address alone it is a typed error; beside another address it is nothing."""
    with a_proxy_with_nobody_behind_it(2) as closed:
        async with cluster("trainer") as c:
            await (await c.hubs[0].register("m", tensors(1))).publish(1)
            with pytest.raises(ProtocolError, match="closed the connection during the handshake") as caught:
                async with connect([closed]):
                    pass
            assert caught.value.retryable
            target = tensors()
            async with connect([closed, c.address], "reader") as reader:
                await (await reader.register("m", target)).replicate()
                assert holds(target, 1)


@pytest.mark.parametrize(
    ("numbers", "said"),
    [
        ([errno.EMFILE], r"Too many open files\): this process .*raise its `ulimit -n`"),
        ([errno.ECONNREFUSED], r"Connection refused\): is one running there\?"),
        ([errno.ECONNREFUSED, errno.ECONNREFUSED, errno.EHOSTUNREACH], r"Connection refused; No route to host\): is one"),
    ],
)
async def test_why_no_connection_could_be_made_is_said(numbers: list[int], said: str) -> None:
    async def dial(host: str, port: int) -> anyio.abc.ByteStream:
        """As anyio does it, for each address of a host."""
        causes = [OSError(number, os.strerror(number)) for number in numbers]
        raise OSError("All connection attempts failed") from (causes[0] if len(causes) == 1 else ExceptionGroup("", causes))

    link = CoordinatorLink(["tcp://127.0.0.1:1"], (b"",), Options(), None, dial)  # type: ignore[arg-type]
    with pytest.raises(CoordinatorUnavailable, match=said):
        await link.connect()
