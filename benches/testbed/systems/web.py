"""A shared file: the trainer writes each version to a file server (nginx, PUT), and each rollout
reads it from there (GET).

The file lies in memory, and the server sends it by sendfile. (This kernel has no network file
system, and this is what most object stores do, too.)
"""

from __future__ import annotations

import http.client
import subprocess
import sys
from pathlib import Path

from benches.testbed.systems.base import WAIT_S, connect
from benches.testbed.systems.storage import END_WITH_ME, Stored

PORT = 7104
CONFIGURATION = """daemon off; master_process off; pid {directory}/pid; error_log {directory}/errors crit;
events {{ worker_connections 256; }}
http {{
  access_log off; sendfile on; tcp_nodelay on; client_max_body_size 0; client_body_temp_path {directory}/body;
  proxy_temp_path {directory}/t1; fastcgi_temp_path {directory}/t2;
  uwsgi_temp_path {directory}/t3; scgi_temp_path {directory}/t4;
  server {{ listen {host}:{port}; root {directory}/files; location / {{ dav_methods PUT DELETE; }} }}
}}
"""


class System(Stored):
    def serve(self, host: str, directory: Path) -> subprocess.Popen[bytes]:
        (directory / "files").mkdir()
        file = directory / "nginx.conf"
        file.write_text(CONFIGURATION.format(directory=directory, host=host, port=PORT))
        command = [
            sys.executable,
            "-c",
            END_WITH_ME,
            "nginx",
            "-c",
            str(file),
            "-p",
            str(directory),
        ]
        return subprocess.Popen(command, stdin=subprocess.DEVNULL)

    def connect(self) -> None:
        connect(self.setting.addresses["store"], PORT).close()
        self._client = http.client.HTTPConnection(
            self.setting.addresses["store"], PORT, timeout=WAIT_S
        )

    # lines
    def put(self, version: int, views: list[memoryview]) -> None:
        length = {"Content-Length": str(sum(map(len, views)))}
        self._client.request("PUT", f"/{version}", body=iter(views), headers=length)
        self._answer(201)

    def get(self, version: int, views: list[memoryview]) -> bool:
        self._client.request("GET", f"/{version}")
        response = self._client.getresponse()
        if response.status != 200:
            response.read()
            return False
        for view in views:
            at = 0
            while at < len(view):
                at += (count := response.readinto(view[at:]))
                if not count:
                    raise ConnectionError("the file ended early")
        response.read()
        return True

    def delete(self, version: int) -> None:
        if version > 0:
            self._client.request("DELETE", f"/{version}")
            self._answer(204)

    # end of lines

    def _answer(self, expected: int) -> None:
        response = self._client.getresponse()
        response.read()
        if response.status != expected:
            raise ConnectionError(f"the file server answered {response.status} {response.reason}")
