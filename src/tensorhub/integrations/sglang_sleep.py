"""SGLang's `release_memory_occupation` takes the memory of an engine's weights away, until
`resume_memory_occupation`.

Responsible for whether that is so now, and for telling it before it happens. Not responsible for
what follows from it (`sglang_engine`).
"""

from __future__ import annotations

import functools
import sys
import weakref
from collections.abc import Callable
from typing import Any, Protocol

from sglang.srt.constants import GPU_MEMORY_TYPE_WEIGHTS
from sglang.srt.utils.torch_memory_saver_adapter import TorchMemorySaverAdapter


class Told(Protocol):
    def before_sleep(self) -> None: ...


_told: weakref.WeakSet[Told] = weakref.WeakSet()


def watch(told: Told) -> None:
    """Have `before_sleep` called before the memory of this process's weights goes."""
    _told.add(told)
    for each in TorchMemorySaverAdapter.__subclasses__():
        if not hasattr(each.pause, "is_tensorhubs"):
            each.pause = _telling(each.pause)


def _telling(pause: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(pause)
    def telling(adapter: Any, tag: str) -> Any:
        if tag == GPU_MEMORY_TYPE_WEIGHTS:
            for each in list(_told):
                each.before_sleep()
        return pause(adapter, tag)

    telling.is_tensorhubs = True  # type: ignore[attr-defined]
    return telling


def is_asleep() -> bool:
    """Whether the engine that calls the loader has given the memory of its weights away. Only
    SGLang's scheduler knows: it is among the callers.
    """
    frame = sys._getframe()
    while (caller := frame.f_back) is not None:
        tags = getattr(caller.f_locals.get("self"), "offload_tags", None)
        if tags is not None:
            return GPU_MEMORY_TYPE_WEIGHTS in tags
        frame = caller
    return False


def sleeps(scheduler: Any) -> bool:
    """Whether the memory of this scheduler's weights is away, or coming back: SGLang writes them
    last of all.
    """
    its = getattr(scheduler, "weight_updater", scheduler)
    is_away = GPU_MEMORY_TYPE_WEIGHTS in its.offload_tags
    return is_away or getattr(its, "stashed_model_static_state", None) is not None
