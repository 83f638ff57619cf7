"""A module's state besides its parameters and buffers: extra state, state that its class saves
itself, quantization.

A tensor that a module saves in place, one object each time, is carried as a parameter is.
Everything else stays behind, and can only be named. Not responsible for the walk through modules
(`resolving`), nor for warning the caller (`hub`).

torch is never imported here. A caller with a module has imported it already.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from io import BytesIO
from typing import Any

from tensorhub.errors import text_of
from tensorhub.memory.describing import fault_of, is_torch, kind_of

PLAIN = "a tensor, and neither a parameter nor a buffer"
QUANTIZATION = ("quant_state", "SCB")  # what bitsandbytes keeps at a parameter


def saves_more(kind: type) -> bool:
    """Whether modules of this class may save more than their parameters and buffers."""
    base = sys.modules["torch"].nn.Module
    return any(
        getattr(kind, name) is not getattr(base, name)
        for name in ("get_extra_state", "_save_to_state_dict")
    )


def saved_beside(module: Any) -> tuple[dict[str, Any], dict[str, str]]:
    """What such a module saves besides its parameters and buffers, by name: the tensors that are
    carried; and why each other thing is left out. Runs the module's code, and none of its hooks.
    """
    try:
        saved, again = dict[str, Any](), dict[str, Any]()
        module._save_to_state_dict(saved, "", True)
        module._save_to_state_dict(again, "", True)
    except Exception as error:
        return {}, {
            "_extra_state": f"{kind_of(module)} cannot tell its state: {text_of(error):.200}"
        }
    known = [
        each
        for each in (*module._parameters.values(), *module._buffers.values())
        if each is not None
    ]
    places, carried, left_out = {_place(each) for each in known}, dict[str, Any](), dict[str, str]()
    for name, value in saved.items():
        if name in module._parameters or name in module._buffers or _is_nothing(value):
            continue
        if not is_torch(value):
            left_out[name] = f"{kind_of(module)} saves a {kind_of(value)}"
        elif not (value is again.get(name) or _place(value) == _place(again.get(name))):
            left_out[name] = f"{kind_of(module)} makes it when it is saved"
        elif fault := fault_of(value):
            left_out[name] = fault
        elif _place(value) not in places:
            carried[name] = value
    return carried, left_out


def kept_at_parameters(module: Any) -> Iterator[tuple[str, str]]:
    """What there is at packed parameters of this module that is needed to make sense of them, by
    name, with what it is.
    """
    for name, parameter in module._parameters.items():
        if parameter is None:
            continue
        for its, value in vars(parameter).items():
            is_packed = not parameter.is_floating_point() and not parameter.is_complex()
            if value is not None and (its in QUANTIZATION or (is_packed and _has_tensors(value))):
                yield f"{name}.{its}", f"an attribute of the parameter, a {kind_of(value)}"


def plain_tensors(module: Any) -> Iterator[tuple[str, Any]]:
    """The module's plain attributes that are tensors and look like state, by name."""
    found = ((name, value) for name, value in vars(module).items() if is_torch(value))
    return ((name, tensor) for name, tensor in found if not _is_derived(module, name, tensor))


def _is_derived(module: Any, name: str, tensor: Any) -> bool:
    """Whether this attribute follows from other state: of weight_norm and pruning, of buffers, of a
    cache or a graph.
    """
    follows = any(f"{name}{ending}" in module._parameters for ending in ("_orig", "_g", "_v"))
    is_copy = name.removeprefix("original_") in module._buffers
    is_private = name.startswith("_") or "cache" in name.lower()
    return follows or is_copy or is_private or not tensor.is_leaf or not tensor.numel()


def _place(value: Any) -> object:
    """Equal for equal views of one memory; the id of a value without memory."""
    try:
        place: int = value.data_ptr() if is_torch(value) else 0
    except RuntimeError:
        place = 0
    return (place, tuple(value.shape), value.dtype) if place else id(value)


def _is_nothing(value: Any) -> bool:
    """Whether it is as good as no state: None, an empty tensor, an empty container."""
    if value is None or is_torch(value):
        return value is None or not value.numel()
    if isinstance(value, BytesIO):
        return not value.getbuffer().nbytes
    return isinstance(value, Mapping | list | tuple | str | bytes | bytearray) and not value


def _has_tensors(value: object) -> bool:
    """Itself, or directly in it."""
    if is_torch(value):
        return True
    inner = value if isinstance(value, Mapping) else getattr(value, "__dict__", {})
    return any(map(is_torch, inner.values()))
