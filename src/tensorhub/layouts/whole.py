"""The whole model, or some of its tensors, as one memory: what a fetch makes of a version, whatever
its layout.

Each tensor has a region of its own; tensors that are tied in the publication share one. Not
responsible for memory.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from fnmatch import fnmatchcase

from tensorhub.errors import ManifestMismatch, some
from tensorhub.layouts.catalogue import Catalogue
from tensorhub.layouts.publication import Publication
from tensorhub.layouts.published import Published
from tensorhub.model.manifest import Manifest, RegionSpec, TensorSpec

NAMES_SHOWN_MAX = 5


def whole_manifest(
    published: Published, publication: Publication, patterns: tuple[str, ...] | None
) -> Manifest:
    """All tensors of this publication, or those that these patterns name. ManifestMismatch: a
    tensor is rank-local, so its whole is unknown, or a pattern names none.
    """
    catalogue = publication.catalogue
    local, chosen = _unknown(catalogue), set(catalogue.names)
    if patterns is not None:
        chosen = _chosen(patterns, catalogue.names)
    if wanted_locals := local & chosen:
        names = sorted(wanted_locals)
        sentences = tuple(
            [
                f"tensor {name!r} is plain and local to each of the publisher's ranks"
                for name in names
            ]
        )
        advice = (
            "fetch one of the ranks (rank=), or others only (names=), or publish with "
            "sources= or DTensors"
        )
        text = (
            f"the whole model cannot be put together: "
            f"{some(sentences, '; ', most=NAMES_SHOWN_MAX)}: {advice}"
        )
        raise ManifestMismatch(text, differences=sentences)
    tensors, sizes = list[TensorSpec](), list[int]()
    region_of: dict[int, int] = {}  # by the first of the tensors that are tied
    for number, name in enumerate(catalogue.names):
        if name not in chosen:
            continue
        kind = catalogue.kind(number)
        first = publication.ties.get(number, number)
        region = region_of.setdefault(first, len(sizes))
        shape = kind.shape[1:] if kind.ranks else kind.shape
        spec = TensorSpec(
            name,
            kind.dtype,
            shape,
            tuple([(0, size) for size in shape]),
            region,
            0,
            kind.quantization,
        )
        if region == len(sizes):
            sizes.append(spec.nbytes)
        tensors.append(spec)
    return Manifest(
        tuple(tensors), tuple(map(RegionSpec, sizes)), published.chunk_bytes, published.digest, ""
    )


def _unknown(catalogue: Catalogue) -> set[str]:
    """Rank-local tensors: their place in the model is unknown. But a tensor without elements and
    with equal shapes on all ranks is whole on each rank.
    """
    count = Counter(catalogue.names)
    return {
        name
        for name, kind in catalogue.number_of
        if kind is not None and (count[name] > 1 or 0 not in kind.shape)
    }


def choose(patterns: tuple[str, ...] | None, manifest: Manifest) -> list[TensorSpec]:
    """The tensors that are wanted, in the manifest's order. A pattern that is a tensor's name is no
    glob.
    """
    if patterns is None:
        return list(manifest.tensors)
    names = _chosen(patterns, [tensor.name for tensor in manifest.tensors])
    return [tensor for tensor in manifest.tensors if tensor.name in names]


def _chosen(patterns: tuple[str, ...], names: Sequence[str]) -> set[str]:
    """Those of these names that the patterns name. ManifestMismatch: one names none."""
    known, chosen = set(names), set[str]()
    for pattern in patterns:
        found = (
            {pattern}
            if pattern in known
            else {name for name in names if fnmatchcase(name, pattern)}
        )
        if not found:
            there = some([*map(repr, names)], most=NAMES_SHOWN_MAX) or "none"
            text = f"names: no tensor is called {pattern!r}; there are {there}"
            raise ManifestMismatch(text, differences=(text,))
        chosen |= found
    return chosen
