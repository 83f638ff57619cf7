"""What the demo concludes from what its processes say."""

import io
import re
from typing import Any

import pytest
from rich.console import Console

from tensorhub.cli.common import print_table
from tensorhub.cli.demo_results import Results

Event = tuple[str, str, dict[str, Any]]  # name, kind, fields


def published(version: int, digest: str = "d") -> Event:
    times = {"drain_s": 0.0, "step_s": 0.1, "publish_s": 0.0}
    fields = {"version": version, "loss": 0.5, "digest": f"{digest}{version}", "probe": [0.25, 0.5], **times}
    return "trainer", "published", fields


def fetched(name: str, version: int, source: str = "trainer", **changes: Any) -> Event:
    sources = [
        {"name": source, "transport": "tcp", "bytes_read": 8_000_000, "seconds": 0.5, "outcome": "used"},
        {"name": "rollout-9", "transport": "tcp", "bytes_read": 0, "seconds": 0.0, "outcome": "lost"},
    ]
    report: dict[str, Any] = {"seconds": 0.5, "bytes_read": 8_000_000, "reread_bytes": 0, "retries": 0}
    report |= {"phases": {"transfer": 0.5}, "sources": sources}
    fields = {"version": version, "stall_s": 0.4, "attempts": 1, "digest": f"d{version}", "probe": [0.25, 0.5]}
    return name, "fetched", fields | {"report": report} | changes


@pytest.fixture
def results() -> Results:
    results = Results(("rollout-1", "rollout-2"))
    results.record("trainer", "ready", {"tensors": 2, "nbytes": 8_000_000})
    for event in (published(1), fetched("rollout-1", 1), fetched("rollout-2", 1, "rollout-1"), published(2)):
        results.record(*event)
    return results


def text_of(results: Results, width: int = 160) -> str:
    console = Console(file=io.StringIO(), width=width)
    console.print(results.fetch_table())
    console.print(results.read_table())
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def test_a_newer_version_passes_the_older_ones(results: Results) -> None:
    assert results.passed_by_all(1)
    assert not results.passed(2, "rollout-1")
    results.record(*published(3))
    results.record(*fetched("rollout-1", 3))
    assert results.passed(2, "rollout-1")
    assert not results.passed_by_all(2)
    results.record(*fetched("rollout-2", 2))
    assert results.passed_by_all(2)
    assert text_of(results).count("skipped") == 2
    versions: Any = results.as_json("file")["versions"]
    assert [version["skipped_by"] for version in versions] == [[], ["rollout-1"], ["rollout-2"]]


def test_at_80_columns_nothing_is_cut(results: Results) -> None:
    text = text_of(results, 80)
    assert "\N{HORIZONTAL ELLIPSIS}" not in text
    for word in ("rollout-1", "rollout-2", "8.0", "16", "400", "equal"):
        assert word in text


def test_in_a_pipe_rows_are_whole_and_plain(results: Results, capsys: pytest.CaptureFixture[str]) -> None:
    results.record(*fetched("rollout-1", 2, "rollout-2" + "-of-a-long-name" * 20))
    print_table(results.fetch_table())
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "versions"
    assert len(lines) == 2 + 4
    assert lines[2].split() == "1 0.500 0.10 rollout-1 0.500 8.0 16 trainer 8.0 400 1 equal equal".split()
    assert not any(line != line.rstrip() or re.search("[\u2500-\u257f]", line) for line in lines)


def test_who_read_from_whom(results: Results) -> None:
    assert results.reads() == {("rollout-1", "trainer"): 8_000_000, ("rollout-2", "rollout-1"): 8_000_000}
    assert results.as_json("file")["reads"] == [
        {"reader": "rollout-1", "source": "trainer", "bytes": 8_000_000},
        {"reader": "rollout-2", "source": "rollout-1", "bytes": 8_000_000},
    ]
    assert "the trainer sent 50% of what was read" in results.summary()


def test_a_good_run(results: Results) -> None:
    assert results.problems() == []
    assert results.as_json("file")["ok"] is True
    table = text_of(results)
    assert "DIFFERS" not in table
    assert "16" in table  # MB/s
    results.record("rollout-1", "retry", {"kind": "VersionUnavailable", "text": "gone"})
    assert "1 retried" in results.summary()


@pytest.mark.parametrize(
    ("event", "problem"),
    [
        (fetched("rollout-1", 2, digest="x"), "the bytes of version 2 at rollout-1"),
        (fetched("rollout-1", 2, probe=[0.25, 0.75]), "version 2 computes something else at rollout-1"),
        (fetched("rollout-1", 2, probe=[0.25]), "version 2 computes something else at rollout-1"),
        (fetched("rollout-1", 2, probe=[0.25, float("nan")]), "version 2 computes something else at rollout-1"),
    ],
)
def test_what_differs(results: Results, event: Event, problem: str) -> None:
    results.record(*event)
    assert [found.startswith(problem) for found in results.problems()] == [True]
    assert "DIFFERS" in text_of(results)
    assert results.as_json("file")["ok"] is False


def test_what_nobody_published(results: Results) -> None:
    results.record(*fetched("rollout-1", 9))
    assert results.problems() == ["rollout-1 holds version 9, which the trainer did not publish"]
