"""The part of Kubernetes' API server that keeps Leases, over HTTPS: optimistic concurrency by
resourceVersion, its status codes, its schema. (No real one can be had where these tests run.)
"""

from __future__ import annotations

import contextlib
import copy
import json
import ssl
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import kubernetes_validate
import trustme


@dataclass
class LeaseServer:
    account: Path  # as a pod's service account is mounted
    namespace: str = "train"
    port: int = 0
    token: str = "first"  # that is accepted
    leases: dict[str, Any] = field(default_factory=dict)
    asked: list[str] = field(default_factory=list)  # methods, in turn
    # what happens to the next requests, one each: a status, "lost" (done, and never answered),
    # "garbage", or "taken" (the answer is what another candidate has made of it since)
    faults: list[int | str] = field(default_factory=list)
    always: int = 0  # a status that every request gets
    revision: int = 0
    lock: threading.Lock = field(default_factory=threading.Lock)

    def answer(self, method: str, path: str, token: str, body: Any) -> tuple[int, Any]:
        leases = f"/apis/coordination.k8s.io/v1/namespaces/{self.namespace}/leases"
        name = path.removeprefix(f"{leases}/")
        found = self.leases.get(name)
        if token != f"Bearer {self.token}":
            return 401, {"kind": "Status", "message": "Unauthorized"}
        if not path.startswith(leases):
            return 404, {"kind": "Status", "message": "namespaces not found"}
        if body is not None:
            kubernetes_validate.validate(body, "1.37", strict=True)
        if method == "POST":
            if body["metadata"]["name"] in self.leases:
                return 409, {"kind": "Status", "reason": "AlreadyExists"}
            return self._keep(body, 201)
        if found is None:
            return 404, {"kind": "Status", "reason": "NotFound"}
        if method == "PUT":
            if body["metadata"].get("resourceVersion") != found["metadata"]["resourceVersion"]:
                return 409, {"kind": "Status", "reason": "Conflict"}
            return self._keep(body, 200)
        return 200, found

    def _keep(self, body: Any, status: int) -> tuple[int, Any]:
        self.revision += 1
        kept = copy.deepcopy(body)
        kept["metadata"] |= {
            "resourceVersion": str(self.revision),
            "uid": "u",
            "namespace": "train",
        }
        self.leases[kept["metadata"]["name"]] = kept
        return status, kept

    @property
    def holder(self) -> str:
        return str(self.leases["hub"]["spec"]["holderIdentity"])


@contextlib.contextmanager
def lease_server(
    account: Path, address: str = "127.0.0.1", namespace: str = "train"
) -> Iterator[LeaseServer]:
    """A server, and the files by which a pod finds it."""
    authority = trustme.CA()
    authority.cert_pem.write_to_path(account / "ca.crt")
    (account / "token").write_text("first\n")
    server = LeaseServer(account, namespace)

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        timeout = 60

        def do_GET(self) -> None:
            length = int(self.headers.get("Content-Length", 0))
            body = json.loads(self.rfile.read(length)) if length else None
            with server.lock:
                server.asked.append(self.command)
                fault = server.always or (server.faults.pop(0) if server.faults else 0)
                status = 500
                found: Any = {"kind": "Status", "message": "etcdserver: leader changed"}
                if not isinstance(fault, int) or not fault:
                    given = self.headers.get("Authorization", "")
                    status, found = server.answer(self.command, self.path, given, body)
                else:
                    status = fault
                if fault == "taken":
                    found["spec"]["holderIdentity"] = "tcp://b:1#other"
                # as it is now: a test may change the Lease as soon as it has the lock
                text = b"<html>" if fault == "garbage" else json.dumps(found).encode()
            if fault == "lost":
                self.close_connection = True
                return
            self.send_response(status)
            self.send_header("Content-Length", str(len(text)))
            self.end_headers()
            self.wfile.write(text)

        do_POST = do_PUT = do_GET  # noqa: N815 - the names are the base class's

        def log_message(self, format: str, *args: Any) -> None:
            pass

    class Server(ThreadingHTTPServer):
        daemon_threads = True
        handle_error: Callable[..., None] = staticmethod(lambda *_: None)  # clients go away

        def finish_request(self, request: Any, client_address: Any) -> None:
            with context.wrap_socket(request, server_side=True) as secured:
                super().finish_request(secured, client_address)

    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    authority.issue_cert(address).configure_cert(context)
    with Server((address, 0), Handler) as listening:
        server.port = listening.server_port
        thread = threading.Thread(target=listening.serve_forever, args=(0.05,))
        thread.start()
        try:
            yield server
        finally:
            listening.shutdown()
            thread.join()
