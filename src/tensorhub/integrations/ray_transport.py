"""Ray Direct Transport over TensorHub: what an actor's method returns, or `ray.put` takes, is
fetched by TensorHub.

    register_transport()  # in the module of the class, before it: so in each process that has the class

    @ray.remote(enable_tensor_transport=True)  # those that get such tensors, too
    class Trainer:
        @ray.method(tensor_transport="tensorhub")
        def weights(self): return list(self.model.parameters())

The tensors of each object are a version: published when the object is made, in place, and closed
when Ray frees the object. Its metadata carry model and number; each destination fetches them,
verified, from the best source. The coordinator is that of TENSORHUB_ADDRESS, else
"ray-actor://tensorhub".

Responsible for Ray's side of that. Not responsible for weights that change version after version:
those are registered once, and updated in place (`tensorhub.Hub.register`).
"""  # noqa: E501 - lines as they are typed

from __future__ import annotations

import contextlib
import itertools
import os
import threading
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, Final

import ray
import torch
from ray._private.ray_constants import RDT_FETCH_FAIL_TIMEOUT_SECONDS
from ray.experimental.rdt.tensor_transport_manager import (
    CommunicatorMetadata,
    TensorTransportManager,
    TensorTransportMetadata,
)
from ray.experimental.rdt.util import register_tensor_transport, transport_manager_info

from tensorhub import TensorHubError, sync
from tensorhub.api.tools import fetch_into
from tensorhub.integrations.given import bounded
from tensorhub.integrations.ray import location
from tensorhub.integrations.releases import check_calls, check_release
from tensorhub.integrations.reused_memory import ReusedMemory
from tensorhub.logs import get_logger
from tensorhub.memory.tensors import RegisteredMemory
from tensorhub.runtime.loop_thread import finish_blocking

try:
    from ray.experimental.rdt.tensor_transport_manager import FetchRequest
except ImportError:  # before 2.56, which fetches one object after the other

    @dataclass
    class FetchRequest:  # type: ignore[no-redef]
        obj_id: str
        tensors: list[Any]


NAME: Final = "TENSORHUB"
TESTED: Final = ("2.55", "2.56", "2.60")  # releases of Ray that all tests ran with
# Ray gives up after all of it, and cannot say why
FETCH_S: Final = 0.75 * RDT_FETCH_FAIL_TIMEOUT_SECONDS
# an object's destinations serve each other while they fill, which costs each some 4 ms
SERVED_BYTES_MIN: Final = 2**28

log = get_logger("tensorhub.ray")


def register_transport() -> None:
    """Let Ray move tensors by `tensor_transport="tensorhub"`. Once in a process; more often does
    nothing.

    Ray takes it to the actors that are made in this process afterwards, but not to one that it
    restarts. There it is called again by the module of the actor's class, or, where that class is
    of the driver's own script, in `__init__`. Raises StateError for a release of Ray that this was
    not made for.
    """
    check_release(
        "Ray",
        ray.__version__,
        TESTED,
        probe=lambda: check_calls(TensorHubTransport, TensorTransportManager),
    )
    if NAME not in transport_manager_info:
        register_tensor_transport(NAME, ["cpu", "cuda"], TensorHubTransport, torch.Tensor)


@dataclass
class PublishedTensors(TensorTransportMetadata):
    """Where an object's tensors are; their names are their places in the list."""

    model: str = ""
    version: int = 0


class PendingFetch(FetchRequest):
    """A fetch that runs in a thread of its own."""

    def __init__(self, obj_id: str, future: Future[list[Any]]) -> None:
        super().__init__(obj_id, [])
        self.future = future


class TensorHubTransport(TensorTransportManager):
    """One in each process that makes or gets such objects. Ray calls it from several threads."""

    def __init__(self) -> None:
        # of what follows; a number is published before the next one is drawn
        self._lock = threading.Lock()
        self._joined: sync.Hub | None = None
        # by object, until Ray frees it
        self._published: dict[str, tuple[sync.Weights, PublishedTensors]] = {}
        self._numbers = itertools.count(1)
        self._memory = ReusedMemory()

    def tensor_transport_backend(self) -> str:
        return NAME

    @staticmethod
    def is_one_sided() -> bool:
        return True

    @staticmethod
    def can_abort_transport() -> bool:
        """True: the end of one actor blocks no other, so Ray need not kill the actors of a fetch
        that failed.
        """
        return True

    def actor_has_tensor_transport(self, actor: Any) -> bool:
        return True

    def extract_tensor_transport_metadata(
        self, obj_id: str, rdt_object: Sequence[torch.Tensor]
    ) -> PublishedTensors:
        """Publish the tensors of a new object. If Ray asks again after a retried task, return the
        first answer.
        """
        with self._lock:
            if obj_id in self._published:
                return self._published[obj_id][1]
            tensors = [each.detach().contiguous() for each in rdt_object]
            if not tensors:
                return PublishedTensors([], None)
            model, version = f"ray/{ray.get_runtime_context().get_worker_id()}", next(self._numbers)
            hub = self._hub()
            weights = hub.register(model, {str(place): each for place, each in enumerate(tensors)})
            try:
                weights.publish(version)
            except BaseException:
                weights.close(abandon=True)
                raise
            shapes = [(each.shape, each.dtype) for each in tensors]
            published = PublishedTensors(shapes, tensors[0].device.type, model, version)
            self._published[obj_id] = weights, published
            return published

    def get_communicator_metadata(
        self, src_actor: Any, dst_actor: Any, backend: str | None = None
    ) -> CommunicatorMetadata:
        return CommunicatorMetadata()

    def recv_multiple_tensors(
        self,
        obj_id: str,
        tensor_transport_metadata: PublishedTensors,
        communicator_metadata: CommunicatorMetadata,
        target_buffers: Sequence[torch.Tensor] | None = None,
    ) -> list[torch.Tensor]:
        """Fetch an object's tensors, into `target_buffers` in place where there are some."""
        of = tensor_transport_metadata
        if not of.tensor_meta:
            return []
        with self._lock:
            hub = self._hub()
        if target_buffers is None:
            target_buffers = self._allocated(of)
        tensors = {str(place): each for place, each in enumerate(target_buffers)}
        if sum([each.nbytes for each in target_buffers]) < SERVED_BYTES_MIN:
            try:
                finish_blocking(
                    fetch_into(
                        hub._async, of.model, of.version, RegisteredMemory(tensors), timeout=FETCH_S
                    )
                )
            except TensorHubError as error:
                error.memory = "torn"  # the memory may be partly written
                raise
            return list(target_buffers)
        weights = hub.register(of.model, tensors, spot=True)
        try:
            weights.replicate(of.version, timeout=FETCH_S)
        finally:
            # closed in any case, or the error above says more
            with contextlib.suppress(TensorHubError):
                weights.close(abandon=True)
        return list(target_buffers)

    def _allocated(self, of: PublishedTensors) -> list[torch.Tensor]:
        if of.tensor_device == "cpu":
            return self._memory.tensors(of.tensor_meta)
        return [
            torch.empty(shape, dtype=dtype, device=of.tensor_device)
            for shape, dtype in of.tensor_meta
        ]

    def fetch_multiple_tensors(
        self,
        obj_id: str,
        tensor_transport_metadata: PublishedTensors,
        communicator_metadata: CommunicatorMetadata,
        target_buffers: Sequence[torch.Tensor] | None = None,
    ) -> FetchRequest:
        """Begin to fetch new tensors, so that `ray.get` of several objects fetches them
        concurrently. A fetch into the caller's tensors ends before this call returns: they are not
        written once `ray.get` has raised.
        """
        arguments = obj_id, tensor_transport_metadata, communicator_metadata
        if target_buffers is not None:
            return FetchRequest(obj_id, self.recv_multiple_tensors(*arguments, target_buffers))
        future: Future[list[Any]] = Future()

        def fetch() -> None:
            try:
                future.set_result(self.recv_multiple_tensors(*arguments))
            except BaseException as error:
                future.set_exception(error)

        threading.Thread(target=fetch, name=f"tensorhub-get-{obj_id[:8]}", daemon=True).start()
        return PendingFetch(obj_id, future)

    def wait_fetch_complete(self, fetch_request: FetchRequest, timeout: float = -1) -> list[Any]:
        """The tensors. Raises TimeoutError, also where there is no time and they are not here."""
        if not isinstance(fetch_request, PendingFetch):
            return list(fetch_request.tensors)
        return fetch_request.future.result(None if timeout < 0 else timeout)

    def send_multiple_tensors(
        self, tensors: Any, tensor_transport_metadata: Any, communicator_metadata: Any
    ) -> None:
        raise NotImplementedError("whoever wants the tensors fetches them")

    def garbage_collect(
        self, obj_id: str, tensor_transport_meta: PublishedTensors, tensors: Sequence[torch.Tensor]
    ) -> None:
        """Unpublish the object's tensors: they are not read after this."""
        with self._lock:
            weights, published = self._published.pop(obj_id, (None, None))
        if weights is not None:
            try:
                weights.close(abandon=True)
            except TensorHubError as error:
                log.warning(
                    "object_not_closed_well",
                    object=obj_id,
                    version=str(published),
                    reason=str(error),
                )

    def abort_transport(self, obj_id: str, communicator_metadata: CommunicatorMetadata) -> None:
        """Do nothing: a fetch ends by itself, at its deadline at the latest, and blocks no other
        actor.
        """

    def _hub(self) -> sync.Hub:
        if self._joined is None:
            address = os.environ.get("TENSORHUB_ADDRESS", "ray-actor://tensorhub")
            self._joined = sync.connect(
                address, location=location(), options=bounded(None, FETCH_S)
            )
        return self._joined
