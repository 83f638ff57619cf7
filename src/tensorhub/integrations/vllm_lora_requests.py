"""vLLM: an adapter's published version is loaded before a request that names it is queued.

vLLM itself loads an adapter in the step that first needs it, where a failure ends the engine. Here
a version that cannot be loaded is its request's error. What queued requests need stays loadable
without a fetch, whatever becomes of the publication. The engine stands still while it loads, as it
does for vLLM's files.

Responsible for that order, in vLLM's process with the scheduler. Not responsible for loading
(`vllm_lora`), which is done in the workers.
"""

from __future__ import annotations

import functools
import inspect
import math
import time
from collections.abc import Callable
from typing import Any, Final

from tensorhub.integrations.adapters import SCHEME
from tensorhub.integrations.vllm_lora import load_on_all

# of an engine: numbers that its workers need not fetch, and until when they are not asked
LOADABLE: Final = "_tensorhub_adapters"
LOOK_S: Final = 1.0  # a version that is published anew is found after that time


def watch() -> None:
    """Have the engines of this process do it. Called any number of times."""
    from vllm.v1.engine.core import EngineCore
    from vllm.v1.engine.llm_engine import LLMEngine

    if hasattr(EngineCore.add_request, "is_tensorhubs"):
        return

    def add_request(add: Callable[..., Any], core: Any, request: Any, *given: Any) -> Any:
        lora = request.lora_request
        if _is_ours(lora):
            try:
                _load(core, lora)
            except Exception as error:
                if not hasattr(core, "output_queue"):  # the caller's process
                    raise
                return _refuse(core, request, f"{type(error).__name__}: {error}")
        return add(core, request, *given)

    def add_lora(add: Callable[..., Any], core: Any, lora_request: Any) -> Any:
        return _load(core, lora_request) if _is_ours(lora_request) else add(core, lora_request)

    def remove_or_call(call: Callable[..., Any], core: Any, *given: Any, **named: Any) -> Any:
        core.__dict__.pop(LOADABLE, None)  # the call may have adapters given up
        return call(core, *given, **named)

    def add_to_engine(add: Callable[..., Any], engine: Any, *given: Any, **named: Any) -> Any:
        """Before the request is known to the engine, which would wait for its answer."""
        found = inspect.signature(add).bind(engine, *given, **named).arguments
        lora = found.get("lora_request") or getattr(found["prompt"], "lora_request", None)
        if _is_ours(lora):
            engine.add_lora(lora)
        return add(engine, *given, **named)

    _wrap(EngineCore, "add_lora", add_lora)
    _wrap(EngineCore, "remove_lora", remove_or_call)
    _wrap(EngineCore, "collective_rpc", remove_or_call)
    _wrap(LLMEngine, "add_request", add_to_engine)
    _wrap(EngineCore, "add_request", add_request)


def _wrap(owner: type[Any], name: str, wrapper: Callable[..., Any]) -> None:
    method = getattr(owner, name)

    @functools.wraps(method)  # vLLM reads the signature
    def wrapped(self: Any, *given: Any, **named: Any) -> Any:
        return wrapper(method, self, *given, **named)

    wrapped.is_tensorhubs = True  # type: ignore[attr-defined]
    setattr(owner, name, wrapped)


def _is_ours(lora: Any) -> bool:
    return lora is not None and lora.lora_path.startswith(SCHEME)


def _load(core: Any, lora: Any) -> bool:
    loadable: dict[int, float] = core.__dict__.setdefault(LOADABLE, {})
    if loadable.get(lora.lora_int_id, -math.inf) < time.monotonic() or lora.load_inplace:
        queued = [each.lora_request for each in core.scheduler.requests.values()]
        needed = sorted({each.lora_int_id for each in (lora, *queued) if each is not None})
        told = core.model_executor.collective_rpc(load_on_all, args=(lora, needed))
        for error, _ in told:
            if error is not None:
                raise error
        left = set.intersection(*(set(numbers) for _, numbers in told))
        loadable = {number: loadable.get(number, -math.inf) for number in left}
        if lora.lora_int_id in left:
            loadable[lora.lora_int_id] = time.monotonic() + LOOK_S
        core.__dict__[LOADABLE] = loadable
    return True


def _refuse(core: Any, request: Any, reason: str) -> None:
    """Answer one request with an error."""
    ids, client = [request.request_id], request.client_index
    try:
        from vllm.outputs import RequestError  # 0.33
        from vllm.v1.engine import FinishReason
    except ImportError:
        core._send_error_outputs_to_client(ids, client)
        return
    error = RequestError(code="validation_error", message=reason)
    core._send_finish_outputs_to_client(ids, client, FinishReason.ERROR, error)
