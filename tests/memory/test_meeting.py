"""Which bytes of some strips are bytes of a chunk, against a list of every byte."""

from __future__ import annotations

from random import Random

from tensorhub.memory.meeting import REGIONS, runs_in, within
from tensorhub.memory.strided import Block, blocks, runs
from tensorhub.model.strips import Strip, straight

SIZE = 3000


def places(strips: tuple[Strip, ...]) -> list[int]:
    """Of each byte, in order."""
    found = [REGIONS[of] + at + n for strip in strips for of, at in strip.places() for n in range(strip.run)]
    assert all(place % REGIONS[1] < SIZE for place in found)
    return found


def drawn(made: Random) -> Strip:
    """Somewhere within two regions of SIZE bytes."""
    run = made.choice((1, 2, 7, 40, 200))
    loops = tuple((made.randint(1, 6), made.randint(run, 120 + run)) for _ in range(made.randint(0, 2)))
    extent = sum((times - 1) * apart for times, apart in loops) + run
    if extent > SIZE // 2:
        return straight(made.randrange(2), made.randrange(SIZE - run), run)
    length = made.randint(1, 3)
    step = made.randint(-200, 200)
    first = made.randint(max(0, -step * (length - 1)), SIZE - extent - max(0, step * (length - 1)))
    region_step = made.choice((0, 0, 1)) if length == 2 else 0
    return Strip(made.randrange(2 - region_step), first, region_step, step, length, loops, run)


def bytes_in(block: Block) -> list[int]:
    return [start + n for start in runs(block) for n in range(block.run)]


def test_each_byte_that_both_have_is_found_where_it_is() -> None:
    made, met = Random(5), 0
    for _ in range(600):
        chunk = tuple(drawn(made) for _ in range(made.randint(1, 3)))
        wanted = tuple(drawn(made) for _ in range(made.randint(1, 2)))
        where, at, found = runs_in(chunk), 0, dict[int, int]()
        for block in blocks(wanted, REGIONS, nbytes_max=made.choice((50, 2**18))):
            for before, part in within(block, at, where):
                its = bytes_in(part)
                assert len(its) == part.nbytes
                assert found.keys().isdisjoint(range(before, before + part.nbytes))
                found.update(zip(range(before, before + part.nbytes), its, strict=True))
            at += block.nbytes
        own = places(chunk)
        has, met = set(own), met + len(found)
        assert {n: own[place] for n, place in found.items()} == {n: p for n, p in enumerate(places(wanted)) if p in has}
    assert met > 10_000


def test_runs_that_touch_and_follow_one_another_are_one() -> None:
    assert runs_in((straight(0, 0, 10), straight(0, 10, 5), straight(1, 15, 5))) == (
        [0, REGIONS[1] + 15],
        [15, REGIONS[1] + 20],
        [0, 15],
    )
    assert runs_in((straight(0, 10, 5), straight(0, 0, 10))) == ([0, 10], [10, 15], [5, 0])


def test_what_lies_in_one_run_stays_together() -> None:
    """However many cells and loops it has."""
    block = Block(range(100, 1000, 100), ((3, 20),), 10, 270)
    (found,) = within(block, 7, runs_in((straight(0, 0, 2000),)))
    assert found == (7, block._replace(cells=list(block.cells)))
