"""What one rank of `tensorhub bench --cluster` does in a step, and what its machine is.

Nothing that goes into the report names a machine or has an address.
"""

from __future__ import annotations

import fcntl
import functools
import ipaddress
import os
import re
import resource
import socket
import struct
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import anyio
import anyio.to_thread

import tensorhub
from tensorhub.cli.common import Connect, leaf_of
from tensorhub.errors import TensorHubError
from tensorhub.transport.built_in import TRANSPORTS
from tensorhub.transport.rdma.ports import find_ports
from tensorhub.transport.registry import Local
from tensorhub.types import Incarnation, Options, parse_address

from . import bare
from .facts import facts
from .memory import Memory, private
from .sizes import half_tiny
from .threads import in_threads

MEETING = "tensorhub-bench"  # the model by which rank 0 is found
SAME_HOST = ("cuda_ipc", "shm", "cma", "archive")
LANES = (1, 4)  # connections of bare sockets
PINGS = 200
_SIOCGIFADDR = 0x8915
_ADDRESS = re.compile(r"(tcp://)?(\d{1,3}(\.\d{1,3}){3}|\[[0-9a-fA-F:]{3,}\])(:\d+)?")


@dataclass(frozen=True, slots=True)
class Wanted:
    """What the command line says."""

    rank: int
    size: int
    connect: Connect
    rounds: int
    copies: int
    mib: int
    only: Sequence[str]
    skip: Sequence[str]
    timeout_s: float
    results: Path | None
    as_json: bool
    quiet: bool

    def allows(self, transport: str) -> bool:
        return transport not in self.skip and (not self.only or transport in self.only)


class Party:
    """One rank's tensors and sockets. Each method is a step's part; its result is JSON."""

    def __init__(self, wanted: Wanted, run: str, host: str) -> None:
        self._wanted, self._run, self._host = wanted, run, host
        self._listeners: list[socket.socket] = []
        self._memory = Memory({}, random=False)
        self._hub: tensorhub.Hub | None = None
        self._weights: tensorhub.Weights | None = None
        self.steps: Mapping[str, Callable[..., Awaitable[Any]]] = {
            "listen": self.listen,
            "give": self.give,
            "take_bare": self.take_bare,
            "echo": self.echo,
            "ping": self.ping,
            "allocate": self.allocate,
            "open": self.open,
            "publish": self.publish,
            "take": self.take,
            "check": self.check,
            "close": self.close,
        }

    async def do(self, step: Any, *arguments: Any) -> dict[str, Any]:
        """The step's value and CPU seconds; `failed`: why there is none. Rank 0 orders it, and this
        rank's command line bounds what that may cost.
        """
        before_s = cpu_s()
        try:
            with anyio.fail_after(self._wanted.timeout_s):
                value = await self.steps[step](*arguments)
        except TimeoutError:
            return {"failed": f"no end of {step} within {self._wanted.timeout_s:g} s"}
        except (OSError, TensorHubError, RuntimeError, ValueError, TypeError, LookupError) as error:
            leaf = leaf_of(error)
            return {"failed": scrubbed(f"{type(leaf).__name__}: {leaf}")[:500]}
        return {"value": value, "cpu_s": cpu_s() - before_s}

    async def listen(self) -> list[int]:
        self.stop_listening()
        self._listeners = [
            bare.listen(self._host, self._wanted.timeout_s) for _ in range(max(LANES))
        ]
        return [listener.getsockname()[1] for listener in self._listeners]

    def stop_listening(self) -> None:
        for listener in self._listeners:
            listener.close()
        self._listeners.clear()

    async def echo(self) -> None:
        await _in_thread(_echo, self._listeners[0], self._wanted.timeout_s)

    async def ping(self, host: str, ports: Sequence[int]) -> Any:
        return await _in_thread(_ping, (host, ports[0]), self._wanted.timeout_s)

    async def give(self, receivers: int, lanes: int) -> None:
        _check_lanes(lanes)
        views = self._memory.views

        def lane(number: int) -> None:
            bare.send_all(
                self._listeners[number], receivers, views[number::lanes], False, congestion=None
            )

        await _in_thread(in_threads, lanes, lane)

    async def take_bare(self, host: str, ports: Sequence[int], lanes: int) -> float:
        _check_lanes(lanes)
        views = self._memory.views

        def lane(number: int) -> None:
            bare.receive_all((host, ports[number]), views[number::lanes], False, congestion=None)

        start = time.monotonic()
        await _in_thread(in_threads, lanes, lane)
        return time.monotonic() - start

    async def allocate(self, mib: int) -> None:
        if not 0 < mib <= self._wanted.mib:
            raise ValueError(
                f"rank 0 orders {mib} MiB, and --mib {self._wanted.mib} is the most here: give all "
                f"ranks the same --mib"
            )
        sizes = private(half_tiny(mib * 2**20))
        self._memory = await _in_thread(
            functools.partial(Memory, random=self._wanted.rank == 0), sizes
        )

    async def open(self, transport: str) -> None:
        if not self._wanted.allows(transport):
            raise ValueError(
                f"rank 0 orders {transport}, which --only or --skip leaves out here: give all ranks "
                f"the same ones"
            )
        if self._wanted.rank:
            self._memory.clear()
        name = f"bench-{self._wanted.rank}"
        self._hub = await self._wanted.connect(name=name, transports=(transport,))
        model = f"{MEETING}/{self._run}/{transport}"
        self._weights = await self._hub.register(model, self._memory.tensors)

    @property
    def _handle(self) -> tensorhub.Weights:
        if self._weights is None:
            raise RuntimeError("this transport was not opened here")
        return self._weights

    async def publish(self, number: int) -> float:
        """Seconds until a new content is visible."""
        if self._handle.version is not None:
            await self._handle.unpublish(timeout=self._wanted.timeout_s)
        self._memory.change()
        start = time.monotonic()
        await self._handle.publish(number, timeout=self._wanted.timeout_s)
        return time.monotonic() - start

    async def take(self, number: int, names: Mapping[str, int]) -> dict[str, Any]:
        report = await self._handle.update(number, timeout=self._wanted.timeout_s)
        sources = [
            {
                "rank": names.get(source.name),
                "transport": source.transport,
                "bytes": source.bytes_read,
            }
            for source in report.sources
            if source.bytes_read
        ]
        return {"seconds": report.seconds, "phases": dict(report.phases), "sources": sources}

    async def check(self, what: str) -> str:
        return str(
            await _in_thread({"digest": self._memory.digest, "sample": self._memory.sample}[what])
        )

    async def close(self) -> None:
        hub, self._hub, self._weights = self._hub, None, None
        if hub is not None:
            await hub.close()


async def _in_thread(work: Callable[..., Any], *arguments: Any) -> Any:
    """Sockets have deadlines of their own: a thread that is given up ends by itself."""
    return await anyio.to_thread.run_sync(work, *arguments, abandon_on_cancel=True)


def _check_lanes(lanes: int) -> None:
    if lanes not in LANES:
        raise ValueError(f"rank 0 orders {lanes} connections, and {LANES} are known here")


def cpu_s() -> float:
    use = resource.getrusage(resource.RUSAGE_SELF)
    return use.ru_utime + use.ru_stime


def _echo(listener: socket.socket, timeout_s: float) -> None:
    connection, _ = listener.accept()
    with connection:
        connection.settimeout(timeout_s)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        while byte := connection.recv(1):
            connection.sendall(byte)


def _ping(address: tuple[str, int], timeout_s: float) -> list[float]:
    """Seconds of each round trip of one byte."""
    found = []
    with socket.create_connection(address, timeout=timeout_s) as connection:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for _ in range(PINGS):
            start = time.monotonic()
            connection.sendall(b"?")
            if not connection.recv(1):
                raise ConnectionError("the other rank ended")
            found.append(time.monotonic() - start)
    return found


def scrubbed(text: str) -> str:
    """Without addresses."""
    return _ADDRESS.sub("ADDRESS", " ".join(text.split()))


# --------------------------------------------------------------------------------------------------
# the machine


async def host_of(hub: tensorhub.Hub, model: str) -> str:
    """The address at which other machines reach this one: TensorHub's own, of a worker of `model`."""
    for worker in (await hub.describe(model)).workers:
        for endpoint in worker.endpoints if worker.name == hub.name else ():
            if endpoint.address.startswith("tcp://"):
                host, port = parse_address(endpoint.address)
                return str(socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][4][0])
    raise RuntimeError("this worker has no tcp address")


def machine(host: str) -> dict[str, Any]:
    """Facts for the report: no name, no address."""
    try:
        ports = [
            {"link": port.link, "gbits": port.gbits, "fault": scrubbed(port.fault)}
            for port in find_ports()
        ]
    except OSError:
        ports = []
    faults = TRANSPORTS.probe(Local(Incarnation("bench"), (b"",), Options()))
    return {
        **facts(),
        "tls": "TENSORHUB_TLS_CERT" in os.environ,  # an option, too, is in the environment here
        "loopback": ipaddress.ip_address(host.partition("%")[0]).is_loopback,
        "interface": _interface(host),
        "rdma ports": ports,
        "transports": {
            name: fault and scrubbed(fault)
            for name, fault in faults.items()
            if name not in SAME_HOST
        },
    }


def _interface(host: str) -> dict[str, str]:
    """Speed, MTU and driver of the interface that has this (IPv4) address."""
    for _, name in socket.if_nameindex():
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
            try:
                found = fcntl.ioctl(
                    any_socket, _SIOCGIFADDR, struct.pack("256s", name.encode()[:15])
                )
            except OSError:
                continue
        if socket.inet_ntoa(found[20:24]) == host:
            place = Path("/sys/class/net", name)
            driver = place / "device" / "driver"
            return {
                "mbit/s": _read(place / "speed"),
                "mtu": _read(place / "mtu"),
                "driver": driver.resolve().name if driver.exists() else "none",
            }
    return {}


def _read(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return "unknown"
