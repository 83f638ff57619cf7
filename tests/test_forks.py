"""A forked child (a data loader's worker) that outlives what the library has open in its parent
keeps none of it.

Each parent is a real process: a fork in a process with threads is warned of, and warnings are
errors here.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

from tensorhub.types import parse_address
from tests.rig import WAIT_S

PROGRAM = """
import contextlib, json, multiprocessing, os, signal, socket, sys
from pathlib import Path
import anyio, numpy as np
import tensorhub
from tensorhub.transport.forks import close_in_children

def inodes(*tables):
    lines = [line.split() for table in tables for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]]
    return {each[9] for each in lines if ":" in each[1]} | {each[6] for each in lines if "@tensorhub-" in each[-1]}

def held(pid):
    links = []
    for number in os.listdir(f"/proc/{pid}/fd"):
        with contextlib.suppress(FileNotFoundError):  # that of the listing itself
            links.append(os.readlink(f"/proc/{pid}/fd/{number}"))
    ours = inodes("tcp", "tcp6", "unix")
    return [link for link in links if link[8:-1] in ours or link.endswith("/lock")]

def live(told):
    os.write(told, b"x")
    signal.pause()

async def main():
    options = tensorhub.Options(http="127.0.0.1:0")
    coordinator = await tensorhub.serve(token="", state_dir=sys.argv[2], options=options)
    hubs = [await tensorhub.connect(coordinator.address, name=name, token="", options=options) for name in ("trainer", "rollout")]
    host, port = coordinator.http_url[7:-1].split(":")
    browser = close_in_children(socket.create_connection((host, int(port))))
    browser.sendall(b"GET /events HTTP/1.1\\r\\nHost: localhost\\r\\n\\r\\n")
    browser.recv(1)
    weights = await hubs[0].register("m", {"a": np.full(2**20, 7, np.uint8)})
    await weights.publish(1)
    copy = await hubs[1].register("m", {"a": np.zeros(2**20, np.uint8)})
    await copy.replicate()
    ours = len(held("self"))
    ready, told = os.pipe()
    child = multiprocessing.get_context("fork").Process(target=live, args=(told,))
    child.start()
    os.read(ready, 1)
    print(json.dumps({"address": coordinator.address, "child": child.pid, "ours": ours, "its": held(child.pid)}), flush=True)
    await copy.update()  # the parent's own are as they were
    await anyio.to_thread.run_sync(sys.stdin.readline)
    for each in (*hubs, coordinator):
        await each.close()
    port = int(coordinator.address.rpartition(":")[2])
    async with tensorhub.serve(port=port, token="", state_dir=sys.argv[2]) as again:
        print(again.address, flush=True)
    child.kill()

anyio.run(main, backend=sys.argv[1])
"""


@contextmanager
def parent(tmp_path: Path) -> Iterator[tuple[subprocess.Popen[str], dict[str, Any]]]:
    """A process that serves, trains and reads, and what it says once it has a child."""
    command = [
        sys.executable,
        "-W",
        "ignore::DeprecationWarning",
        "-c",
        PROGRAM,
        "asyncio",
        str(tmp_path / "state"),
    ]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        child = 0
        try:
            assert process.stdout is not None
            said = json.loads(process.stdout.readline())
            child = said["child"]
            yield process, said
        finally:
            process.kill()
            if child and Path(f"/proc/{child}").exists():
                os.kill(child, signal.SIGKILL)


@pytest.mark.heavy
def test_a_child_holds_no_socket_and_no_lock_and_the_port_is_free_after_close(
    tmp_path: Path,
) -> None:
    with parent(tmp_path) as (process, said):
        # listeners, control connections, a data connection, a browser's, each at both ends; the lock
        assert said["ours"] >= 16
        assert said["its"] == []
        out, _ = process.communicate("close\n", timeout=WAIT_S)
        assert out.strip() == said["address"]
        assert process.returncode == 0


def test_after_a_kill_of_the_parent_newcomers_are_refused_and_peers_see_the_end(
    tmp_path: Path,
) -> None:
    with parent(tmp_path) as (process, said):
        where = parse_address(said["address"])
        with socket.create_connection(where, WAIT_S) as peer:
            process.kill()
            process.wait(WAIT_S)
            os.kill(said["child"], 0)  # it lives
            with suppress(ConnectionResetError):
                assert peer.recv(1) == b""
            with pytest.raises(ConnectionRefusedError):
                socket.create_connection(where, WAIT_S)
