"""Bundles: chunks of a reader that other ranks of its group may have just so, such as norms and replicated attention.

Ranks of a group which have different parts of a model have some tensors in common. Each rank makes its chunks by itself;
but a chunk has bytes of one kin only (`plan`), and a bundle is all chunks of one kin, in the order of the reader's memory.
Its id says what is in each of them. So two ranks that have bundles of one id have the same bytes in chunk after chunk of
them, under different numbers: what one of them has read, the other can read there.

Ranks that cut or order a kin differently have different ids. Then each of them reads what it needs where it is published.

Responsible for these ids. Not responsible for chunks (`reading`), nor for who reads which bundle where.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgpack

from tensorhub.layouts.plan import Common
from tensorhub.manifest import id_of
from tensorhub.messages.values import BUNDLES_MAX

FORM = 1


@dataclass(frozen=True, slots=True)
class Bundle:
    """`chunks`: of the reader, ascending."""

    bundle_id: str
    chunks: tuple[int, ...]


@dataclass(slots=True)
class Sheaf:
    """Chunks of one kin that are read of one source. `what`: names what is in them; `numbers`: the reader's, once known."""

    kin: int
    what: str
    numbers: list[int] = field(default_factory=list)


def name_of(common: Common | None, places: Sequence[Sequence[tuple[Any, ...]]], of: str, taken: Iterable[bytes]) -> str:
    """What names the bytes of a sheaf, in their order: where they are in that source's shard; or which tensors they are, and
    how these lie at the reader, if others could have given them as well. `places`: of its chunks, ascending, at the reader.
    """
    if common is None:
        return id_of(b"".join([of.encode(), *taken]))
    region, offset, *_ = places[0][0]
    from_there = [[(strip[0] - region, strip[1] - offset, *strip[2:]) for strip in chunk] for chunk in places]
    return id_of(msgpack.packb([common, from_there]))


def bundles_of(sheaves: Iterable[Sheaf]) -> Iterator[Bundle]:
    """One for each kin, of those that have most chunks BUNDLES_MAX."""
    kins: dict[int, list[Sheaf]] = {}
    for sheaf in sheaves:
        kins.setdefault(sheaf.kin, []).append(sheaf)
    found = []
    for its in kins.values():
        its.sort(key=lambda sheaf: sheaf.numbers)
        chunks = sorted((number, place) for place, sheaf in enumerate(its) for number in sheaf.numbers)
        said = [FORM, [sheaf.what for sheaf in its], [place for _, place in chunks]]
        found.append(Bundle(id_of(msgpack.packb(said)), tuple([number for number, _ in chunks])))
    yield from sorted(found, key=lambda bundle: -len(bundle.chunks))[:BUNDLES_MAX]
