"""The layout id of a rank: says which part of which tensors it has, and not in which region or
order.

Plain tensors are "world/N": equal ranks of all groups of N ranks have like tensors. Where the
caller describes more (DTensors, `sources=`) or less (`partial=`), the id is a hash of the
description, in one form: "own/" and 32 hex digits. It needs no publication, so views count as they
were written.

Responsible for that form, which does not depend on the process.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from tensorhub.layouts.boxes import whole
from tensorhub.layouts.pieces import Declaration
from tensorhub.layouts.sharding import Sharding
from tensorhub.model.manifest import Manifest, TensorSpec, id_of

ALONE = "world/1"  # of plain tensors that are the whole model


def layout_id_of(manifest: Manifest, declared: Declaration) -> str:
    """Of the rank that has registered these tensors."""
    said = {tensor.name: _said(tensor, declared) for tensor in manifest.tensors}
    # Chunks of padded rows go from memory to memory that is padded, and tied, alike.
    tied_to = {tensor.name: tensors[0].name for tensors in manifest.by_region for tensor in tensors}
    for name, strides in declared.strides.items():
        said[name] = ["strides", strides, tied_to[name], said[name]]
    if not declared.partial and not any(said.values()):
        return f"world/{declared.world_size}"
    tensors = [[each.name, each.dtype, each.shape, said[each.name]] for each in manifest.tensors]
    tensors.sort(key=lambda each: each[0])  # type: ignore[arg-type, return-value]  # names, of which no two are equal
    form = [1, declared.rank, declared.world_size, declared.partial, tensors]
    return f"own/{id_of(json.dumps(form, separators=(',', ':')).encode())}"


def layout_id_together(ids: Sequence[str]) -> str:
    """That of a group's ranks together. `ids`: of each, in their order."""
    return ids[0] if len(set(ids)) == 1 else "ranks/" + id_of("\n".join(ids).encode())


def _said(tensor: TensorSpec, declared: Declaration) -> list[Any]:
    """What the caller has said of this tensor; nothing if it is plain."""
    entry = declared.sources.get(tensor.name)
    if entry is not None:
        return [
            "sources",
            [[repr(place), view.name, view.shape, repr(view)] for place, view in entry],
        ]
    if tensor.name not in declared.shardings:
        return []
    sharding = declared.shardings[tensor.name]
    if sharding is None:
        return ["not here"]
    if declared.world_size == 1 and _is_whole(sharding):
        return []
    return ["sharding", sharding.shape, sharding.runs]


def _is_whole(sharding: Sharding) -> bool:
    return sharding.runs == tuple([(each,) for each in whole(sharding.shape)])
