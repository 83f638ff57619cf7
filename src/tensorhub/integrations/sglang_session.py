"""The messages between a trainer and the ranks of an SGLang engine in a session of a weight update.

SGLang's interface takes named tensors. The trainer sends a tensor without elements: its name is the
trainer's order, so nothing of a weight goes this way. SGLang reports only that a loader has
returned: an exception in it ends the engine. So the loader keeps an outcome, which SGLang's next
answer carries (`sglang_engine.Answer`).

Responsible for these two texts. Not responsible for sending them.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, Self

import torch

from tensorhub.errors import BY_NAME, InvalidValue, Memory, StateError, TensorHubError, shown
from tensorhub.integrations.releases import check_release

LOADER = "tensorhub.integrations.sglang.load"
PREFIX = "tensorhub:"
SUPPORTED = ("0.5.23",)  # releases of SGLang with the hooks that this module uses


def check_sglang(release: str) -> None:
    """Raise StateError unless this release of SGLang is supported."""
    check_release("SGLang", release, SUPPORTED)


def check_loader(engine: str, loaders: Sequence[str] | None) -> None:
    """Raise StateError unless the engine was started with our loader. Without it the first update
    would end the engine.
    """
    if LOADER not in (loaders or ()):
        raise StateError(
            f"{engine} was started without TensorHub's loader, and the first update would end it: "
            f"start it with "
            f"--custom-weight-loader {LOADER} (an sglang.Engine with custom_weight_loader=[...])"
        )


@dataclass(frozen=True)
class Order:
    """Of which version the engine is to be made, and how. `replica`: the trainer's word for this
    engine. `unused`: names of published tensors, with `*`, that the model's loader may leave alone.
    """

    address: list[str]
    model: str
    replica: str
    version: int
    content_id: str | None = None
    host_memory_bytes: int = 0
    timeout_s: float = 300.0
    unused: tuple[str, ...] = ()

    def tensors(self) -> list[tuple[str, torch.Tensor]]:
        return [(PREFIX + json.dumps(asdict(self)), torch.empty(0))]

    @classmethod
    def of(cls, named_tensors: Sequence[tuple[str, torch.Tensor]]) -> Self:
        if len(named_tensors) == 1 and named_tensors[0][0].startswith(PREFIX):
            fields = json.loads(named_tensors[0][0].removeprefix(PREFIX))
            return cls(**{**fields, "unused": tuple(fields["unused"])})
        names = shown([name for name, _ in named_tensors])
        raise InvalidValue(
            f"{LOADER} was given tensors of its own, {names}: it takes none. Let "
            f"tensorhub.integrations.sglang.Trainer call "
            "it, or load these tensors without load_format="
        )


@dataclass(frozen=True)
class Outcome:
    """How an update has failed, on one rank or on all."""

    kind: str
    text: str
    memory: Memory
    differences: tuple[str, ...] = ()

    @classmethod
    def of(cls, error: Exception, memory: Memory) -> Self:
        if isinstance(error, TensorHubError):
            return cls(
                type(error).__name__, f"{error}", memory, tuple(getattr(error, "differences", ()))
            )
        return cls("StateError", f"{type(error).__name__}: {error}", memory)

    def message(self) -> str:
        return PREFIX + json.dumps(asdict(self))

    @staticmethod
    def error(message: str) -> TensorHubError:
        """What SGLang has answered, as an error. What does not come from the loader was refused
        before it.
        """
        if not message.startswith(PREFIX):
            return StateError(f"SGLang has refused: {message}")
        said: dict[str, Any] = json.loads(message.removeprefix(PREFIX))
        error = BY_NAME.get(said["kind"], StateError)(
            f"{said['text']} [the engine's weights are {said['memory']}]"
        )
        error.memory = said["memory"]
        if said["differences"]:
            error.differences = tuple(said["differences"])  # type: ignore[attr-defined]
        return error
