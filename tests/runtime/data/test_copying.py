"""Chunks from one memory of a worker to another: their digests, and how they were read, go with
them.
"""

from __future__ import annotations

from functools import partial

import pytest

from tensorhub.messages import Origin
from tensorhub.runtime.data.copying import copy_chunks
from tensorhub.transport.owner import CannotServe
from tensorhub.worker.calls import LocalCopy
from tests.runtime.data_rig import CHUNKS, CONTENT, Node, manifest_of


def test_whoever_copies_says_where_that_was_read() -> None:
    """Else who copies what a liar has told his own host copy would be taken for the liar (R8)."""
    manifest = manifest_of()
    source = Node("host", manifest, filled=True).open(complete=False)
    copy = Node("copy", manifest, filled=False, owner=source.owner).open(complete=False)
    origins = {0: Origin("liar", 3), 1: Origin("publisher", 4), 2: Origin("publisher", 4), 3: None}
    for chunk, origin in origins.items():
        named = [(chunk, source.memory.digest(chunk))]
        assert source.owner.mark_available(source.registration, source.generation, named, origin)
    arrived = partial(copy.owner.mark_available, copy.registration, copy.generation)
    sources = [LocalCopy(source.registration, source.generation)]
    there = copy_chunks(
        source.owner, sources, CONTENT, copy.memory, frozenset(), arrived, lambda: None
    )
    assert there == origins.keys()
    for node in (source, copy):
        assert {
            n: node.owner.origin(node.registration, node.generation, n) for n in origins
        } == origins
    assert [copy.has(chunk) for chunk in range(CHUNKS)] == [
        chunk in origins for chunk in range(CHUNKS)
    ]
    for node in (source, copy):
        node.listener.close()


def test_memory_that_its_owner_has_written_is_not_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    manifest = manifest_of()
    source = Node("host", manifest, filled=True).open(complete=True)
    copy = Node("copy", manifest, filled=False, owner=source.owner).open(complete=False)

    def was_written(*_: object) -> None:
        raise CannotServe("it was written")

    monkeypatch.setattr(source.owner, "digests_of", was_written)
    arrived = partial(copy.owner.mark_available, copy.registration, copy.generation)
    sources = [LocalCopy(source.registration, source.generation)]
    assert not copy_chunks(
        source.owner, sources, CONTENT, copy.memory, frozenset(), arrived, lambda: None
    )
    for node in (source, copy):
        node.listener.close()
