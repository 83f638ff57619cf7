"""Whether the next version becomes an anchor or a delta, and of which version. PURE.

A chain of deltas is read after its anchor, so the archive takes few bytes where chains are long,
and a version is read fast where they are short. What a frame costs its reader depends on its bytes:
the words that it changes. So a chain ends when its frames have a part of the anchor's bytes.
"""

from __future__ import annotations

from typing import Final

from tensorhub.archives.catalogue import CHAIN_MAX, Key, VersionCatalogue
from tensorhub.errors import IntegrityError

FRAMES_PART: Final = 1 / 8
"""Bytes of a chain's frames, of its anchor's at most: to decode so many takes about as long as to
read the anchor."""


def base_for(catalogue: VersionCatalogue, key: Key) -> Key | None:
    """The archived version by whose difference to archive this one; None: as an anchor. It is for
    the caller to know that both have the same tensors.
    """
    base = max([each for each in catalogue.versions if each < key], default=None)
    if base is None:
        return None
    try:
        anchor, *steps = catalogue.chain(base)
    except IntegrityError:  # the chain is broken
        return None
    sizes = [sum(sum(shard.frames) for shard in each.shards) for each in steps]
    expected = sum(sizes) + (sizes[-1] if sizes else 0)
    is_short = expected <= FRAMES_PART * anchor.nbytes and len(sizes) + 2 < CHAIN_MAX
    return base if is_short else None
