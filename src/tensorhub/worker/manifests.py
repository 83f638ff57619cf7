"""The manifests that a worker knows, and whether one fits a registration.

Each manifest is fetched and compared only once. Not responsible for asking for one (`filling`).
"""

from __future__ import annotations

from tensorhub.model.compatibility import check_compatible
from tensorhub.model.manifest import Manifest
from tensorhub.types import Purpose
from tensorhub.worker.registration_session import Shard

MANIFESTS_KEPT_MAX = 16


class KnownManifests:
    """The manifests that are known, and which of them fit one registration. Outlives its fills.

    `known`: by id; shared by a worker's handles.
    """

    def __init__(self, known: dict[str, Manifest], shard: Shard) -> None:
        self._known = known
        self._shard = shard
        # ids; MANIFESTS_KEPT_MAX at most, as a publisher may have another for each version
        self._fitting: set[str] = set()
        if shard.manifest is not None:  # mostly the manifest that it is to be filled with
            self._keep(shard.manifest)

    def get(self, manifest_id: str) -> Manifest | None:
        return self._known.get(manifest_id)

    def add(self, blob: bytes) -> Manifest:
        """Decode and keep a manifest; raises ProtocolError for other bytes."""
        manifest = Manifest.decode(blob)
        self._keep(manifest)
        return manifest

    def _keep(self, manifest: Manifest) -> None:
        self._known.pop(manifest.manifest_id, None)
        while len(self._known) >= MANIFESTS_KEPT_MAX:
            del self._known[next(iter(self._known))]
        self._known[manifest.manifest_id] = manifest

    def check_fits(self, manifest: Manifest) -> None:
        """Raise ManifestMismatch unless this registration can be filled with it."""
        mine = self._shard.manifest
        if self._shard.purpose not in (Purpose.USE, Purpose.PREFETCH):
            return  # it takes whatever its shard of a version is
        if mine is not None and manifest.manifest_id not in self._fitting:
            check_compatible(manifest, mine)
            if len(self._fitting) >= MANIFESTS_KEPT_MAX:
                self._fitting.clear()
            self._fitting.add(manifest.manifest_id)
