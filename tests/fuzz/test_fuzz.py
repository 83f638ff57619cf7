"""The targets on inputs that Hypothesis draws, and on every input of the corpus: what was found
once stays found.
"""

from __future__ import annotations

from random import Random

import pytest
from hypothesis import given, settings, strategies as st

from tensorhub.coordinator import limits
from tests.fuzz.targets import CORPUS, TARGETS

CORPUS_BYTES_MAX = 200_000
LONG_TALKS = 40


@pytest.mark.parametrize("name", TARGETS)
def test_whatever_comes(name: str) -> None:
    target = TARGETS[name]

    @settings(max_examples=min(100, 10 + 2 * target.share), derandomize=True, database=None)
    @given(st.binary(max_size=min(target.bytes_max, 400)))
    def holds(data: bytes) -> None:
        target.run(data)

    holds()


@pytest.mark.parametrize("per_step", [None, 3])
def test_liars_who_talk_for_long(per_step: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """What Hypothesis draws is over before much is published or read. `per_step`: how little a step
    does at most (G7).
    """
    if per_step is not None:
        for name in ("WOKEN_PER_STEP", "TIMERS_PER_STEP", "NOTED_PER_STEP"):
            monkeypatch.setattr(limits, name, per_step)
    for seed in range(LONG_TALKS):
        try:
            TARGETS["liars"].run(Random(seed).randbytes(TARGETS["liars"].bytes_max))
        except Exception as error:
            error.add_note(f"on {seed}")
            raise


@pytest.mark.parametrize("name", TARGETS)
def test_the_corpus(name: str) -> None:
    paths = sorted((CORPUS / name).iterdir())
    assert paths
    for path in paths:
        try:
            TARGETS[name].run(path.read_bytes())
        except Exception as error:
            error.add_note(f"on {path}")
            raise


def test_the_corpus_is_small_and_of_targets() -> None:
    assert {path.name for path in CORPUS.iterdir()} == set(TARGETS)
    assert (
        sum(path.stat().st_size for path in CORPUS.rglob("*") if path.is_file()) < CORPUS_BYTES_MAX
    )
