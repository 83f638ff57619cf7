"""A client of an HTTP endpoint that does what it is told, over loopback."""

from __future__ import annotations

import contextlib
import http.client
import json
import socket
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, replace
from typing import Any
from urllib.parse import urlsplit

import anyio.to_thread

import tensorhub
from tensorhub.api.embedded import Coordinator
from tests import rig
from tests.rig import OPTIONS, WAIT_S

TOKEN = "a-secret-7f3a"
HTTP = replace(OPTIONS, http="127.0.0.1:0")


@dataclass(frozen=True)
class Got:
    status: int
    headers: Mapping[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def text(self) -> str:
        return self.body.decode()


async def get(
    url: str | None,
    path: str,
    token: str | None = None,
    *,
    method: str = "GET",
    **headers: str,
) -> Got:
    """One request, over a connection of its own. A header's `_` is a `-`."""
    sent = {name.replace("_", "-"): value for name, value in headers.items()}
    if token is not None:
        sent["Authorization"] = f"Bearer {token}"

    def ask() -> Got:
        with contextlib.closing(connection_to(url)) as connection:
            connection.request(method, path, headers=sent)
            answer = connection.getresponse()
            found = {name.lower(): value for name, value in answer.getheaders()}
            return Got(answer.status, found, answer.read())

    return await anyio.to_thread.run_sync(ask)


def place_of(url: str | None) -> tuple[str, int]:
    assert url is not None
    parts = urlsplit(url)
    assert parts.hostname is not None
    assert parts.port is not None
    return parts.hostname, parts.port


def connection_to(url: str | None) -> http.client.HTTPConnection:
    return http.client.HTTPConnection(*place_of(url), timeout=WAIT_S)


def raw(url: str | None) -> socket.socket:
    """A bare connection, for what no HTTP client would send."""
    return socket.create_connection(place_of(url), timeout=WAIT_S)


@contextlib.asynccontextmanager
async def coordinator(token: str = "", **settings: Any) -> AsyncIterator[Coordinator]:
    """One with an endpoint; nothing of it is left at the end."""
    options = settings.pop("options", HTTP)
    async with (
        rig.nothing_left(),
        tensorhub.serve(token=token, options=options, **settings) as serving,
    ):
        yield serving


async def fresh(url: str | None, path: str, token: str | None = None) -> Got:
    """What is answered once what was kept of former answers is too old."""
    await anyio.sleep(1.1)
    return await get(url, path, token)
