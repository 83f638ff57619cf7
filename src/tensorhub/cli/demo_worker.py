"""One process of the demo: `python -m tensorhub.cli.demo_worker trainer|rollout ...`, started by `tensorhub demo`.

Each is an ordinary user of the public API, over TCP. Orders come in on stdin and events go out on stdout, each a JSON
object on a line of its own; the end of stdin means that the demo is gone, and ends this process at once. The digests
are computed here, from the tensors' own memory, outside the library.

Orders: {"do": "step", "version": n} (to the trainer), {"do": "stop"}.
Events: ready, published (trainer), retry and fetched (rollout), failed.
"""

from __future__ import annotations

import argparse
import ctypes
import hashlib
import importlib
import importlib.util
import json
import logging
import os
import queue
import sys
import threading
import time
from collections.abc import Mapping
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import anyio
import anyio.to_thread

import tensorhub
from tensorhub.cli.common import leaf_of, logs_to_stderr
from tensorhub.errors import TensorHubError
from tensorhub.memory.safetensors import Header, read_header
from tensorhub.types import FetchReport, VersionInfo

if TYPE_CHECKING:
    import torch

MODEL = "encoder"
ATTEMPTS_MAX = 50  # of one fetch; each begins with the version that is the newest by then


class Model(Protocol):
    """What the demo needs of a model (see examples/encoder.py)."""

    def registered(self) -> torch.nn.Module | dict[str, torch.Tensor]: ...

    def tensors(self) -> dict[str, torch.Tensor]: ...

    def probe(self) -> torch.Tensor: ...


class Trainer(Protocol):
    """What the demo needs of its trainer."""

    def step(self) -> float: ...


@dataclass(frozen=True, slots=True)
class Settings:
    """The command line of one process."""

    role: str
    name: str
    address: str
    weights: Path | None
    seed: int
    op_timeout_s: float

    @classmethod
    def parse(cls, arguments: list[str] | None = None) -> Settings:
        parser = argparse.ArgumentParser(prog="tensorhub.cli.demo_worker")
        parser.add_argument("role", choices=("trainer", "rollout"))
        parser.add_argument("--name", required=True)
        parser.add_argument("--address", required=True)
        parser.add_argument("--weights", type=Path)
        parser.add_argument("--seed", type=int, default=0)
        parser.add_argument("--op-timeout-s", type=float, default=60.0)
        return cls(**vars(parser.parse_args(arguments)))

    def connect(self) -> AbstractAsyncContextManager[tensorhub.Hub]:
        options = tensorhub.Options(op_timeout_s=self.op_timeout_s)
        return tensorhub.connect(self.address, name=self.name, transports=("tcp",), options=options)


class Wire:
    """The two pipes to the demo."""

    def __init__(self) -> None:
        """Takes stdout for events alone: whatever else is printed goes to stderr."""
        self._out = os.dup(1)
        os.dup2(2, 1)
        self._orders: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()
        threading.Thread(target=self._listen, name="orders", daemon=True).start()

    def _listen(self) -> None:
        with open(0, "rb", buffering=0, closefd=False) as stdin:  # unbuffered: no lock is held at exit
            for line in stdin:
                self._orders.put(json.loads(line))
        os._exit(1)

    async def order(self) -> dict[str, Any]:
        """The next order. Waits without a deadline: the demo has one, and its end is ours."""
        return await anyio.to_thread.run_sync(self._orders.get, abandon_on_cancel=True)

    def say(self, event: str, **fields: object) -> None:
        line = memoryview(json.dumps({"event": event, **fields}).encode() + b"\n")
        while line:
            line = line[os.write(self._out, line) :]


def load_example() -> Any:
    """The module examples/encoder.py: a part of an installed TensorHub, in a source tree a file of its own."""
    try:
        return importlib.import_module("tensorhub._examples.encoder")
    except ModuleNotFoundError as error:
        if error.name not in ("tensorhub._examples", "tensorhub._examples.encoder"):
            raise
    path = Path(__file__).parents[3] / "examples" / "encoder.py"
    spec = importlib.util.spec_from_file_location("tensorhub_example_encoder", path)
    if spec is None or spec.loader is None or not path.is_file():
        raise FileNotFoundError(f"this installation of TensorHub has no example model ({path})")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def load_model(settings: Settings) -> tuple[Any, Model]:
    """The example module and this process' model: the trainer's with the file's weights, a rollout's with zeros.

    ModuleNotFoundError without torch; OSError or ValueError, in the words of who found it, for a bad file.
    """
    import torch

    torch.set_num_threads(1)
    torch.manual_seed(settings.seed)
    example = load_example()
    if settings.role == "trainer":
        return example, example.load(settings.weights)
    path = settings.weights or example.model_path()
    vocabulary = path.with_name("vocab.txt")
    zeros = zeroed(read_header(path))
    return example, example.build(zeros, vocabulary if vocabulary.is_file() else None)


def zeroed(header: Header) -> dict[str, torch.Tensor]:
    """CPU tensors of these names, shapes and dtypes, in pages that have been touched."""
    import torch

    return {entry.name: torch.empty(entry.shape, dtype=getattr(torch, entry.dtype)).zero_() for entry in header.entries}


def digest(tensors: Mapping[str, torch.Tensor]) -> str:
    """SHA-256 over name, dtype, shape and bytes of CPU tensors, by name; 64 hexadecimal digits."""
    total = hashlib.sha256()
    for name in sorted(tensors):
        tensor = tensors[name].detach().contiguous()
        total.update(f"{name}\0{tensor.dtype}\0{tuple(tensor.shape)}\0".encode())
        if tensor.nbytes:
            total.update((ctypes.c_char * tensor.nbytes).from_address(tensor.data_ptr()))
    return total.hexdigest()


def _ready(wire: Wire, model: Model) -> dict[str, torch.Tensor]:
    tensors = model.tensors()
    wire.say("ready", tensors=len(tensors), nbytes=sum(tensor.nbytes for tensor in tensors.values()))
    return tensors


# ----------------------------------------------------------------------------------------------------------- trainer


async def train(settings: Settings, wire: Wire, model: Model, trainer: Trainer) -> None:
    """Make one optimizer step, and one version, for each order."""
    async with settings.connect() as hub:
        weights = await hub.register(MODEL, model.registered())
        tensors = _ready(wire, model)
        while (order := await wire.order())["do"] == "step":
            start = time.monotonic()
            async with weights.mutate(order["version"]):
                free = time.monotonic()
                loss = trainer.step()  # blocks this loop, as trainers do: the library has its own thread
                stepped = time.monotonic()
                fields = {"loss": loss, "digest": digest(tensors), "probe": model.probe().tolist()}
                checked = time.monotonic()
            wire.say(
                "published",
                version=order["version"],
                drain_s=free - start,
                step_s=stepped - free,
                publish_s=time.monotonic() - checked,
                **fields,
            )


# ----------------------------------------------------------------------------------------------------------- rollout


async def roll_out(settings: Settings, wire: Wire, model: Model) -> None:
    """Follow the newest version until told to stop."""
    async with settings.connect() as hub:
        weights = await hub.register(MODEL, model.registered(), spot=True)
        tensors = _ready(wire, model)
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(_follow, hub, weights, model, tensors, wire)
            while (await wire.order())["do"] != "stop":
                pass
            tasks.cancel_scope.cancel()


async def _follow(
    hub: tensorhub.Hub, weights: tensorhub.Weights, model: Model, tensors: dict[str, torch.Tensor], wire: Wire
) -> None:
    held = -1
    async for newest in hub.watch(MODEL):
        if newest.version <= held:
            continue
        report, stall_s, attempts = await _update(weights, wire)
        held = report.version
        wire.say(
            "fetched",
            version=held,
            stall_s=stall_s,
            attempts=attempts,
            digest=digest(tensors),
            probe=model.probe().tolist(),
            report=plain(report),
        )


async def _update(weights: tensorhub.Weights, wire: Wire) -> tuple[FetchReport, float, int]:
    """Take the newest version: the report, the seconds in which the weights were of no use, and the attempts.

    An error that a retry may cure is retried: a version that is superseded while it moves is gone, its successor is
    there.
    """
    paused: float | None = None

    async def pause(_: VersionInfo) -> None:  # an engine would stop generating here
        nonlocal paused
        paused = paused or time.monotonic()

    for attempt in range(1, ATTEMPTS_MAX + 1):
        try:
            report = await weights.update("latest", before_write=pause)
        except TensorHubError as error:
            if not error.retryable or attempt == ATTEMPTS_MAX:
                raise
            wire.say("retry", kind=type(error).__name__, text=str(error))
            await anyio.sleep(min(0.05 * attempt, 1.0))
        else:
            break
    return report, (time.monotonic() - paused if paused is not None else 0.0), attempt


def plain(report: FetchReport) -> dict[str, object]:
    """The report as JSON values."""
    sources = [
        {
            "name": source.name,
            "transport": source.transport,
            "bytes_read": source.bytes_read,
            "seconds": source.seconds,
            "outcome": source.outcome,
        }
        for source in report.sources
    ]
    return {
        "seconds": report.seconds,
        "bytes_read": report.bytes_read,
        "reread_bytes": report.reread_bytes,
        "retries": report.retries,
        "phases": dict(report.phases),
        "sources": sources,
    }


# -------------------------------------------------------------------------------------------------------------- main


def main() -> int:
    settings = Settings.parse()
    wire = Wire()
    logs_to_stderr(logging.ERROR)  # that it waits for the first version is its ordinary beginning
    try:
        example, model = load_model(settings)
    except ModuleNotFoundError as error:
        wire.say("failed", kind="usage", text=f"{error}: pip install 'tensorhub[torch]'")
        return 2
    except (OSError, ValueError) as error:
        wire.say("failed", kind="usage", text=str(error))
        return 2
    try:
        if settings.role == "trainer":
            anyio.run(train, settings, wire, model, example.Trainer(model))
        else:
            anyio.run(roll_out, settings, wire, model)
    except Exception as error:
        leaf = leaf_of(error)
        if not isinstance(leaf, TensorHubError):
            raise
        wire.say("failed", kind=type(leaf).__name__, text=str(leaf))
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
