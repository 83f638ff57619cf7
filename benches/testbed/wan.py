"""A WAN: a program that carries packets between two TUN devices, at a rate, with a delay, and loses
some.

`python -m benches.testbed.wan NAMESPACE NAMESPACE MBIT ROUND_TRIP_MS LOSS SEED`: it makes a device
in each namespace (a path), says "ready", and ends with its standard input. `Direction` is pure:
time is an argument.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import os
import random
import select
import struct
import sys
import threading
import time
from collections import deque
from dataclasses import dataclass, field

from benches.testbed.network import MTU, WAN_DEVICE

# a packet that would wait longer for its turn is lost, as at the end of a router's queue
QUEUE_S = 0.04
OVERHEAD_BYTES = 24  # of each packet on a real line
_TUNSETIFF, _IFF_TUN, _IFF_NO_PI, _CLONE_NEWNET = 0x400454CA, 0x0001, 0x1000, 0x40000000


@dataclass(slots=True)
class Direction:
    """What is on its way to one end. `_free_s`: when the line has sent what it has been given."""

    bytes_per_s: float
    delay_s: float
    loss: float
    chance: random.Random
    lost: int = 0
    _free_s: float = 0.0
    _flying: deque[tuple[float, bytes]] = field(default_factory=deque)

    def take(self, packet: bytes, now_s: float) -> None:
        """A packet has come: it is on its way, or lost."""
        begins_s = max(now_s, self._free_s)
        if begins_s - now_s > QUEUE_S or (self.loss and self.chance.random() < self.loss):
            self.lost += 1
            return
        self._free_s = begins_s + (len(packet) + OVERHEAD_BYTES) / self.bytes_per_s
        self._flying.append((self._free_s + self.delay_s, packet))

    @property
    def due_s(self) -> float | None:
        """When the next packet arrives."""
        return self._flying[0][0] if self._flying else None

    def arrived(self, now_s: float) -> bytes | None:
        return self._flying.popleft()[1] if self._flying and self._flying[0][0] <= now_s else None


def relay(devices: tuple[int, int], ways: tuple[Direction, Direction], until: int) -> None:
    """Carry packets until the descriptor `until` can be read. `ways[n]` leads to `devices[n]`."""
    to, others = dict(zip(devices, ways, strict=True)), {devices[0]: ways[1], devices[1]: ways[0]}
    while True:
        now_s = time.monotonic()
        for device, way in to.items():
            while (packet := way.arrived(now_s)) is not None:
                with contextlib.suppress(OSError):  # its end is down
                    os.write(device, packet)
        due = [way.due_s for way in ways if way.due_s is not None]
        wait_s = max(0.0, min(due) - time.monotonic()) if due else None
        ready = select.select([*devices, until], [], [], wait_s)[0]
        if until in ready:
            return
        now_s = time.monotonic()
        for device in ready:
            with contextlib.suppress(BlockingIOError):
                while True:
                    others[device].take(os.read(device, MTU + 100), now_s)


def device(namespace: str) -> int:
    """A new TUN device there. A thread of its own goes into the namespace, and ends."""
    found: list[int | OSError] = []

    def enter() -> None:
        try:
            with open(namespace, "rb") as space:
                if ctypes.CDLL(None, use_errno=True).setns(space.fileno(), _CLONE_NEWNET) != 0:
                    raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
            opened = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
            found.append(opened)
            fcntl.ioctl(
                opened,
                _TUNSETIFF,
                struct.pack("16sH22x", WAN_DEVICE.encode(), _IFF_TUN | _IFF_NO_PI),
            )
        except OSError as error:
            found[:] = [error]

    thread = threading.Thread(target=enter)
    thread.start()
    thread.join()
    if isinstance(found[0], OSError):
        raise found[0]
    return found[0]


def main(arguments: list[str]) -> None:
    near, far, *rest = arguments
    mbit, round_trip_ms, loss, seed = map(float, rest)
    devices = (device(near), device(far))
    ways = tuple(
        Direction(
            mbit * 1e6 / 8, round_trip_ms / 2000, loss, random.Random(f"{int(seed)}:{number}")
        )
        for number in range(2)
    )
    with contextlib.suppress(OSError):
        os.setpriority(os.PRIO_PROCESS, 0, -10)  # a line waits for no processor
    print("ready", flush=True)
    relay(devices, (ways[0], ways[1]), 0)


if __name__ == "__main__":
    main(sys.argv[1:])
