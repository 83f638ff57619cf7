"""A failing seed explains itself by the shortest history that still fails, and that one can be run
again.
"""

from __future__ import annotations

import contextlib
import re
from pathlib import Path

import pytest

from tensorhub.errors import StateError
from tensorhub.testing import Fault, GuaranteeBroken, run_seed
from tensorhub.testing.coverage import demands
from tensorhub.testing.drivers.parts import Part
from tensorhub.testing.shrinking import Seed, Shrinking, explain, run_part
from tensorhub.testing.sim.promises import PROMISES
from tests.testing.bugs import every_bug
from tests.testing.test_bugs import drawing, first_failing

GUARANTEES = Path(__file__).parents[2] / "docs" / "guarantees.md"
SECONDS = 600.0  # these come to an end long before


@pytest.mark.parametrize(
    "seed", [7, *(pytest.param(seed, marks=pytest.mark.heavy) for seed in range(8, 14))]
)
def test_a_part_of_everything_is_the_whole_run(seed: int) -> None:
    shrinking = Shrinking(Seed(seed))
    whole = shrinking.recorder()
    whole.run_phases()
    assert whole.faults_until is not None
    part = shrinking.part(Part(shrinking.whole, shrinking.whole.atoms, whole.faults_until))
    part.run_phases()
    assert part.end_hash == whole.end_hash == run_seed(seed).end_hash


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    "name",
    [
        "epochs_minted_again",
        *(
            pytest.param(name, marks=pytest.mark.slow)
            for name in ("latest_falls_back", "refused_number_stays_used", "watchers_not_told")
        ),
    ],
)
def test_a_planted_bug_is_shown_in_a_third_of_the_history(name: str) -> None:
    found = every_bug()[name]
    with drawing(found):
        seed = first_failing(found)
        assert seed is not None
        with found.enter():
            text = explain(seed, faults=found.faults, seconds=SECONDS)
            assert text is not None
            lines = re.search(r"([\d,]+) of ([\d,]+) lines$", text, re.MULTILINE)
            assert lines is not None
            shrunk, whole = (int(number.replace(",", "")) for number in lines.groups())
            assert shrunk <= whole / 3
            # its last line runs it again
            line = text.splitlines()[-1]
            again = re.fullmatch(r"reproduce: (.+) --only (\S+) --until (\d+)", line)
            assert again is not None
            command, only, until = again.groups()
            kinds = re.search(r" --faults (\S+)", command)
            faults = None if kinds is None else [Fault(each) for each in kinds[1].split(",")]
            with pytest.raises(GuaranteeBroken) as caught:
                run_part(seed, only.split(","), int(until), faults=faults)
        told = [line for line in text.splitlines() if not line.startswith("shrunk in ")]
        assert str(caught.value).splitlines() == told
        with contextlib.suppress(StateError):  # without the bug the seed may come to other turns
            run_part(seed, only.split(","), int(until), faults=faults)  # it is the bug that fails


def test_what_a_seed_has_not_is_refused() -> None:
    with pytest.raises(StateError, match=r"seed 7 has no g9\.1: give what its failure has said"):
        run_part(7, ["1", "g9.1"], 20, events=20)
    assert explain(7, events=20) is None


def test_each_promise_is_one_of_the_documents_and_each_demand_has_one() -> None:
    page = GUARANTEES.read_text(encoding="utf-8")
    named = re.findall(r"</a>(G\d+) \| ([a-z ]+) \||\*\*(R\d+) ([a-z ]+)\.\*\*", page)
    known = {guarantee or rule: code or number for code, guarantee, number, rule in named}
    for name, text in PROMISES.items():
        assert text.startswith(f"{known[name]}: "), name
    judges = {
        what.partition(":")[0] for what, where in demands().items() if "testing/sim/judges" in where
    }
    assert judges <= PROMISES.keys()
