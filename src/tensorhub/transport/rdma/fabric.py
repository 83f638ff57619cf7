"""The devices that one worker has open.

Each is opened when it is first needed, and kept until the worker ends: a context, a protection
domain, and the memory that was registered with it. Not responsible for a device's parts (`verbs`),
nor for queue pairs (`queues`).
"""

from __future__ import annotations

import threading
from collections.abc import Sequence

from tensorhub.transport.rdma.ports import Port
from tensorhub.transport.rdma.queues import Queue, ReaderQueue
from tensorhub.transport.rdma.verbs import Device, Spanned


class Fabric:
    """What one worker has open on these ports. For several threads."""

    def __init__(self, ports: Sequence[Port]) -> None:
        self.ports = tuple(ports)
        self._lock = threading.Lock()
        self._devices: dict[str, Device] = {}

    def __repr__(self) -> str:
        return f"<Fabric of {', '.join(map(str, self.ports))}; {len(self._devices)} devices open>"

    def device(self, port: Port) -> Device:
        """The port's device, open. OSError."""
        with self._lock:
            if port.device not in self._devices:
                self._devices[port.device] = Device(port.device)
            return self._devices[port.device]

    def reader(self, port: Port) -> ReaderQueue:
        """A queue pair's end that reads. OSError."""
        return ReaderQueue(self.device(port), port)

    def source(self, port: Port) -> Queue:
        """A queue pair's end that is read through. OSError."""
        return Queue(self.device(port), port)

    def release(self, memory: Spanned) -> None:
        """See `Device.release`."""
        with self._lock:
            devices = list(self._devices.values())
        for device in devices:
            device.release(memory)

    def close(self) -> None:
        """Close every device; queue pairs must be closed before."""
        with self._lock:
            for device in self._devices.values():
                device.close()
            self._devices.clear()
