"""Tensors of which only shapes and dtypes count, as those on torch's meta device: to plan with, and
never to read or fill.

Responsible for describing them, those that have memory among them as a registration would. Not
responsible for plans.
"""

from __future__ import annotations

from typing import Any

from tensorhub.layouts.pieces import Declaration
from tensorhub.layouts.views import Sources, entries_of
from tensorhub.memory.describing import (
    check_any,
    describe,
    description_of,
    dtype_of,
    is_torch,
    local_of,
    shardings_of,
    stride_fault,
)
from tensorhub.memory.resolving import resolve_all
from tensorhub.model.dtypes import ITEMSIZE
from tensorhub.model.manifest import TensorDescription

Described = tuple[tuple[TensorDescription, ...], Declaration]
FIRST_ADDRESS = 2**62  # of what has none: where no process has memory


def described(
    given: Any, rank: int, world_size: int, sources: Sources | None, partial: bool
) -> Described:
    """What `Hub.register` would be told of these. RegistrationError as there, but for a lack of
    memory.
    """
    tensors = resolve_all(given).tensors
    check_any(tensors, world_size)
    entries, wrong_entries = entries_of(tensors, sources)
    shardings, wrong_shardings = shardings_of(tensors, entries)
    there = {name: tensor for name, tensor in tensors.items() if not _is_meta(tensor)}
    faults = {
        name: stride_fault(local_of(tensor)) for name, tensor in tensors.items() if _is_meta(tensor)
    }
    wrong = [f"{name!r}: {fault}" for name, fault in faults.items() if fault is not None]
    found = {
        each.name: each
        for each in describe(there, also_wrong=[*wrong, *wrong_shardings, *wrong_entries])
    }
    places = dict[object, int]()  # by a storage and an offset in it: tied tensors have one
    address = FIRST_ADDRESS
    for name, tensor in tensors.items():
        if name not in found:
            local = local_of(tensor)
            place = local.untyped_storage()._cdata, local.storage_offset(), tuple(local.shape)
            found[name] = description_of(name, local, places.setdefault(place, address))
            address += found[name].extent + 1
    strides = {name: each.strides for name, each in found.items() if each.strides}
    declared = Declaration(rank, world_size, shardings, entries, partial, strides)
    return tuple([found[name] for name in tensors]), declared


def _is_meta(tensor: Any) -> bool:
    return is_torch(tensor) and bool(local_of(tensor).is_meta) and dtype_of(tensor) in ITEMSIZE
