"""Floods against real processes: descriptors that run short, and memory that stays bounded."""

from __future__ import annotations

import contextlib
import json
import os
import resource
import select
import socket
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

import tensorhub
from tensorhub.messages import Join, Proof, Refused, Register, Registered
from tensorhub.protocol import codec
from tensorhub.protocol.blocking import BlockingConnection
from tensorhub.protocol.codec import FROM_COORDINATOR
from tensorhub.protocol.frames import FrameEncoder, frame
from tensorhub.protocol.handshake import NONCE_BYTES, ClientHandshake
from tensorhub.types import Location, Medium, Purpose, parse_address
from tests.rig import OPTIONS, WAIT_S, holds, tensors

MIB = 2**20
PATIENT = replace(OPTIONS, connect_timeout_s=WAIT_S, stall_timeout_s=WAIT_S)


@pytest.fixture(params=["asyncio", pytest.param("trio", marks=pytest.mark.slow)])
def anyio_backend(request: pytest.FixtureRequest) -> str:
    return str(request.param)


HOST = """
import json, os, resource, sys
import anyio
import tensorhub
from tensorhub.coordinator import limits
from tests.rig import tensors

backend, descriptors, limits.MANIFEST_BYTES_OF_WORKER_MAX = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
if descriptors > 0:
    resource.setrlimit(resource.RLIMIT_NOFILE, (descriptors, hard))

async def main():
    patient = tensorhub.Options(connect_timeout_s=10**6)  # no pending connection is too old
    async with tensorhub.serve(token="", options=patient) as coordinator:
        async with tensorhub.connect(
            coordinator.address, token="", name="trainer", options=patient
        ) as hub:
            weights = await hub.register("m", tensors(1))
            await weights.publish(1)
            if descriptors < 0:  # so many are left
                taken = max(map(int, os.listdir("/proc/self/fd")))
                resource.setrlimit(resource.RLIMIT_NOFILE, (taken - descriptors, hard))
            tcp = next(each.address for each in hub._worker._endpoints if each.transport == "tcp")
            print(json.dumps([coordinator.address, tcp]), flush=True)
            await anyio.to_thread.run_sync(sys.stdin.read)

anyio.run(main, backend=backend)
"""


@contextlib.contextmanager
def hosting(
    backend: str, descriptors: int = 0, manifest_bytes: int = 2**30
) -> Iterator[tuple[int, str, str]]:
    """A process with a coordinator and a publisher: its id, and the addresses of both."""
    environment = {
        key: value for key, value in os.environ.items() if not key.startswith("TENSORHUB_")
    }
    environment["PYTHONPATH"] = os.pathsep.join(
        [str(Path(__file__).parents[2]), *filter(None, sys.path)]
    )
    command = [sys.executable, "-c", HOST, backend, str(descriptors), str(manifest_bytes)]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
    ) as process:
        try:
            assert process.stdout is not None
            coordinator, owner = json.loads(process.stdout.readline())
            yield process.pid, coordinator, owner
            process.communicate("", WAIT_S)
            assert process.returncode == 0
        finally:
            process.kill()


async def fetches(address: str) -> None:
    """A newcomer reads it all, without a retry."""
    async with tensorhub.connect(address, token="", name="late", options=PATIENT) as hub:
        mine = tensors()
        report = await (await hub.register("m", mine)).replicate(timeout=WAIT_S)
        assert holds(mine, 1)
        assert (report.retries, len(report.sources)) == (0, 1)


@pytest.fixture
def many_descriptors() -> Iterator[None]:
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    if before[1] != resource.RLIM_INFINITY and before[1] < 5000:
        pytest.skip("this process may not have the connections of a flood")
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(before[0], 5000), before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, before)


@pytest.mark.parametrize(
    ("descriptors", "flood"),
    [
        (256, 500),
        pytest.param(1024, 2000, marks=pytest.mark.slow),
        pytest.param(-12, 200, marks=pytest.mark.slow),
    ],
    ids=["256", "1024", "a dozen left"],
)
async def test_a_flood_leaves_descriptors_for_the_others(
    anyio_backend_name: str, descriptors: int, flood: int, many_descriptors: None
) -> None:
    with (
        hosting(anyio_backend_name, descriptors) as (pid, coordinator, owner),
        contextlib.ExitStack() as stack,
    ):
        for address in (coordinator, owner) if descriptors > 0 else (coordinator,):
            for _ in range(flood):
                stack.enter_context(socket.create_connection(parse_address(address), WAIT_S))
        await fetches(coordinator)
        if descriptors > 0:
            assert len(os.listdir(f"/proc/{pid}/fd")) < descriptors * 3 // 4


FLOOD = """
import select, socket, sys, time

host, port, seconds, words = sys.argv[1], int(sys.argv[2]), float(sys.argv[3]), bytes.fromhex(sys.argv[4])
poll, peers, until = select.epoll(), {}, time.monotonic() + seconds
poll.register(sys.stdin, select.EPOLLIN)
opened = 0
while time.monotonic() < until:
    for _ in range(min(100, 3000 - len(peers))):
        peer = socket.socket()
        peer.setblocking(False)
        try:
            peer.bind(("127.0.0.2", 0))
            peer.connect((host, port))
        except BlockingIOError:
            pass
        except OSError:  # no port is left
            peer.close()
            break
        peers[peer.fileno()] = peer
        poll.register(peer, select.EPOLLIN | select.EPOLLOUT)
        opened += 1
        if opened == 3000:
            print("up", flush=True)
    for number, events in poll.poll(0.01):
        if number not in peers:
            sys.exit()  # the test is over
        try:
            if events & select.EPOLLOUT and words:
                peers[number].send(words)
            poll.modify(number, select.EPOLLIN)
            if events & ~select.EPOLLOUT and not peers[number].recv(4096):
                raise OSError
        except BlockingIOError:
            pass
        except OSError:  # closed: come again
            peers.pop(number).close()
"""


def words_of_a_flood(kind: str) -> bytes:
    hello = ClientHandshake("worker", "flood", b"wrong", os.urandom(NONCE_BYTES)).data_to_send()
    wrong = frame(codec.encode(Proof(bytes(32))), 4096)
    return {
        "silent": b"",
        "half a word": hello[:20],
        "hellos": hello,
        "wrong proofs": hello + wrong,
    }[kind]


@contextlib.contextmanager
def flooding(address: str, words: bytes) -> Iterator[None]:
    """Another address, 127.0.0.2, has up to 3,000 connections there, and comes again with each that
    is closed.
    """
    host, port = parse_address(address)
    command = [sys.executable, "-c", FLOOD, host, str(port), str(WAIT_S), words.hex()]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "up\n"
            yield
            process.communicate("", WAIT_S)
        finally:
            process.kill()


def cpu_s(pid: int) -> float:
    """What all threads of a process have computed so far."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return sum(map(int, fields[11:13])) / os.sysconf("SC_CLK_TCK")


class Work:
    """Seconds that this process and that one have computed since it was made. How long something
    takes says more of what else the machine does.
    """

    def __init__(self, pid: int) -> None:
        self._pids = (pid, os.getpid())
        self._before = sum(map(cpu_s, self._pids))

    @property
    def seconds(self) -> float:
        return sum(map(cpu_s, self._pids)) - self._before


def work_of_a_handshake_s(pid: int, address: str, role: str) -> float:
    """An honest one, from the connection on."""
    work = Work(pid)
    with BlockingConnection(
        socket.create_connection(parse_address(address)), stall_timeout_s=WAIT_S
    ) as connection:
        connection.handshake(
            ClientHandshake(role, os.urandom(8).hex(), b"", os.urandom(NONCE_BYTES)), WAIT_S
        )
    return work.seconds


@pytest.mark.parametrize("role", ["worker", "reader"])
@pytest.mark.parametrize(
    "kind",
    [
        "silent",
        *(pytest.param(kind, marks=pytest.mark.slow) for kind in ("half a word", "hellos")),
        "wrong proofs",
    ],
)
async def test_while_another_address_floods_an_honest_handshake_takes_little_work(
    anyio_backend_name: str, kind: str, role: str, many_descriptors: None
) -> None:
    """Half a second of it, mostly for the flood; no connection of the flood grows too old."""
    with hosting(anyio_backend_name) as (pid, coordinator, owner):
        address = coordinator if role == "worker" else owner
        with flooding(address, words_of_a_flood(kind)):
            for _ in range(5):
                assert work_of_a_handshake_s(pid, address, role) < 4
            await fetches(coordinator)


async def test_1024_honest_workers_of_one_address_are_in_with_three_seconds_of_work(
    anyio_backend_name: str, many_descriptors: None
) -> None:
    """All of them are connected before the first one speaks, as processes are that a scheduler
    starts at a time.
    """
    with hosting(anyio_backend_name) as (pid, address, _), contextlib.ExitStack() as stack:
        poll, workers = select.epoll(), dict[int, tuple[socket.socket, ClientHandshake]]()
        stack.callback(poll.close)
        join = codec.encode(Join("honest", Location(), (), 1, 0))
        work = Work(pid)
        for _ in range(1024):
            peer = stack.enter_context(socket.create_connection(parse_address(address), WAIT_S))
            poll.register(peer, select.EPOLLIN)
            handshake = ClientHandshake("worker", os.urandom(8).hex(), b"", os.urandom(NONCE_BYTES))
            workers[peer.fileno()] = peer, handshake
        for peer, handshake in workers.values():
            peer.sendall(handshake.data_to_send())
        while workers:
            events = poll.poll(WAIT_S)
            assert events
            for number, _ in events:
                peer, handshake = workers[number]
                words = peer.recv(4096)
                assert words, "it was closed"
                if not handshake.bytes_wanted:  # it has joined: that is its welcome
                    poll.unregister(number)
                    del workers[number]
                    continue
                handshake.receive_data(words)
                peer.sendall(handshake.data_to_send())
                if handshake.done:
                    frames = FrameEncoder(2**16)
                    frames.authenticate(handshake.frame_keys[0])
                    peer.sendall(frames.frames(join))
        assert work.seconds < 3


def register(connection: BlockingConnection, number: int) -> Registered | Refused:
    use = (0, 0, 1, True, False, Medium.DEVICE, Purpose.USE, "", 1, 1, os.urandom(MIB), None)
    connection.send(Register(number, f"r{number}", "greedy", f"g{number}", *use))
    while not isinstance(answer := connection.receive(FROM_COORDINATOR), Registered | Refused):
        assert answer is not None
    return answer
