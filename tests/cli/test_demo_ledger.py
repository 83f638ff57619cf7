"""What the demo concludes from what its processes say."""

import io
import re
from typing import Any

import pytest
from rich.console import Console

from tensorhub.cli.common import CommandError, print_table
from tensorhub.cli.demo import record
from tensorhub.cli.demo_crew import Event
from tensorhub.cli.demo_ledger import Ledger


def published(version: int, digest: str = "d") -> Event:
    times = {"drain_s": 0.0, "step_s": 0.1, "publish_s": 0.0}
    fields = {"version": version, "loss": 0.5, "digest": f"{digest}{version}", "probe": [0.25, 0.5], **times}
    return Event("trainer", "published", fields)


def fetched(name: str, version: int, source: str = "trainer", **changes: Any) -> Event:
    sources = [
        {"name": source, "transport": "tcp", "bytes_read": 8_000_000, "seconds": 0.5, "outcome": "used"},
        {"name": "rollout-9", "transport": "tcp", "bytes_read": 0, "seconds": 0.0, "outcome": "lost"},
    ]
    report: dict[str, Any] = {"seconds": 0.5, "bytes_read": 8_000_000, "reread_bytes": 0, "retries": 0}
    report |= {"phases": {"transfer": 0.5}, "sources": sources}
    fields = {"version": version, "stall_s": 0.4, "attempts": 1, "digest": f"d{version}", "probe": [0.25, 0.5]}
    return Event(name, "fetched", fields | {"report": report} | changes)


@pytest.fixture
def ledger() -> Ledger:
    ledger = Ledger(("rollout-1", "rollout-2"))
    record(Event("trainer", "ready", {"tensors": 2, "nbytes": 8_000_000}), ledger)
    for event in (published(1), fetched("rollout-1", 1), fetched("rollout-2", 1, "rollout-1"), published(2)):
        record(event, ledger)
    return ledger


def text_of(ledger: Ledger, width: int = 160) -> str:
    console = Console(file=io.StringIO(), width=width)
    console.print(ledger.fetch_table())
    console.print(ledger.read_table())
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def test_a_newer_version_passes_the_older_ones(ledger: Ledger) -> None:
    assert ledger.passed_by_all(1)
    assert not ledger.passed(2, "rollout-1")
    record(published(3), ledger)
    record(fetched("rollout-1", 3), ledger)
    assert ledger.passed(2, "rollout-1")
    assert not ledger.passed_by_all(2)
    record(fetched("rollout-2", 2), ledger)
    assert ledger.passed_by_all(2)
    assert text_of(ledger).count("skipped") == 2
    versions: Any = ledger.as_json("file")["versions"]
    assert [version["skipped_by"] for version in versions] == [[], ["rollout-1"], ["rollout-2"]]


def test_at_80_columns_nothing_is_cut(ledger: Ledger) -> None:
    text = text_of(ledger, 80)
    assert "\N{HORIZONTAL ELLIPSIS}" not in text
    for word in ("rollout-1", "rollout-2", "8.0", "16", "400", "equal"):
        assert word in text


def test_in_a_pipe_rows_are_whole_and_plain(ledger: Ledger, capsys: pytest.CaptureFixture[str]) -> None:
    record(fetched("rollout-1", 2, "rollout-2" + "-of-a-long-name" * 20), ledger)
    print_table(ledger.fetch_table())
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "versions"
    assert len(lines) == 2 + 4
    assert lines[2].split() == "1 0.500 0.10 rollout-1 0.500 8.0 16 trainer 8.0 400 1 equal equal".split()
    assert not any(line != line.rstrip() or re.search("[\u2500-\u257f]", line) for line in lines)


def test_who_read_from_whom(ledger: Ledger) -> None:
    assert ledger.reads() == {("rollout-1", "trainer"): 8_000_000, ("rollout-2", "rollout-1"): 8_000_000}
    assert ledger.as_json("file")["reads"] == [
        {"reader": "rollout-1", "source": "trainer", "bytes": 8_000_000},
        {"reader": "rollout-2", "source": "rollout-1", "bytes": 8_000_000},
    ]
    assert "the trainer sent 50% of what was read" in ledger.summary()


def test_a_good_run(ledger: Ledger) -> None:
    assert ledger.problems() == []
    assert ledger.as_json("file")["ok"] is True
    table = text_of(ledger)
    assert "DIFFERS" not in table
    assert "16" in table  # MB/s
    record(Event("rollout-1", "retry", {"kind": "VersionUnavailable", "text": "gone"}), ledger)
    assert "1 retried" in ledger.summary()


@pytest.mark.parametrize(
    ("event", "problem"),
    [
        (fetched("rollout-1", 2, digest="x"), "the bytes of version 2 at rollout-1"),
        (fetched("rollout-1", 2, probe=[0.25, 0.75]), "version 2 computes something else at rollout-1"),
        (fetched("rollout-1", 2, probe=[0.25]), "version 2 computes something else at rollout-1"),
        (fetched("rollout-1", 2, probe=[0.25, float("nan")]), "version 2 computes something else at rollout-1"),
    ],
)
def test_what_differs(ledger: Ledger, event: Event, problem: str) -> None:
    record(event, ledger)
    assert [found.startswith(problem) for found in ledger.problems()] == [True]
    assert "DIFFERS" in text_of(ledger)
    assert ledger.as_json("file")["ok"] is False


def test_what_nobody_published(ledger: Ledger) -> None:
    record(fetched("rollout-1", 9), ledger)
    assert ledger.problems() == ["rollout-1 holds version 9, which the trainer did not publish"]


def test_what_nobody_knows(ledger: Ledger) -> None:
    with pytest.raises(CommandError, match="sings"):
        record(Event("rollout-1", "sings", {}), ledger)
