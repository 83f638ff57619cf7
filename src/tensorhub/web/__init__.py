"""HTTP endpoints of a coordinator, and of a worker that wants one, for browsers, probes and
Prometheus.

An endpoint has a thread and a loop of its own. It asks the loop that it shows for pure data, about
as often for a thousand clients as for one, and that loop knows no client. Where to look:

    endpoint        the listener, its thread, its connections and their bounds
    pages           routes, access, headers, answers
    asking          questions to the other loop: cached, paced, with a deadline
    of_coordinator  what a coordinator shows
    of_worker       what a worker shows
    exposition      Prometheus' form of figures
    static          the dashboard's files

Needs the extra `http`, which is imported when an endpoint is made. Not responsible for counting
anything: the loops that are shown do that.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

import anyio
import anyio.to_thread

from tensorhub.errors import StateError, install

if TYPE_CHECKING:
    from tensorhub.protocol.certificates import Certificates
    from tensorhub.web.endpoint import Endpoint


async def open_endpoint(
    where: str, secret: bytes, timeout_s: float, certificates: Certificates | None
) -> contextlib.closing[Endpoint]:
    """An endpoint that listens at "host:port". Raises StateError (the extra `http` is not
    installed, the address cannot be had), AuthenticationFailed (open access beyond loopback).
    """

    def make() -> Endpoint:
        try:
            from tensorhub.web.endpoint import Endpoint
        except ImportError as error:
            text = "needs starlette, uvicorn and prometheus-client"
            raise StateError(f"Options.http {text}: {install('http')} ({error})") from error
        return Endpoint(where, secret, certificates)

    try:
        with anyio.fail_after(timeout_s):
            made = await anyio.to_thread.run_sync(make, abandon_on_cancel=True)
    except TimeoutError as error:
        text = f"Options.http: the host of {where} was not resolved within {timeout_s:g} s"
        raise StateError(f"{text}: give an address", retryable=True) from error
    return contextlib.closing(made)
