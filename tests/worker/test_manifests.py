"""The manifests that a worker knows: its own ones from the beginning, the newest of all, and which of
them fit.
"""

from __future__ import annotations

from dataclasses import replace

import pytest

from tensorhub.errors import ManifestMismatch, ProtocolError
from tensorhub.model.manifest import Manifest
from tensorhub.testing.sim.memory import make_manifest
from tensorhub.types import Medium, Purpose
from tensorhub.worker.manifests import MANIFESTS_KEPT_MAX, KnownManifests
from tensorhub.worker.registration_session import Shard

MINE, OTHER = make_manifest(1, "none"), make_manifest(2, "none")


def shard(manifest: Manifest | None, purpose: Purpose = Purpose.USE) -> Shard:
    return Shard("r", "m", "g", 0, 1, False, "world/1", manifest, 0, Medium.HOST, purpose)


def test_what_a_handle_was_registered_with_is_known_from_the_beginning() -> None:
    known: dict[str, Manifest] = {}
    assert KnownManifests(known, shard(None)).get(MINE.manifest_id) is None
    manifests = KnownManifests(known, shard(MINE))
    assert manifests.get(MINE.manifest_id) is MINE
    assert manifests.get(OTHER.manifest_id) is None
    assert KnownManifests(known, shard(None)).get(MINE.manifest_id) is MINE  # another handle


def test_the_newest_manifests_are_kept() -> None:
    manifests = KnownManifests({}, shard(None))
    made = [make_manifest(chunks, "none") for chunks in range(1, MANIFESTS_KEPT_MAX + 2)]
    for each in (*made[:-1], made[0], made[-1]):
        assert manifests.add(each.encode()) == each
    gone = [each for each in made if manifests.get(each.manifest_id) is None]
    assert gone == [made[1]]
    with pytest.raises(ProtocolError):
        manifests.add(b"nonsense")


def test_other_tensors_do_not_fit_a_handle_and_a_copy_takes_what_its_version_is() -> None:
    equal = replace(MINE, digest="xxh3-64")
    for purpose in Purpose:
        manifests = KnownManifests({}, shard(MINE, purpose))
        for _ in range(2):
            manifests.check_fits(equal)
            if purpose in (Purpose.USE, Purpose.PREFETCH):
                with pytest.raises(ManifestMismatch):
                    manifests.check_fits(OTHER)
            else:
                manifests.check_fits(OTHER)
    KnownManifests({}, shard(None)).check_fits(OTHER)
