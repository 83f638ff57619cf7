"""A selection that is read with the source's own chunks that enclose it, by a whole transport."""

from __future__ import annotations

from dataclasses import replace

import xxhash

from tensorhub.digests import pack, root_of
from tensorhub.testing.checking import receive_all
from tensorhub.testing.serving import ServedSource
from tensorhub.testing.strided_target import SELECTION, SIZES, StridedTarget, selected, strided_content
from tensorhub.transport.base import Cutter, Transport
from tensorhub.transport.enclosing import EnclosingChannel, Enclosure, Vouched


def read_enclosed(transport: Transport, source: ServedSource) -> None:
    """All of it arrives, and nothing else is written; what was read besides is counted. Closes the source."""
    try:
        for chunk in range(len(SIZES)):
            source.fill(chunk, strided_content(chunk))
        memory, target = source._memory, StridedTarget()
        own = memory.digests(range(len(SIZES)))
        enclosure = Enclosure(SELECTION, Vouched(memory.manifest.manifest_id, root_of(pack(own, memory.width))))
        right = replace(source.right, selection=None)
        inner = transport.open(source.endpoint, right, enclosure, Cutter())
        channel = EnclosingChannel(inner, enclosure, target)
        try:
            wanted = range(len(SELECTION.chunks))
            channel.submit(wanted)
            named = receive_all(channel, len(wanted), 2**30)
        finally:
            channel.close()
        assert sorted(named) == [*wanted]
        for chunk, digest in named.items():
            held = selected(SELECTION, chunk)
            assert target.holds(chunk) == held
            assert digest == xxhash.xxh3_64_intdigest(held)
        assert target.is_untouched_beside(wanted)
    finally:
        source.close()
