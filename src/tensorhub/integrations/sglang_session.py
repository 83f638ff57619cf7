"""The messages between a trainer and the ranks of an SGLang engine.

SGLang's interface takes named tensors. The trainer sends a tensor without elements: its name is the
trainer's order, so nothing of a weight goes this way. SGLang reports only that a loader has
returned: an exception in it ends the engine. So the loader keeps its report, and the trainer asks
for it by the name of a parameter that no model has.

Responsible for these texts. Not responsible for sending them.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Literal, Self

import torch

from tensorhub.errors import BY_NAME, InvalidValue, Memory, StateError, TensorHubError, shown
from tensorhub.integrations.http_calls import parsed

Purpose = Literal["update", "check", "join", "show", "fleet"]
LOADER = "tensorhub.integrations.sglang.load"
PREFIX = "tensorhub:"
# names of parameters, by which a trainer asks the loader
REPORT = f"{PREFIX}report"
ASLEEP = f"{PREFIX}asleep"  # 1 if the weights have no memory, else 0
TORN = f"{PREFIX}torn"  # 1 if the weights are torn, else 0
SLEEPS = (
    "the engine sleeps, and its weights have no memory: call "
    'resume_memory_occupation(tags=["weights"]) first, and then repeat this'
)
IN_FLEET = "this engine is one of a fleet, and has its versions by `OneVersion`"
# releases of SGLang that the tests ran with
TESTED = ("0.5.10", "0.5.12", "0.5.15", "0.5.23")
SESSIONS_SINCE = (0, 5, 21)  # releases that refuse an update outside of a session


def has_sessions(release: str) -> bool:
    """Whether this release of SGLang wants begin_weight_update and end_weight_update."""
    return tuple(int(part) for part in release.split(".")[:3] if part.isdigit()) >= SESSIONS_SINCE


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
    """What an engine's loader is to do. `purpose`: take this version, compare what the engine has
    with it, join the cluster, or a fleet with one version, or note the models that it is called
    with, of which one is the draft's. `replica`: the trainer's word for this engine. `unused`:
    names of published tensors, with `*`, that the model's loader may leave alone. `has_draft`: the
    draft model takes the version, too. `adapter`: one that the engine has loaded, MODEL@VERSION,
    which is to be that version still. `fleet`: settings of `one_version_engine.Engine`. `nonce`: a
    word that no other order has.
    """

    address: list[str]
    model: str
    replica: str
    purpose: Purpose = "update"
    version: int = -1
    content_id: str | None = None
    host_memory_bytes: int = 0
    timeout_s: float = 300.0
    unused: tuple[str, ...] = ()
    has_draft: bool = False
    adapter: str = ""
    fleet: Mapping[str, Any] = field(default_factory=dict)
    nonce: str = ""

    def lasting(self) -> Self:
        """What of it holds for later orders, too."""
        once: dict[str, Any] = {"version": -1, "content_id": None, "adapter": "", "nonce": ""}
        return replace(self, purpose="join", fleet={}, **once)

    def tensors(self) -> list[tuple[str, torch.Tensor]]:
        return [(PREFIX + json.dumps(asdict(self)), torch.empty(0))]

    @classmethod
    def of(cls, named_tensors: Sequence[tuple[str, torch.Tensor]]) -> Self:
        if len(named_tensors) == 1 and named_tensors[0][0].startswith(PREFIX):
            fields = json.loads(named_tensors[0][0].removeprefix(PREFIX))
            if unknown := sorted(fields.keys() - cls.__dataclass_fields__.keys()):
                raise InvalidValue(
                    f"a trainer of another release orders {unknown}: install the same"
                )
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
            kind = next(each.__name__ for each in type(error).__mro__ if each.__name__ in BY_NAME)
            return cls(kind, f"{error}", memory, tuple(getattr(error, "differences", ())))
        return cls("StateError", f"{type(error).__name__}: {error}", memory)

    def error(self) -> TensorHubError:
        error = BY_NAME.get(f"{self.kind}", StateError)(
            f"{self.text} [the engine's weights are {self.memory}]"
        )
        error.memory = self.memory
        if self.differences:
            error.differences = tuple(self.differences)  # type: ignore[attr-defined]
        return error


@dataclass(frozen=True)
class Report:
    """What a loader says of the last order that it was given: its `nonce`, and how it has failed,
    if so. `url`: of the seat in a fleet that it has joined.
    """

    nonce: str
    failed: Outcome | None = None
    url: str = ""

    def encode(self) -> list[float]:
        """As SGLang passes on a parameter: in numbers."""
        return [float(byte) for byte in json.dumps(asdict(self)).encode()]

    @classmethod
    def decode(cls, numbers: object) -> Self | None:
        """None: these numbers are no report."""
        try:
            said = parsed(bytes(int(each) for each in numbers))  # type: ignore[attr-defined]
            failed = said.pop("failed")
            if failed is not None:
                failed = Outcome(**{**failed, "differences": tuple(failed["differences"])})
            return cls(f"{said.pop('nonce')}", failed, f"{said.pop('url', '')}", **said)
        except (TypeError, ValueError, AttributeError, KeyError, OverflowError):
            return None
