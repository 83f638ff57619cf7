"""Where tiny tensors are in a packed region: pure arithmetic over names and sizes, and the manifest
that says so.

A layout depends on the tensors' names and sizes and on nothing else: not on the order in which they
were registered, nor on dtypes or devices. It is fixed by the publisher, in its manifest (R8). Each
tensor begins at a multiple of `ALIGNMENT`, so that it can be viewed in place under any dtype, and
copied by 16-byte loads on a GPU. Gaps between tensors are zero, so that equal tensors make equal
regions, and equal digests.

Responsible for choosing and placing. Not responsible for bytes: see `packing`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Final

from tensorhub.model.manifest import Manifest, RegionSpec

ALIGNMENT: Final = 16  # bytes of the largest element (complex128), and of a GPU's widest load


def lay_out(sizes: Mapping[str, int]) -> tuple[dict[str, int], int]:
    """Tensors of these sizes (bytes by name) in a row, by name: the first byte of each, and the
    bytes of the region.

    The padding of each is less than ALIGNMENT bytes.
    """
    offsets, end = dict[str, int](), 0
    for name in sorted(sizes):
        offsets[name] = -(-end // ALIGNMENT) * ALIGNMENT
        end = offsets[name] + sizes[name]
    return offsets, end


def pack_tiny(manifest: Manifest, bytes_max: int) -> Manifest:
    """The manifest of these tensors, where tensors of `bytes_max` at most share one region, the
    first.

    `manifest`: with a region for each alias class, as it is built. Tied tensors stay tied. It is
    returned as it is if fewer than two would be packed.
    """
    names = [min(tensor.name for tensor in tensors) for tensors in manifest.by_region]
    sizes = {
        name: region.nbytes
        for name, region, tensors in zip(names, manifest.regions, manifest.by_region, strict=True)
        if tensors[0].nbytes == region.nbytes  # else its rows are padded
    }
    offsets, nbytes = lay_out({name: size for name, size in sizes.items() if 0 < size <= bytes_max})
    if len(offsets) < 2:
        return manifest
    kept = [region for region, name in enumerate(names) if name not in offsets]
    moved = {region: (number, 0) for number, region in enumerate(kept, start=1)}
    moved |= {region: (0, offsets[name]) for region, name in enumerate(names) if name in offsets}
    tensors = []
    for tensor in manifest.tensors:
        region, offset = moved[tensor.region]
        tensors.append(replace(tensor, region=region, offset=offset))
    regions = (RegionSpec(nbytes), *(manifest.regions[region] for region in kept))
    return replace(manifest, tensors=tuple(tensors), regions=regions)
