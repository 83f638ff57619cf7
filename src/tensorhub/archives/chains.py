"""Whether the next version becomes an anchor or a delta, and of which version. PURE.

A chain of deltas is read after its anchor, so the archive takes few bytes where chains are long,
and a version is read fast where they are short. Between versions that are k steps apart, fewer
words differ than in k steps together, and a frame costs its reader something, however few words it
has. So after a few versions a chain begins anew, with a delta of the anchor:

    anchor <- 1 <- 2 <- 3     anchor <- 4 <- 5 <- 6     anchor <- 7 ...

These deltas grow, and what a frame costs depends on its bytes. So an anchor comes next once the
frames of a chain have a part of the anchor's bytes.

With 0.33 % (0.45 %) of the bytes in a delta, 1,000 versions take 2.8 % (4.6 %) of full copies, and
95 in 100 of them need at most 3 frames, of 4.1 % of the bytes. Were each version the base of the
next, as few bytes would take chains of 40 (22) frames, of 13 % (10 %).
"""

from __future__ import annotations

from typing import Final

from tensorhub.archives.catalogue import Key, VersionCatalogue
from tensorhub.errors import IntegrityError

FRAMES_PART: Final = 1 / 14  # bytes of a chain's frames, of its anchor's
LINKS_MAX: Final = 3  # deltas of a chain


def base_for(catalogue: VersionCatalogue, key: Key) -> Key | None:
    """The archived version by whose difference to archive this one; None: as an anchor. It is for
    the caller to know that both have the same tensors.
    """
    before = [each for each in catalogue.versions if each < key and each.number < key.number]
    base = max(before, default=None)  # but none that a rollback has ended
    if base is None:
        return None
    try:
        anchor, *steps = catalogue.chain(base)
    except IntegrityError:  # the chain is broken
        return None
    sizes = [sum(sum(shard.frames) for shard in each.shards) for each in steps]
    if sum(sizes) + sum(sizes[-1:]) > FRAMES_PART * anchor.nbytes:
        return None
    return base if len(steps) < LINKS_MAX else anchor.key
