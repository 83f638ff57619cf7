"""Which chunks have bytes of strips: never fewer than those that do."""

from __future__ import annotations

from random import Random

import pytest

from tensorhub.memory.covering import Covering, Extent
from tensorhub.model.strips import Strip, straight


def bytes_of(strips: tuple[Strip, ...]) -> set[tuple[int, int]]:
    return {(region, at + n) for strip in strips for region, at in strip.places() for n in range(strip.run)}


def drawn(random: Random) -> Strip:
    loops = ((random.randint(2, 3), random.randint(1, 9)),) if random.random() < 0.5 else ()
    length = random.randint(1, 3)
    region_step, offset_step = (random.choice((-1, 0, 1)), random.randint(-9, 9)) if length > 1 else (0, 0)
    return Strip(random.randint(2, 4), random.randint(18, 58), region_step, offset_step, length, loops, random.randint(1, 6))


@pytest.mark.parametrize("seed", range(200))
def test_whatever_has_such_bytes_is_found(seed: int) -> None:
    random = Random(seed)
    chunks = [tuple(drawn(random) for _ in range(random.randint(1, 3))) for _ in range(random.randint(0, 6))]
    wanted = tuple(drawn(random) for _ in range(random.randint(1, 3)))
    covered = Covering.of(chunks).covered([(), wanted, ()], 1000)
    assert covered is not None
    assert (len(covered), covered(0), covered(2)) == (3, (), ())
    found = covered(1)
    assert list(found) == sorted(set(found))
    touched = {number for number, strips in enumerate(chunks) if bytes_of(strips) & bytes_of(wanted)}
    assert touched <= set(found)
    assert not found or Covering.of(chunks).covered([wanted], len(found) - 1) is None


def test_of_contiguous_chunks_no_others_are_found() -> None:
    covering = Covering(Extent(region, at, at + 10, 3 * region + at // 10) for region in range(2) for at in (0, 10, 20))

    def chunks(strips: list[Strip]) -> tuple[int, ...]:
        found = covering.covered([strips], 6)
        assert found is not None
        return found(0)

    assert chunks([straight(0, 5, 10)]) == (0, 1)
    assert chunks([straight(0, 10, 10)]) == (1,)
    assert chunks([straight(1, 29, 1), straight(0, 0, 1)]) == (0, 5)
    assert chunks([Strip(0, 25, 1, 0, 2, (), 5)]) == (2, 5)
    assert chunks([]) == ()
