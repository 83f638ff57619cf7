"""Encoded manifests: each is kept once, and counted."""

from __future__ import annotations

from tensorhub.coordinator.layout_holdings import Manifests
from tensorhub.model.manifest import id_of


def test_equal_manifests_are_one_object() -> None:
    manifests = Manifests()
    one, same = bytes([1, 2, 3]), bytes([1, 2, 3])
    assert one is not same
    assert manifests.keep(one) is manifests.keep(same) is one
    assert manifests.keep(b"") == b""
    assert (manifests.nbytes, manifests.new_bytes(same, b"four", b"four")) == (3, 4)
    manifests.release(same)
    assert manifests.nbytes == 3
    manifests.release(one)
    assert manifests.nbytes == manifests.new_bytes() == 0


def test_a_manifest_is_found_by_its_id_while_somebody_keeps_it() -> None:
    manifests = Manifests()
    ident = id_of(b"a manifest")
    assert manifests.find(ident) is None
    kept = manifests.keep(b"a manifest")
    assert manifests.keep(bytes(bytearray(b"a manifest"))) is kept
    assert manifests.find(ident) is kept
    assert manifests.id_of(kept) == ident
    manifests.release(kept)
    assert manifests.find(ident) is kept
    manifests.release(kept)
    assert manifests.find(ident) is None
