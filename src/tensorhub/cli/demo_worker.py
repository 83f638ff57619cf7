"""One child process of the demo: `python -m tensorhub.cli.demo_worker SETTINGS`, started by
`tensorhub demo`.

It is an ordinary user of the public API, over TCP. It digests its tensors' own memory, outside the
library.

Commands of its parent (see `child_processes`): {"do": "step", "version": n} for the trainer, and
{"do": "stop"}. What it says has an "event": ready, published (the trainer), fetched (a rollout),
failed.
"""

from __future__ import annotations

import ctypes
import hashlib
import json
import logging
import sys
import time
from collections.abc import Mapping
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import anyio

import tensorhub
from tensorhub.cli.child_processes import Inbox, Line, Parent
from tensorhub.cli.common import FAILED, USAGE, import_shipped, leaf_of, logs_to_stderr
from tensorhub.cli.demo_results import TRAINER
from tensorhub.errors import TensorHubError, install
from tensorhub.memory.safetensors import Header, read_header
from tensorhub.types import VersionInfo

if TYPE_CHECKING:
    import torch

MODEL = "encoder"


class Model(Protocol):
    """What the demo needs of a model (see examples/encoder.py)."""

    def registered(self) -> torch.nn.Module | dict[str, torch.Tensor]: ...

    def tensors(self) -> dict[str, torch.Tensor]: ...

    def probe(self) -> torch.Tensor: ...


class Trainer(Protocol):
    """What the demo needs of its trainer."""

    def step(self) -> float: ...


@dataclass(frozen=True, slots=True)
class WorkerSettings:
    """What one process is told when it starts, as JSON. The process named TRAINER trains, any other
    is a rollout.
    """

    name: str
    address: str
    weights: str | None
    seed: int
    op_timeout_s: float

    def connect(self) -> AbstractAsyncContextManager[tensorhub.Hub]:
        options = tensorhub.Options(op_timeout_s=self.op_timeout_s)
        return tensorhub.connect(self.address, name=self.name, transports=("tcp",), options=options)


def load_model(settings: WorkerSettings) -> tuple[Any, Model]:
    """The example module and this process' model: with the file's weights for the trainer, with
    zeros for a rollout.

    Raises ModuleNotFoundError without torch, and OSError or ValueError, with their own texts, for a
    bad file.
    """
    import torch

    torch.set_num_threads(1)
    torch.manual_seed(settings.seed)
    example = import_shipped("examples.encoder")
    if settings.name == TRAINER:
        return example, example.load(settings.weights)
    path = Path(settings.weights or example.model_path())
    vocabulary = path.with_name("vocab.txt")
    zeros = zeroed(read_header(path))
    return example, example.build(zeros, vocabulary if vocabulary.is_file() else None)


def zeroed(header: Header) -> dict[str, torch.Tensor]:
    """CPU tensors of these names, shapes and dtypes, in pages that have been touched."""
    import torch

    return {
        entry.name: torch.empty(entry.shape, dtype=getattr(torch, entry.dtype)).zero_()
        for entry in header.entries
    }


def digest(tensors: Mapping[str, torch.Tensor]) -> str:
    """SHA-256 over name, dtype, shape and bytes of CPU tensors, by name; 64 hexadecimal digits."""
    total = hashlib.sha256()
    for name in sorted(tensors):
        tensor = tensors[name].detach().contiguous()
        total.update(f"{name}\0{tensor.dtype}\0{tuple(tensor.shape)}\0".encode())
        if tensor.nbytes:
            total.update((ctypes.c_char * tensor.nbytes).from_address(tensor.data_ptr()))
    return total.hexdigest()


class Worker:
    """This process: its model, and the pipes to the demo."""

    def __init__(self, settings: WorkerSettings) -> None:
        """To be made in a task of the loop. The demo's end ends this process, also while it loads
        its model.
        """
        self._settings = settings
        self._commands = Inbox()
        self._parent = Parent(self._commands.put)

    async def run(self) -> int:
        """Do what the demo says until it says stop; the exit code."""
        try:
            # blocks this loop: there is nothing else to do yet
            example, model = load_model(self._settings)
        except ModuleNotFoundError as error:
            return self._failed("usage", f"{error}: {install('torch')}", USAGE)
        except (OSError, ValueError) as error:
            return self._failed("usage", str(error), USAGE)
        try:
            if self._settings.name == TRAINER:
                await self._train(model, example.Trainer(model))
            else:
                await self._roll_out(model)
        except Exception as error:
            leaf = leaf_of(error)
            if not isinstance(leaf, TensorHubError):
                raise
            return self._failed(type(leaf).__name__, str(leaf), FAILED)
        return 0

    def _say(self, event: str, **fields: object) -> None:
        self._parent.say(event=event, **fields)

    def _failed(self, kind: str, text: str, code: int) -> int:
        self._say("failed", kind=kind, text=text)
        return code

    async def _command(self) -> Line:
        """The next command. It has no deadline: the demo has one, and its end is this process'
        end.
        """
        return await self._commands.get() or {}

    def _ready(self, model: Model) -> dict[str, torch.Tensor]:
        tensors = model.tensors()
        self._say(
            "ready", tensors=len(tensors), nbytes=sum(tensor.nbytes for tensor in tensors.values())
        )
        return tensors

    # ----------------------------------------------------------------------------------------------
    # trainer

    async def _train(self, model: Model, trainer: Trainer) -> None:
        """Make one optimizer step, and one version, for each command."""
        async with self._settings.connect() as hub:
            weights = await hub.register(MODEL, model.registered())
            tensors = self._ready(model)
            while (command := await self._command())["do"] == "step":
                start = time.monotonic()
                async with weights.mutate(command["version"]):
                    free = time.monotonic()
                    # blocks this loop, as trainers do: the library has its own thread
                    loss = trainer.step()
                    stepped = time.monotonic()
                    fields = {
                        "loss": loss,
                        "digest": digest(tensors),
                        "probe": model.probe().tolist(),
                    }
                    checked = time.monotonic()
                self._say(
                    "published",
                    version=command["version"],
                    drain_s=free - start,
                    step_s=stepped - free,
                    publish_s=time.monotonic() - checked,
                    **fields,
                )

    # ----------------------------------------------------------------------------------------------
    # rollout

    async def _roll_out(self, model: Model) -> None:
        """Follow the newest version until told to stop."""
        async with self._settings.connect() as hub:
            weights = await hub.register(MODEL, model.registered(), spot=True)
            tensors = self._ready(model)
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(self._follow, hub, weights, model, tensors)
                while (await self._command())["do"] != "stop":
                    pass
                tasks.cancel_scope.cancel()

    async def _follow(
        self,
        hub: tensorhub.Hub,
        weights: tensorhub.Weights,
        model: Model,
        tensors: dict[str, torch.Tensor],
    ) -> None:
        paused = 0.0

        async def pause(_: VersionInfo) -> None:  # an engine would stop generating here
            nonlocal paused
            paused = time.monotonic()

        async for newest in hub.watch(MODEL):
            report = await weights.update(newest.version, before_write=pause)
            self._say(
                "fetched",
                version=report.version,
                stall_s=time.monotonic() - paused,
                digest=digest(tensors),
                probe=model.probe().tolist(),
                seconds=report.seconds,
                bytes_read=report.bytes_read,
                sources={
                    source.name: source.bytes_read for source in report.sources if source.bytes_read
                },
            )


async def main() -> int:
    logs_to_stderr(logging.ERROR)  # a warning that nothing is published yet would say nothing new
    return await Worker(WorkerSettings(**json.loads(sys.argv[1]))).run()


if __name__ == "__main__":
    sys.exit(anyio.run(main))
