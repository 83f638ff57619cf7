"""Which of vLLM's models sleep: `sleep` takes the memory of their weights away until `wake_up`.

The methods of vLLM's workers are wrapped, for its own workers do not tell whether they sleep.

Responsible for what was called. Not responsible for what follows from it (`vllm_updater`).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

from tensorhub.errors import StateError


@dataclass
class Sleep:
    """Of a worker's model. `before`: called with the level before its memory goes."""

    is_asleep: bool = False
    before: Callable[[int], None] = lambda level: None

    def check_awake(self) -> None:
        if self.is_asleep:
            raise StateError(
                'the engine sleeps, and its weights have no memory: call wake_up(tags=["weights"]) '
                "first, and then repeat this"
            )


def of(model: nn.Module) -> Sleep:
    state: Sleep = model.__dict__.setdefault("_tensorhub_sleep", Sleep())
    return state


def watch() -> None:
    """Note what is called on the workers of this process. Called any number of times."""
    from vllm.v1.worker.gpu_worker import Worker

    for each in _with_subclasses(Worker):
        for name, noting in (("sleep", _noting_sleep), ("wake_up", _noting_wake)):
            method: Any = vars(each).get(name)
            if method is not None and not hasattr(method, "is_tensorhubs"):
                noted: Any = functools.wraps(method)(noting(method))
                noted.is_tensorhubs = True
                setattr(each, name, noted)


def _with_subclasses(worker: type[Any]) -> Iterator[type[Any]]:
    yield worker
    for each in worker.__subclasses__():
        yield from _with_subclasses(each)


def _noting_sleep(method: Callable[..., Any]) -> Callable[..., Any]:
    def sleep(worker: Any, level: int = 1) -> Any:
        state = of(worker.get_model())
        if not state.is_asleep:
            state.before(level)
        state.is_asleep = True
        return method(worker, level)

    return sleep


def _noting_wake(method: Callable[..., Any]) -> Callable[..., Any]:
    def wake_up(worker: Any, tags: Sequence[str] | None = None) -> Any:
        result = method(worker, tags)
        if tags is None or "weights" in tags:
            of(worker.get_model()).is_asleep = False
        return result

    return wake_up
