"""Several addresses of a coordinator: the first that takes the connection, whatever the others do with it."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Iterator

import pytest

from tensorhub.errors import ProtocolError
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
