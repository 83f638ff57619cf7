"""The layouts of publications that a worker keeps: parts, the publications made of them, and
transfer plans.

Each is fetched, checked and planned once, as long as it is among the newest. Not responsible for
asking (`planning`).
"""

from __future__ import annotations

from tensorhub.errors import ProtocolError
from tensorhub.layouts.publication import Publication
from tensorhub.layouts.reading import ReshardedManifest
from tensorhub.model.manifest import id_of

PARTS_BYTES_MAX = 2**27  # of what a worker keeps, whatever it needs at once
PUBLICATIONS_KEPT_MAX = 2
READINGS_KEPT_MAX = 2  # of one handle


class KnownParts:
    """A worker's knowledge of publications: the newest parts by id, and the newest publications
    that were made of them.
    """

    def __init__(self) -> None:
        self._parts: dict[str, bytes] = {}  # the last used part is last
        self._nbytes = 0  # of these
        self._publications: dict[str, Publication] = {}

    def __repr__(self) -> str:
        return (
            f"<KnownParts: {len(self._parts)} of {self._nbytes} bytes, "
            f"{len(self._publications)} publications>"
        )

    def get(self, part_id: str) -> bytes | None:
        part = self._parts.pop(part_id, None)
        if part is not None:
            self._parts[part_id] = part
        return part

    def add(self, part_id: str, part: bytes) -> None:
        """ProtocolError: the part does not match its id."""
        if id_of(part) != part_id:
            raise ProtocolError(f"bad part of a layout: it is not what its id, {part_id}, names")
        if part_id not in self._parts:
            self._parts[part_id] = part
            self._nbytes += len(part)
        while self._nbytes > PARTS_BYTES_MAX and len(self._parts) > 1:
            self._nbytes -= len(self._parts.pop(next(iter(self._parts))))

    def publication(self, publication_id: str) -> Publication | None:
        return self._publications.get(publication_id)

    def keep(self, publication_id: str, publication: Publication) -> None:
        self._publications.pop(publication_id, None)
        self._publications[publication_id] = publication
        while len(self._publications) > PUBLICATIONS_KEPT_MAX:
            del self._publications[next(iter(self._publications))]


class KnownReadings:
    """The newest transfer plans of one handle."""

    def __init__(self) -> None:
        # By publication, and the manifest that names the regions.
        self._found: dict[tuple[str, str], ReshardedManifest] = {}

    def get(self, publication_id: str, manifest_id: str) -> ReshardedManifest | None:
        return self._found.get((publication_id, manifest_id))

    def keep(self, publication_id: str, manifest_id: str, reading: ReshardedManifest) -> None:
        self._found[publication_id, manifest_id] = reading
        while len(self._found) > READINGS_KEPT_MAX:
            del self._found[next(iter(self._found))]
