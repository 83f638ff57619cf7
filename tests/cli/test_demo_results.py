"""What the demo concludes from what its processes say."""

import re
from typing import Any

import pytest

from tensorhub.cli.common import print_table
from tensorhub.cli.demo_results import Results

TRAINED = {"loss": 0.5, "drain_s": 0.0, "step_s": 0.1, "publish_s": 0.0, "probe": [0.25, 0.5]}


def fetched(results: Results, name: str, source: str = "trainer", **changes: Any) -> None:
    fields = {
        "version": 1,
        "stall_s": 0.4,
        "digest": "d1",
        "probe": [0.25, 0.5],
        "seconds": 0.5,
        "bytes_read": 8_000_000,
    }
    results.record(name, "fetched", fields | {"sources": {source: 8_000_000}} | changes)


@pytest.fixture
def results() -> Results:
    results = Results(("rollout-1", "rollout-2"))
    results.record("trainer", "ready", {"tensors": 2, "nbytes": 8_000_000})
    results.record("trainer", "published", {"version": 1, "digest": "d1", **TRAINED})
    fetched(results, "rollout-1")
    return results


def test_a_good_run(results: Results, capsys: pytest.CaptureFixture[str]) -> None:
    assert not results.is_done(1)
    fetched(results, "rollout-2", "rollout-1" + "-of-a-long-name" * 20)
    assert results.is_done(1)
    assert not results.is_done(2)
    assert (results.problems(), results.as_json("file")["ok"]) == ([], True)
    assert "the trainer sent 50% of what was read" in results.summary()
    print_table(results.table())  # into a pipe: rows are whole and plain
    lines = capsys.readouterr().out.splitlines()
    assert (lines[0], len(lines)) == ("versions", 4)
    assert (
        lines[2].split()
        == "1 0.500 0.10 rollout-1 0.500 8.0 16 trainer 8.0 400 equal equal".split()
    )
    assert not any(line != line.rstrip() or re.search("[\u2500-\u257f]", line) for line in lines)


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"digest": "x"}, "the bytes of version 1 at rollout-2"),
        ({"probe": [0.25, 0.75]}, "version 1 computes something else at rollout-2"),
        ({"probe": [0.25]}, "version 1 computes something else at rollout-2"),
        ({"probe": [0.25, float("nan")]}, "version 1 computes something else at rollout-2"),
        ({"version": 9}, "rollout-2 holds version 9, which the trainer did not publish"),
    ],
)
def test_what_is_wrong(results: Results, changes: dict[str, Any], problem: str) -> None:
    fetched(results, "rollout-2", **changes)
    assert [found.startswith(problem) for found in results.problems()] == [True]
