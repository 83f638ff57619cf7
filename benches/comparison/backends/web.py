"""HTTP on one long-lived connection for each receiver, whose body is read from the bare socket into
the own tensors.

The source's live tensors are a file in memory, mapped, so that nothing has to be written for a new
version; both servers send it by sendfile: aiohttp from an event loop in a thread of the source,
nginx from processes of its own.
"""

from __future__ import annotations

import asyncio
import os
import re
import socket
import subprocess
import threading
from collections.abc import Sequence
from typing import Any

import torch

from ..backends.base import Setting, Side, connect, free_port, receive_into, start, stop
from ..bare import CONGESTION_CONTROL
from ..environments import program
from ..memory import Memory, aligned, create

CONFIGURATION = """
daemon off;
pid {scratch}/nginx.pid;
error_log stderr;
worker_processes auto;
{user}
events {{ worker_connections 256; }}
http {{
    access_log off;
    sendfile on;
    sendfile_max_chunk 0;
    tcp_nopush on;
    keepalive_timeout 600s;
    keepalive_requests 1000000;
    client_body_temp_path {scratch}/t1; proxy_temp_path {scratch}/t2; fastcgi_temp_path {scratch}/t3;
    uwsgi_temp_path {scratch}/t4; scgi_temp_path {scratch}/t5;
    server {{ listen 127.0.0.1:{port} reuseport; root {scratch}; }}
}}
"""


def versions() -> dict[str, str]:
    found = {}
    try:
        import aiohttp

        found["aiohttp"] = aiohttp.__version__
    except ImportError:
        done = subprocess.run([program("nginx"), "-v"], capture_output=True, text=True, timeout=10)
        found["nginx"] = done.stderr.strip().rpartition("/")[2]
    return found


class Source(Side):
    def __init__(self, setting: Setting, memory: Memory) -> None:
        super().__init__(setting, memory)
        self._process: subprocess.Popen[bytes] | None = None
        self._port = free_port()
        if setting.options["server"] == "nginx":
            self._start_nginx()
        else:
            ready = threading.Event()
            threading.Thread(target=asyncio.run, args=(self._serve(ready),), daemon=True).start()
            ready.wait(10)

    @classmethod
    def tensors(cls, setting: Setting) -> dict[str, torch.Tensor]:
        return create(str(setting.scratch / "weights"), setting.sizes)

    def hello(self) -> Any:
        return self._port

    def close(self) -> None:
        if self._process is not None:
            stop(self._process)

    def _start_nginx(self) -> None:
        scratch, path = self.setting.scratch, self.setting.scratch / "nginx.conf"
        user = "user root;" if os.geteuid() == 0 else ""
        path.write_text(CONFIGURATION.format(scratch=scratch, port=self._port, user=user))
        command = [program("nginx"), "-p", str(scratch), "-e", "stderr", "-c", str(path)]
        self._process = start(command, scratch / "nginx.log")

    async def _serve(self, ready: threading.Event) -> None:
        from aiohttp import web

        async def weights(request: web.Request) -> web.FileResponse:
            return web.FileResponse(self.setting.scratch / "weights")

        listener = socket.create_server(("127.0.0.1", self._port), backlog=64)
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, CONGESTION_CONTROL)
        app = web.Application()
        app.router.add_get("/weights", weights)
        runner = web.AppRunner(app, access_log=None)
        await runner.setup()
        await web.SockSite(runner, listener).start()
        ready.set()
        await asyncio.Event().wait()


class Receiver(Side):
    def meet(self, hellos: Sequence[Any]) -> None:
        self._connection = connect(hellos[0])

    def take(self, offered: Any) -> None:
        self._connection.sendall(b"GET /weights HTTP/1.1\r\nHost: source\r\n\r\n")
        head = bytearray()
        # byte by byte: what follows goes straight into the tensors
        while not head.endswith(b"\r\n\r\n"):
            head += self._connection.recv(1) or b"\r\n\r\n"
        if not re.match(rb"HTTP/1\.1 200 ", head):
            raise ConnectionError(f"the server answers: {bytes(head[:100])!r}")
        padding = memoryview(bytearray(64))
        for view in self.memory.views:
            receive_into(self._connection, view)
            receive_into(self._connection, padding[: aligned(len(view)) - len(view)])

    def close(self) -> None:
        self._connection.close()
