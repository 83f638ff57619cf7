"""Buffers for frameworks that hand weights over, and take them, one tensor at a time.

A generator's tensors are gone when it goes on, and are not announced beforehand. So such an
interface forces two copies: one at the sender, into buffers that are allocated and registered at
the first update, and stay; and one at each receiver, into buffers that are a replica of its own and
a source for further readers. Each has the memory of one full copy of the weights. An update is one
version, and a tensor is handed over only when all of its version is verified.

Responsible for these buffers. Not responsible for messages between processes, which each framework
sends in its own way.
"""

from __future__ import annotations

import contextlib
import secrets
import time
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from tensorhub import sync
from tensorhub.api.hub import Hub
from tensorhub.api.tools import published_tensors
from tensorhub.api.weights import Weights
from tensorhub.errors import InvalidValue, RegistrationError, VersionConflict, shown, some
from tensorhub.integrations.readers import Readers
from tensorhub.logs import get_logger
from tensorhub.types import FetchReport

if TYPE_CHECKING:
    import torch

    Items = Iterable[tuple[str, torch.Tensor]]

log = get_logger(__name__)


@dataclass(frozen=True, slots=True)
class Sent:
    """What one update cost its sender. `copy_s`: the generator's own work is in it. `changed`:
    False where the buffers held that version already.
    """

    version: int
    nbytes: int
    copy_s: float
    seconds: float
    changed: bool = True


class Sender:
    """Publishes generators' tensors as versions of one model. Generators run in the caller's
    thread, which blocks: they may queue work on a GPU or take part in collectives. If an update
    fails, the generator is still run to its end: other ranks may wait in its collectives.
    """

    def __init__(
        self,
        hub: sync.Hub,
        model: str,
        *,
        device: str | torch.device = "cpu",
        timeout_s: float | None = None,
        allow_no_readers: bool = False,
    ) -> None:
        self._hub = hub
        self._model = model
        self._device = device
        self._timeout_s = timeout_s
        self._group = f"trainer-{secrets.token_hex(8)}"
        self._readers = Readers(hub, model, self._group, are_optional=allow_no_readers)
        self._buffers: dict[str, torch.Tensor] = {}
        self._weights: sync.Weights | None = None

    @property
    def version(self) -> int | None:
        """What the buffers hold and serve."""
        return None if self._weights is None else self._weights.version

    @property
    def nbytes(self) -> int:
        return sum(buffer.nbytes for buffer in self._buffers.values())

    def send(self, version: int, items: Items) -> Sent:
        """Copy each tensor, then publish all of them. If the generator raises, nothing is
        published.

        A version that is held already is compared with what comes, and stays. Raises
        RegistrationError (other names, shapes or dtypes than the first time, all listed),
        VersionConflict (the number was used, for other weights), StateError (nothing reads what was
        published before: `allow_no_readers`), and as `Weights.mutate`.
        """
        left, began = iter(items), time.perf_counter()
        try:
            if self._weights is not None and self._weights.version == version:
                copied = self._compare(version, left)
                return Sent(version, self.nbytes, copied - began, copied - began, changed=False)
            self._readers.check(self.version, self._timeout_s)
            copied = (
                self._first(version, left)
                if self._weights is None
                else self._next(self._weights, version, left)
            )
            return Sent(version, self.nbytes, copied - began, time.perf_counter() - began)
        except Exception:
            with contextlib.suppress(Exception):
                for _ in left:
                    pass
            raise

    def _first(self, version: int, items: Items) -> float:
        import torch

        buffers: dict[str, torch.Tensor] = {}
        twice = []
        with torch.no_grad():
            for name, tensor in items:
                if name in buffers:
                    twice.append(repr(name))
                    continue
                buffers[name] = _empty(tuple(tensor.shape), tensor.dtype, self._device)
                buffers[name].copy_(tensor)
        if twice:
            raise RegistrationError(f"{len(twice)} name(s) came twice in one update: {some(twice)}")
        copied = time.perf_counter()
        weights = self._hub.register(self._model, buffers, group=self._group)
        self._buffers, self._weights = buffers, weights
        log.info(
            "send_buffers",
            model=self._model,
            tensors=len(buffers),
            nbytes=self.nbytes,
            device=str(self._device),
        )
        weights.publish(version, self._timeout_s)
        return copied

    def _next(self, weights: sync.Weights, version: int, items: Items) -> float:
        import torch

        with weights.mutate(version, self._timeout_s), torch.no_grad():
            differences = _Differences(self._buffers)
            for name, tensor in items:
                if differences.fits(name, tensor):
                    self._buffers[name].copy_(tensor)
            differences.check()
            return time.perf_counter()

    def _compare(self, version: int, items: Items) -> float:
        import torch

        differences, changed = _Differences(self._buffers), []
        for name, tensor in items:
            if differences.fits(name, tensor) and not torch.equal(
                _words(self._buffers[name]), _words(tensor)
            ):
                changed.append(repr(name))
        differences.check()
        if changed:
            text = (
                f"version {version} of {self._model!r} is published, with other bytes in "
                f"{len(changed)} tensor(s)"
            )
            raise VersionConflict(f"{text}: {some(changed)}. Give each update a number of its own")
        return time.perf_counter()

    def close(self) -> None:
        """Unpublish the version, and free the buffers."""
        weights, self._weights = self._weights, None
        if weights is not None:
            weights.close()
        self._buffers = {}


def _words(tensor: torch.Tensor) -> torch.Tensor:
    """Its bytes on the CPU: two NaNs are equal where their bytes are."""
    import torch

    return tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)


class _Differences:
    """What one update has other than the buffers have."""

    def __init__(self, buffers: dict[str, torch.Tensor]) -> None:
        self._buffers = buffers
        self._missing = dict.fromkeys(buffers)
        self._found: list[str] = []

    def fits(self, name: str, tensor: torch.Tensor) -> bool:
        buffer = self._buffers.get(name)
        if buffer is None:
            self._found.append(f"{name!r} is new")
        elif name not in self._missing:
            self._found.append(f"{name!r} came twice")
        elif (tuple(buffer.shape), buffer.dtype) != (tuple(tensor.shape), tensor.dtype):
            its, was = (
                f"{each.dtype} {tuple(each.shape)}".removeprefix("torch.")
                for each in (tensor, buffer)
            )
            self._found.append(f"{name!r} is {its}, and was {was}")
        else:
            del self._missing[name]
            return True
        self._missing.pop(name, None)
        return False

    def check(self) -> None:
        found = [*self._found, *[f"{name!r} is missing" for name in self._missing]]
        if found:
            text = (
                f"{len(found)} tensor(s) are not those of the first update: "
                f"{some(found, '; ', most=100)}"
            )
            raise RegistrationError(f"{text}. Each update has the same names, shapes and dtypes")


class Receiver:
    """Buffers that hold one version of a model, and serve it to readers. Its hub may be used from
    several event loops.
    """

    def __init__(self, hub: Hub, model: str, *, device: str | torch.device = "cpu") -> None:
        self._hub = hub
        self._model = model
        self._device = device
        self._buffers: dict[str, torch.Tensor] = {}
        self._weights: Weights | None = None

    async def receive(
        self, version: int, timeout_s: float
    ) -> tuple[dict[str, torch.Tensor], FetchReport]:
        """Wait for that version, and fill the buffers with it. They must not be written, and hold
        it until the next call.

        Raises OperationTimeout (it was not published in time), VersionUnavailable (it is gone
        already), ManifestMismatch (other names, shapes or dtypes than the first time, all listed),
        and as `Weights.update`.
        """
        import torch

        deadline = time.monotonic() + timeout_s

        def left_s() -> float:
            return max(0.0, deadline - time.monotonic())

        await self._hub.wait_for(self._model, at_least=version, timeout=left_s())
        if self._weights is None:
            kinds = (await published_tensors(self._hub, self._model, version, left_s())).kinds
            buffers = {
                name: _empty(shape, getattr(torch, dtype), self._device)
                for name, (dtype, shape) in kinds.items()
            }
            self._weights = await self._hub.register(self._model, buffers)
            self._buffers = buffers
            nbytes = sum(buffer.nbytes for buffer in buffers.values())
            log.info(
                "receive_buffers",
                model=self._model,
                tensors=len(buffers),
                nbytes=nbytes,
                device=str(self._device),
            )
        report = await self._weights.update(version, timeout=left_s())
        return self._buffers, report

    async def close(self) -> None:
        """Leave the cluster, and free the buffers."""
        self._buffers, self._weights = {}, None
        await self._hub.close()


def _empty(shape: tuple[int, ...], dtype: torch.dtype, device: str | torch.device) -> torch.Tensor:
    import torch

    try:
        return torch.empty(shape, dtype=dtype, device=device)
    except (RuntimeError, AssertionError) as error:  # the latter from a torch without CUDA
        reason = str(error).partition("\n")[0]
        raise InvalidValue(
            f"device={shown(str(device))}: a buffer for a tensor of shape {shape} cannot be made "
            f"there ({reason}). Give "
            f"device='cpu', or 'cuda' in a process that has a GPU with room for all weights"
        ) from error
