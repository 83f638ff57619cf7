"""What two ranks have in common is read from the one that fills it, over sockets, in the numbers that each has for it."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from math import prod

import anyio
import anyio.to_thread
import pytest

from tensorhub.layouts import Declaration, Published, ReshardedManifest, publication_of, reading_for, source
from tensorhub.layouts.bundles import Bundle
from tensorhub.layouts.resharded import bundles_of
from tensorhub.manifest import Manifest, TensorDescription, build_manifest
from tensorhub.messages import FromReader, Read, ReadRefused, Select, Selected
from tensorhub.protocol.codec import FROM_OWNER
from tensorhub.runtime.data.source_lane import SourceFailed
from tensorhub.transport import sockets
from tensorhub.transport.base import Cutter
from tensorhub.transport.peers import Peer
from tests.runtime.data_rig import CONTENT, Node, finish, next_event, serving, until
from tests.transport.test_peers import reading, right_to

pytestmark = pytest.mark.anyio
SHAPES = {"norm.0": (6000,), "experts.0.w": (128, 100), "norm.1": (6000,), "experts.1.w": (128, 100)}
ORDERS = [
    ["experts.0.w", "norm.0", "norm.1", "experts.1.w"],
    ["experts.0.w", "experts.1.w", "norm.0", "norm.1"],
]


def described(names: Sequence[str], cut: int) -> list[TensorDescription]:
    shapes = {name: (SHAPES[name][0] // (cut if "experts" in name else 1), *SHAPES[name][1:]) for name in names}
    return [TensorDescription(n, "uint8", its, at << 40, prod(its)) for at, (n, its) in enumerate(shapes.items())]


def published_manifest() -> Manifest:
    return build_manifest(described(list(SHAPES), 1), 4096, "xxh3-64")


@cache
def manifest_of(rank: int) -> ReshardedManifest:
    """Both norms, and a half of each expert, in an order of its own."""
    published = published_manifest()
    what = Published("xxh3-64", 4096, ((published.manifest_id,),))
    publication = publication_of(what, {published.manifest_id: published.encode()})
    mine = build_manifest(described(ORDERS[rank], 2), 4096, "none", "mine")
    sources = {n: source(n)[64 * rank : 64 * rank + 64] if "experts" in n else source(n) for n in SHAPES}
    return reading_for(what, publication, mine, Declaration(rank, 2, None, sources))


def norms(rank: int) -> Bundle:
    manifest = manifest_of(rank)
    (found,) = [each for each in bundles_of(manifest) if "norm" in manifest.tensors_in(each.chunks[0])[0]]
    return found


NAME = norms(0).bundle_id


def mate() -> Node:
    """It has all bytes, and offers what it is told to offer."""
    return Node("mate", manifest_of(0), filled=True).open(complete=False)


def reader() -> Node:
    return Node("reader", manifest_of(1), filled=False).open(complete=False)


def content(node: Node, chunks: Sequence[int]) -> list[bytes]:
    return [b"".join([bytes(view) for views in node.memory.outgoing(chunk) for view in views]) for chunk in chunks]


def test_the_two_have_other_numbers_for_the_same() -> None:
    one, other = norms(0), norms(1)
    assert one.bundle_id == other.bundle_id
    assert one.chunks != other.chunks
    assert len({each.bundle_id for rank in (0, 1) for each in bundles_of(manifest_of(rank))}) == 3


async def test_it_is_read_chunk_by_chunk_as_it_comes_there() -> None:
    source, target, wanted = mate(), reader(), norms(1).chunks
    others = set(range(target.memory.manifest.chunk_count)) - {*wanted}
    runner = target.runner(bundles={NAME: wanted}, verified=others)
    async with serving(source, target), runner:
        runner.add_source(source.grant(selection=NAME, complete=False))
        for chunk, mine in zip(reversed(norms(0).chunks), reversed(wanted), strict=True):
            assert not target.has(mine)
            source.make_available(chunk)
            await until(lambda mine=mine: target.has(mine))  # type: ignore[misc]
        await finish(runner)
    assert content(target, wanted) == content(source, norms(0).chunks)
    assert target.owner.digests(target.registration, target.generation, NAME) == tuple(
        source.memory.digests(norms(0).chunks)
    )


async def test_who_asks_before_the_mate_fills_waits_for_that() -> None:
    source, target, wanted = Node("mate", manifest_of(0), filled=True), reader(), norms(1).chunks
    others = set(range(target.memory.manifest.chunk_count)) - {*wanted}
    runner = target.runner(bundles={NAME: wanted}, verified=others)
    async with serving(source, target), runner:
        runner.add_source(source.grant(selection=NAME, complete=False))
        await until(lambda: "1 lanes" in repr(source.owner))
        source.open(complete=False).make_available(*norms(0).chunks)
        await finish(runner)
    assert content(target, wanted) == content(source, norms(0).chunks)


async def test_it_is_over_once_each_source_has_heard_what_is_read_there() -> None:
    """The mate has brought all of it. The publisher is asked for digests of what it has never sent."""
    (part,), target, source = manifest_of(1).parts, reader(), mate()
    trainer = Node("trainer", published_manifest(), filled=True).open(complete=True)
    others, name = set(range(target.memory.manifest.chunk_count)) - {*norms(1).chunks}, part.selection.selection_id
    runner = target.runner(bundles={NAME: norms(1).chunks}, selections={name: part}, verified=others)
    async with serving(source, target, trainer), runner:
        source.make_available(*norms(0).chunks)
        with trainer.owner._changed:  # so that it answers nobody
            runner.add_source(source.grant(selection=NAME, complete=False))
            runner.add_source(trainer.grant(selection=name))
            await until(lambda: all(map(target.has, norms(1).chunks)))
            assert not trainer.owner.selections(trainer.registration)
            assert not runner._is_over
        await finish(runner)
        assert trainer.owner.selections(trainer.registration) == (name,)


async def test_what_comes_with_another_digest_is_wanted_of_the_others() -> None:
    """The mate's memory is written after it was verified."""
    source, target, wanted = mate(), reader(), norms(1).chunks
    runner = target.runner(bundles={NAME: wanted})
    async with serving(source, target), runner:
        source.make_available(*norms(0).chunks)
        for array in source.arrays:
            array[0] ^= 1
        runner.add_source(source.grant(selection=NAME, complete=False))
        event = await next_event(runner)
        assert isinstance(event, SourceFailed)
        assert event.reason == "corrupt"
    assert not any(map(target.has, wanted))


async def said(peer: Peer, asked: FromReader) -> object:
    def ask() -> object:
        peer.connection.send(asked)
        return peer.connection.receive(FROM_OWNER)

    return await anyio.to_thread.run_sync(ask)


BEYOND = [((len(norms(0).chunks), 1),), ((0, 1), (len(norms(0).chunks), 1)), ((2**62, 1),), ((0, len(norms(0).chunks) + 1),)]


async def test_whoever_asks_by_name_for_what_is_not_there_gets_nothing() -> None:
    """Again and again, over one connection."""
    node = mate()
    node.make_available(*range(node.memory.manifest.chunk_count))
    right = ("lease", node.registration, node.generation, CONTENT)
    async with reading(node) as peers:
        peer = await anyio.to_thread.run_sync(peers.open, sockets.address_of(node.listener), right_to(node), Cutter())
        for _ in range(100):
            for runs in BEYOND:
                answer = await said(peer, Read(1, *right, runs, selection=NAME))
                assert isinstance(answer, ReadRefused)
                assert f"chunks 0 to {len(norms(0).chunks) - 1}" in answer.reason
            assert isinstance(await said(peer, Read(1, *right, ((0, 1),), selection="no such name")), ReadRefused)
            known = [(NAME, node.generation, 1), (NAME, node.generation + 1, 0), ("no such name", node.generation, 0)]
            for name, generation, following in known:
                answer = await said(peer, Select(0, node.registration, generation, name, 1, 0, b""))
                assert answer == Selected(0, following)
        answer = await said(peer, Select(0, node.registration, node.generation, NAME, 5, 0, b"other"))
        assert answer is None  # who says that it is something else loses the connection
        assert node.owner.selections(node.registration) == tuple(each.bundle_id for each in bundles_of(manifest_of(0)))
        peer.close()
