"""`tensorhub fetch` after Ctrl-C or a kill: it goes on where it stopped, and what it left is never
in the way.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from threading import Event, Thread

import pytest
import torch
from safetensors.torch import load_file

from tensorhub import sync
from tensorhub.memory.unfinished import KEY_BYTES
from tests.cli.processes import WAIT_S, eventually, run, started
from tests.cli.test_publish import OPTIONS

CHUNKS, CHUNK_BYTES = 16, 2**20
HELD_AT = 5 * CHUNK_BYTES  # payload that has passed when the line stands still


class Line:
    """A TCP relay that stands still after so many bytes to the reader, until it is let go."""

    def __init__(self, port: int) -> None:
        self._to = port
        self.go = Event()
        self._passed = 0
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self._listener.getsockname()[1]}"
        self._threads: list[Thread] = []
        self._sockets: list[socket.socket] = []
        self._start(self._accept)

    def _start(self, target: object, *arguments: socket.socket | bool) -> None:
        thread = Thread(target=target, args=arguments)  # type: ignore[arg-type]
        self._threads.append(thread)
        thread.start()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                reader, _ = self._listener.accept()
                source = socket.create_connection(("127.0.0.1", self._to))
                self._sockets += [reader, source]
                self._start(self._pump, reader, source, False)
                self._start(self._pump, source, reader, True)

    def _pump(self, from_: socket.socket, to: socket.socket, counts: bool) -> None:
        with contextlib.suppress(OSError):
            while data := from_.recv(65_536):
                if counts and self._passed >= HELD_AT:
                    self.go.wait(WAIT_S)
                self._passed += len(data) * counts
                to.sendall(data)
        for each in (from_, to):
            with contextlib.suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self.go.set()
        self._listener.shutdown(socket.SHUT_RDWR)
        for each in self._sockets:
            with contextlib.suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)
        for thread in self._threads:
            thread.join(WAIT_S)
        for each in (self._listener, *self._sockets):
            each.close()


@contextlib.contextmanager
def trainer(address: str, tensors: dict[str, torch.Tensor]) -> Iterator[tuple[sync.Weights, Line]]:
    """A publisher that is read by such a line."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    line = Line(port)
    options = replace(OPTIONS, listen_port=port, advertise=line.address, chunk_bytes=CHUNK_BYTES)
    try:
        with sync.connect(address, options=options, transports=["tcp"]) as hub:
            weights = hub.register("m", tensors)
            weights.publish(1)
            yield weights, line
    finally:
        line.close()


def tensors() -> dict[str, torch.Tensor]:
    return {
        name: torch.randint(0, 255, (CHUNKS * CHUNK_BYTES // 2,), dtype=torch.uint8)
        for name in ("a", "b")
    }


@contextlib.contextmanager
def held(address: str, out: Path, line: Line) -> Iterator[subprocess.Popen[str]]:
    """A fetch of which a part has arrived, and is known to have."""
    line.go.clear()
    with started("fetch", "m", "--out", str(out), "--address", address) as process:
        assert eventually(
            lambda: any(path.stat().st_size > KEY_BYTES for path in out.parent.glob(".*.part"))
        )
        yield process


def break_off(address: str, out: Path, line: Line) -> None:
    """A fetch is killed when a part has arrived."""
    with held(address, out, line) as process:
        process.kill()
        process.wait(WAIT_S)
    line.go.set()


def fetched(address: str, out: Path, of: dict[str, torch.Tensor]) -> int:
    """The bytes that a fetch reads now, which leaves its output and nothing else."""
    done = run("fetch", "m", "--out", str(out), "--address", address, "--json")
    assert done.returncode == 0, done.stderr
    assert os.listdir(out.parent) == [out.name]
    got = load_file(out if out.suffix else out / "model.safetensors")
    assert all(got[name].equal(tensor) for name, tensor in of.items())
    return int(json.loads(done.stdout)["bytes"])


@pytest.mark.parametrize("name", ["out.safetensors", "out"])
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT])
def test_it_goes_on_where_it_stopped(
    address: str, tmp_path: Path, number: signal.Signals, name: str
) -> None:
    mine, out = tensors(), tmp_path / name
    with trainer(address, mine) as (_, line):
        with held(address, out, line) as process:
            process.send_signal(number)
            _, err = process.communicate(timeout=WAIT_S)
        assert not out.exists()
        assert ("what has arrived is kept in" in err) == (number == signal.SIGINT)
        line.go.set()
        left = [len(path.read_bytes()) for path in tmp_path.glob(".*.part")]
        assert len(left) == 1
        assert 0 < fetched(address, out, mine) < CHUNKS * CHUNK_BYTES


def test_bytes_that_were_changed_meanwhile_are_read_again(address: str, tmp_path: Path) -> None:
    mine, out = tensors(), tmp_path / "out.safetensors"
    with trainer(address, mine) as (_, line):
        break_off(address, out, line)
        (partial,) = tmp_path.glob(".*/out.safetensors")
        size = partial.stat().st_size
        partial.write_bytes(bytes(size))
        assert fetched(address, out, mine) == CHUNKS * CHUNK_BYTES


def test_after_another_version_has_come_it_begins_anew(address: str, tmp_path: Path) -> None:
    mine, out = tensors(), tmp_path / "out.safetensors"
    with trainer(address, mine) as (weights, line):
        break_off(address, out, line)
        with weights.mutate(2):
            mine["a"].add_(1)
        assert fetched(address, out, mine) == CHUNKS * CHUNK_BYTES


def test_one_at_a_time_writes_there(address: str, tmp_path: Path) -> None:
    mine, out = tensors(), tmp_path / "out.safetensors"
    with trainer(address, mine) as (_, line):
        with held(address, out, line) as process:
            second = run("fetch", "m", "--out", str(out), "--address", address)
            assert (second.returncode, second.stdout) == (2, "")
            assert "another fetch writes there now" in second.stderr
            line.go.set()
            assert process.wait(WAIT_S) == 0
        assert all(load_file(out)[name].equal(tensor) for name, tensor in mine.items())
        assert os.listdir(tmp_path) == [out.name]


def test_a_coordinator_that_starts_later_is_waited_for(tmp_path: Path) -> None:
    with socket.socket() as reserved:  # refuses until it is closed
        reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        reserved.bind(("127.0.0.1", 0))
        port = reserved.getsockname()[1]
        out, address = tmp_path / "out.safetensors", f"tcp://127.0.0.1:{port}"
        with started("fetch", "m", "--out", str(out), "--address", address) as process:
            assert process.stderr is not None
            assert (
                f"waiting 60 s at most: no coordinator can be reached ({address}: "
                in process.stderr.readline()
            )
            reserved.close()
            with (
                sync.serve(port=port, options=OPTIONS),
                sync.connect(address, options=OPTIONS) as hub,
            ):
                hub.register("m", {"a": torch.ones(3)}).publish(1)
                assert process.wait(WAIT_S) == 0
        assert load_file(out)["a"].equal(torch.ones(3))
    for command in ("status", "plan"):
        arguments = (
            command,
            *(("m",) if command == "plan" else ()),
            "--address",
            "tcp://127.0.0.1:1",
        )
        done = run(*arguments)
        assert done.stderr.startswith("error: CoordinatorUnavailable: ")
