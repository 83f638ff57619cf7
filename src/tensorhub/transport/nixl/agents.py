"""NIXL: reads of memory that another process has registered, by UCX, over the best of RDMA, cma and
tcp that both processes have.

An *agent* registers memory, and gives metadata by which another agent can read that memory at any
time, without help.

At a source each registration has an agent of its own. It is made when the first reader asks for it,
and ended before the memory may be freed (`Exposures`). That is necessary because UCX emulates reads
over TCP in the source's process, from any address that a late request names, and only the end of
the agent stops this. `nixl.reading` is the reader's side.

What is trusted: metadata goes into a C++ library that believes it. A process that reaches an
agent's ports, or has its metadata, can write the memory as well as read it. See docs/transports.md.

Responsible for agents, and for the memory that they expose. Not responsible for telling readers of
an agent (`nixl.transport`).
"""

from __future__ import annotations

import importlib
import importlib.metadata
import logging
import mmap
import os
import secrets
import sys
import threading
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, NamedTuple

from tensorhub.errors import TransportUnavailable, install
from tensorhub.messages import Address
from tensorhub.transport.base import NotShared
from tensorhub.transport.one_sided import dialect_of
from tensorhub.types import Id, Length, Range, RegistrationId

AGENT_BYTES_MAX = 2**19  # of an agent's metadata
ON_HOST = -1  # in place of a GPU's number


@dataclass(frozen=True, slots=True)
class AgentIs:
    """The agent by which the registration is read: its name, its metadata as NIXL has made it, and
    where the generation word is, in host memory. `device`: the number of the source's GPU on which
    the chunks are; ON_HOST: they are in host memory.
    """

    name: Id
    metadata: Annotated[bytes, Length(AGENT_BYTES_MAX)]
    word: Address
    device: Annotated[int, Range(ON_HOST, 2**16)]


DIALECT = dialect_of("nixl", AgentIs)


PLACES_MAX = 4096  # of one agent, after those that touch were joined
# at the least, an agent's own thread looks at its work so often; what comes wakes it
PROGRESS_US = 10_000
INSTALL = install("nixl")

GPU_ADVICE = (
    "its UCX must know CUDA (where UCX_TLS is set, it has to name `cuda`, and UCX_MODULES must not "
    "leave it out), and RDMA "
    "devices reach GPUs by the kernel's nvidia-peermem or by dma-buf only"
)
WORDS = {"DRAM": "host memory", "VRAM": "a GPU's memory"}

Place = tuple[int, int]  # address, bytes


class OnGpu(NamedTuple):
    """The places in the memory of the GPU with that number."""

    device: int
    places: tuple[Place, ...]


# --------------------------------------------------------------------------------------------------
# library

_making = threading.Lock()


def version() -> str | None:
    """Of the NIXL that is installed; None: there is none."""
    with suppress(importlib.metadata.PackageNotFoundError):
        return importlib.metadata.version("nixl")
    return None


def _api() -> Any:
    """NIXL's Python interface. TransportUnavailable: it is not there, or not new enough."""
    was_there = "nixl" in sys.modules
    try:
        api = importlib.import_module("nixl._api")
        api.nixl_thread_sync_t  # noqa: B018 - since 1.1
    except (ImportError, AttributeError) as error:
        raise TransportUnavailable(f"NIXL 1.1 or newer is needed ({error}): {INSTALL}") from error
    if not was_there and "NIXL_LOG_LEVEL" not in os.environ:
        # it tells of each agent on the standard output
        logging.getLogger("nixl").setLevel(logging.WARNING)
    return api


def make_agent(role: str) -> Any:
    """An agent with a name that no other has. TransportUnavailable: there is no NIXL, or its UCX
    does not work here.
    """
    with _making, _ucx_settings():
        api = _api()
        try:
            agent = _bare_agent(api, f"{role}-{secrets.token_hex(16)}")
            if "UCX" not in agent.get_plugin_list():
                raise TransportUnavailable(
                    f"NIXL has no UCX plugin here, but {agent.get_plugin_list()}: {INSTALL}"
                )
            agent.create_backend("UCX")
        except TransportUnavailable:
            raise
        except Exception as error:  # each of its errors is a class of its own
            text = (
                f"NIXL's UCX backend cannot be made ({name_of(error)}): look at UCX_TLS, "
                f"UCX_NET_DEVICES and `ulimit -l`"
            )
            raise TransportUnavailable(text) from error
        return agent


def _bare_agent(api: Any, name: str) -> Any:
    """An agent without a backend. NIXL's Python class does not let the agent's own thread sleep, so
    that thread would take a core. So the inner agent is made here.
    """
    made = api.nixl_agent(name, api.nixl_agent_config(enable_prog_thread=False, backends=[]))
    config = api.nixlBind.nixlAgentConfig()
    config.useProgThread, config.useListenThread, config.pthrDelay = True, False, PROGRESS_US
    config.syncMode = api.nixl_thread_sync_t.NIXL_THREAD_SYNC_RW.value  # several threads use it
    made.agent = api.nixlBind.nixlAgent(name, config)
    return made


def has_rdma(path: Path = Path("/sys/class/infiniband")) -> bool:
    """Whether this machine has a device by which UCX can read without the source's help."""
    return any(path.glob("*"))


def fault_with(*, is_near: bool) -> str | None:
    """Why memory is not to be read between two processes; None if it may be. `is_near`: it is host
    memory, of this host.

    If neither a device nor the kernel can read, the source's process answers each read. If the
    reader ends at the wrong moment, UCX then aborts the source's process. So a user has to ask for
    that.
    """
    if is_near or has_rdma() or "UCX_TLS" in os.environ:
        return None
    return (
        "there is no RDMA device here, and over TCP, UCX can end a source's process with its "
        "reader's: use tcp, "
        "or set UCX_TLS to have it all the same"
    )


@contextmanager
def _ucx_settings() -> Iterator[None]:
    """Keep UCX from loading its module for RDMA devices where there is none. NIXL's wheels bring
    libraries along for that module, which end the process in a segmentation fault when it exits.
    """
    if "UCX_MODULES" in os.environ or has_rdma():
        yield
        return
    os.environ["UCX_MODULES"] = "^ib"
    try:
        yield
    finally:
        del os.environ["UCX_MODULES"]


def name_of(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"


# --------------------------------------------------------------------------------------------------
# sources


class Exposed:
    """Memory that an agent lets readers read until `close`. It keeps the memory alive until then.

    Raises NotShared: there are too many places. TransportUnavailable.
    """

    def __init__(self, places: Sequence[Place], memory: object, gpu: OnGpu | None = None) -> None:
        """`places`: in host memory; `gpu`: what else there is. `memory`: what keeps the bytes of
        both.
        """
        self.places = tuple(places)
        self.gpu = gpu
        self.memory: object = memory
        joined = join(places)
        count = len(joined) + (len(gpu.places) if gpu is not None else 0)
        if count > PLACES_MAX:
            raise NotShared(
                f"its memory is in {count} places, and NIXL is given {PLACES_MAX}: use "
                f"Options.pack_bytes"
            )
        self._agent = make_agent("source")
        self._registered: list[object] = []
        try:
            self._register(
                [(address, nbytes, 0, "") for address, nbytes in joined],
                "DRAM",
                "look at `ulimit -l`",
            )
            if gpu is not None:  # each by itself: what touches may be in two allocations
                self._register(
                    [(address, nbytes, gpu.device, "") for address, nbytes in gpu.places],
                    "VRAM",
                    GPU_ADVICE,
                )
            self.metadata: bytes = self._agent.get_agent_metadata()
        except BaseException:
            self.close()
            raise
        self.name: str = self._agent.name
        if len(self.metadata) > AGENT_BYTES_MAX:
            self.close()
            raise NotShared(
                f"NIXL's metadata of {count} places is too large: use Options.pack_bytes"
            )

    @property
    def device(self) -> int:
        """The number of the GPU that has the memory, or ON_HOST."""
        return ON_HOST if self.gpu is None else self.gpu.device

    def _register(
        self, regions: Sequence[tuple[int, int, int, str]], kind: str, advice: str
    ) -> None:
        try:
            self._registered.append(self._agent.register_memory(regions, kind))
        except Exception as error:
            text = (
                f"NIXL cannot register {len(regions)} places in {WORDS[kind]} "
                f"({name_of(error)}): {advice}"
            )
            raise TransportUnavailable(text) from error

    def close(self) -> None:
        """End the agent. When this returns, no read of the memory runs, not even one that was on
        its way. Call it once.
        """
        for registered in self._registered:
            with suppress(Exception):
                self._agent.deregister_memory(registered)
        del self._agent  # ends it
        self.memory = None


def join(places: Iterable[Place]) -> list[Place]:
    """The bytes in fewer places: those that touch, or have only a part of a page between them,
    become one.
    """
    joined: list[Place] = []
    for address, nbytes in sorted(places):
        if joined:
            start, before = joined[-1]
            if address <= -(-(start + before) // mmap.PAGESIZE) * mmap.PAGESIZE:
                joined[-1] = start, max(before, address + nbytes - start)
                continue
        joined.append((address, nbytes))
    return joined


class Exposures:
    """What one worker exposes, by registration. For several threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._made: dict[RegistrationId, Exposed] = {}
        self._is_closed = False

    def __repr__(self) -> str:
        return f"<Exposures of {len(self._made)} registrations>"

    def of(
        self,
        registration: RegistrationId,
        places: Sequence[Place],
        memory: object,
        gpu: OnGpu | None = None,
    ) -> Exposed:
        """The exposure of these places; a new one if the places have changed. Raises as
        `Exposed`.
        """
        with self._lock:
            if self._is_closed:
                raise TransportUnavailable("this worker is about to end")
            found = self._made.get(registration)
            if found is None or (found.places, found.gpu) != (tuple(places), gpu):
                self._end(registration)
                found = self._made[registration] = Exposed(places, memory, gpu)
            return found

    def end(self, registration: RegistrationId) -> None:
        """Its memory may be freed when this returns."""
        with self._lock:
            self._end(registration)

    def _end(self, registration: RegistrationId) -> None:
        found = self._made.pop(registration, None)
        if found is not None:
            found.close()

    def close(self) -> None:
        """End all of them, for good."""
        with self._lock:
            self._is_closed = True
            for registration in list(self._made):
                self._end(registration)
