"""The encoded manifests of registrations and versions, each kept once however many need it, and
their bytes in all.

All replicas of a shard have equal manifests, so a thousand workers cost as much as one. The parts
of layouts (`tensorhub.layouts`) are kept here, too: many ranks share most of them.
"""

from __future__ import annotations

from collections.abc import Iterable

from tensorhub.coordinator import limits
from tensorhub.model.manifest import id_of


class Manifests:
    """A component that needs a manifest calls `keep`, and `release` when it does not need the
    manifest any more.
    """

    def __init__(self) -> None:
        self.nbytes = 0  # of all that are kept
        # by content: the one object, and how many keep it
        self._kept: dict[bytes, tuple[bytes, int]] = {}
        self._ids: dict[bytes, str] = {}  # of those that are kept
        self._by_id: dict[str, bytes] = {}  # the other way round

    def __repr__(self) -> str:
        return f"<Manifests: {len(self._kept)} of {self.nbytes} bytes>"

    def new_bytes(self, *manifests: bytes) -> int:
        """How many more bytes there would be if these were kept, too."""
        return sum(map(len, {manifest for manifest in manifests if manifest not in self._kept}))

    def has_room_for(self, *manifests: bytes) -> bool:
        """Whether these may be kept, too."""
        return self.nbytes + self.new_bytes(*manifests) <= limits.MANIFEST_BYTES_MAX

    def keep(self, manifest: bytes) -> bytes:
        """The equal manifest that is kept already; or this manifest, which is kept from now on."""
        if not manifest:
            return manifest
        known, count = self._kept.get(manifest, (manifest, 0))
        if not count:
            self.nbytes += len(manifest)
            # once for all who keep it: a manifest may have 48 MiB
            self._ids[known] = ident = id_of(known)
            self._by_id[ident] = known
        self._kept[known] = (known, count + 1)
        return known

    def keep_all(self, blobs: Iterable[bytes]) -> tuple[bytes, ...]:
        """Each of them."""
        return tuple([self.keep(blob) for blob in blobs])

    def id_of(self, kept: bytes) -> str:
        """The id of a manifest, or a part, that is kept."""
        return self._ids[kept]

    def name(self, manifest: bytes) -> str:
        """The id of any manifest."""
        return self._ids.get(manifest) or id_of(manifest)

    def find(self, manifest_id: str) -> bytes | None:
        """The manifest of that id, if it is kept."""
        return self._by_id.get(manifest_id)

    def release(self, *manifests: bytes) -> None:
        """Once for each `keep`."""
        for manifest in filter(None, manifests):
            known, count = self._kept[manifest]
            if count > 1:
                self._kept[known] = (known, count - 1)
            else:
                del self._kept[known]
                del self._by_id[self._ids.pop(known)]
                self.nbytes -= len(known)
