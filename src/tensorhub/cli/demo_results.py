"""The demo's results: which rollout held which version, how it got there, and whether the bytes are the trainer's.

Pure: events go in, news, tables and JSON come out.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from rich.table import Table
from rich.text import Text

from tensorhub.cli.common import CommandError

TRAINER = "trainer"
MB = 1_000_000
PROBE_TOLERANCE = 1e-5


@dataclass(frozen=True, slots=True)
class Publication:
    """What the trainer says about one version."""

    version: int
    loss: float
    drain_s: float  # from the call of `mutate` until the memory might be written
    step_s: float
    publish_s: float
    digest: str
    probe: list[float]


@dataclass(frozen=True, slots=True)
class Fetch:
    """What a rollout says about one version that it holds."""

    version: int
    stall_s: float
    attempts: int
    digest: str
    probe: list[float]
    report: dict[str, Any]

    @property
    def seconds(self) -> float:
        return float(self.report["seconds"])

    @property
    def bytes_read(self) -> int:
        return int(self.report["bytes_read"])

    @property
    def sources(self) -> list[dict[str, Any]]:
        """The sources that gave something."""
        return [source for source in self.report["sources"] if source["bytes_read"]]


@dataclass
class Results:
    """All that the processes of a run have said. A rollout has *passed* a version when it holds that or a newer one."""

    rollouts: Sequence[str]
    ready: set[str] = field(default_factory=set)  # names of processes
    tensors: int = 0
    nbytes: int = 0
    publications: dict[int, Publication] = field(default_factory=dict)
    fetches: dict[tuple[int, str], Fetch] = field(default_factory=dict)
    retried: list[str] = field(default_factory=list)  # kinds of the errors that a retry cured

    def record(self, name: str, event: str, fields: Mapping[str, Any]) -> str:
        """Enter one event of the process `name`; returns it in words. Raises CommandError for an unknown event."""
        match event:
            case "ready":
                self.ready.add(name)
                self.tensors, self.nbytes = fields["tensors"], fields["nbytes"]
                return f"ready: {self.tensors} tensors, {self.nbytes / MB:,.1f} MB"
            case "published":
                made = self.publications[fields["version"]] = Publication(**fields)
                return f"version {made.version} published, loss {made.loss:.4f}"
            case "fetched":
                fetch = self.fetches[fields["version"], name] = Fetch(**fields)
                sources = ", ".join(source["name"] for source in fetch.sources)
                return f"version {fetch.version} in {fetch.seconds:.3f} s from {sources}"
            case "retry":
                self.retried.append(fields["kind"])
                return f"tries again: {fields['kind']}"
            case _:
                raise CommandError("DemoFailed", f"{name} sent an unknown event: {event!r}")

    def passed(self, version: int, rollout: str) -> bool:
        return any(held >= version for held, name in self.fetches if name == rollout)

    def passed_by_all(self, version: int) -> bool:
        return all(self.passed(version, rollout) for rollout in self.rollouts)

    def is_done(self, version: int, by_all: bool) -> bool:
        """Whether the version is published, and (`by_all`) has been passed by every rollout."""
        return version in self.publications and (not by_all or self.passed_by_all(version))

    def same_bytes(self, version: int, rollout: str) -> bool:
        return self.fetches[version, rollout].digest == self.publications[version].digest

    def same_output(self, version: int, rollout: str) -> bool:
        """Whether a forward pass over the fetched weights gave what the trainer's own gave."""
        ours, theirs = self.fetches[version, rollout].probe, self.publications[version].probe
        return len(ours) == len(theirs) and all(
            a == b or math.isclose(a, b, rel_tol=PROBE_TOLERANCE, abs_tol=PROBE_TOLERANCE)
            for a, b in zip(ours, theirs, strict=True)
        )

    def problems(self) -> list[str]:
        """Everything that should not be; empty after a good run."""
        found = []
        for version, rollout in sorted(self.fetches):
            if version not in self.publications:
                found.append(f"{rollout} holds version {version}, which the trainer did not publish")
            elif not self.same_bytes(version, rollout):
                found.append(f"the bytes of version {version} at {rollout} are not the trainer's")
            elif not self.same_output(version, rollout):
                found.append(f"version {version} computes something else at {rollout} than at the trainer")
        return found

    def reads(self) -> dict[tuple[str, str], int]:
        """Bytes by (reader, source), over all versions."""
        total: defaultdict[tuple[str, str], int] = defaultdict(int)
        for (_, rollout), fetch in self.fetches.items():
            for source in fetch.sources:
                total[rollout, source["name"]] += source["bytes_read"]
        return dict(total)

    def summary(self) -> str:
        """One line for the end of a good run."""
        given = sum(amount for (_, source), amount in self.reads().items() if source == TRAINER)
        copies = len(self.fetches)
        share = given / (copies * self.nbytes) if copies and self.nbytes else 0.0
        retried = f"; {len(self.retried)} retried" if self.retried else ""
        return (
            f"{len(self.publications)} versions of {self.nbytes / MB:,.1f} MB in {self.tensors} tensors; "
            f"{copies} copies at {len(self.rollouts)} rollouts, every byte and every output equal to the trainer's; "
            f"the trainer sent {share:.0%} of what was read{retried}"
        )

    # ------------------------------------------------------------------------------------------------------- JSON

    def as_json(self, weights: str) -> dict[str, object]:
        reads = [
            {"reader": reader, "source": source, "bytes": amount}
            for (reader, source), amount in sorted(self.reads().items())
        ]
        versions = [self._version_json(number) for number in sorted(self.publications)]
        return {
            "ok": not self.problems(),
            "problems": self.problems(),
            "weights": weights,
            "tensors": self.tensors,
            "bytes": self.nbytes,
            "retried": self.retried,
            "versions": versions,
            "reads": reads,
        }

    def _version_json(self, number: int) -> dict[str, object]:
        made = self.publications[number]
        workers = [self._fetch_json(number, name) for name in self.rollouts if (number, name) in self.fetches]
        return {
            "version": number,
            "loss": made.loss,
            "sha256": made.digest,
            "drain_s": made.drain_s,
            "step_s": made.step_s,
            "publish_s": made.publish_s,
            "workers": workers,
            "skipped_by": [name for name in self.rollouts if (number, name) not in self.fetches],
        }

    def _fetch_json(self, version: int, rollout: str) -> dict[str, object]:
        fetch = self.fetches[version, rollout]
        return {
            "worker": rollout,
            "stall_s": fetch.stall_s,
            "attempts": fetch.attempts,
            "sha256": fetch.digest,
            "same_bytes": self.same_bytes(version, rollout),
            "same_output": self.same_output(version, rollout),
            **fetch.report,
        }

    # ----------------------------------------------------------------------------------------------------- tables

    def fetch_table(self) -> Table:
        """One row for each version and rollout."""
        table = _table("versions")
        columns = "version|loss|step s|worker|fetch s|MB|MB/s|read from|stall ms|tries|bytes|output".split("|")
        for column in columns:
            left = column in ("worker", "read from", "bytes", "output")
            table.add_column(column, justify="left" if left else "right", overflow="fold", no_wrap=column == "worker")
        for number, made in sorted(self.publications.items()):
            head = (str(number), f"{made.loss:.3f}", f"{made.step_s:.2f}")
            for rollout in self.rollouts:
                table.add_row(*head, *self._cells(number, rollout))
                head = ("", "", "")
        return table

    def _cells(self, version: int, rollout: str) -> tuple[str | Text, ...]:
        fetch = self.fetches.get((version, rollout))
        if fetch is None:
            return rollout, "", "", "", Text("skipped", "dim")  # a newer one came first
        rate = f"{fetch.bytes_read / fetch.seconds / MB:,.0f}" if fetch.seconds else ""
        sources = ", ".join(f"{source['name']} {source['bytes_read'] / MB:,.1f}" for source in fetch.sources)
        return (
            rollout,
            f"{fetch.seconds:.3f}",
            f"{fetch.bytes_read / MB:,.1f}",
            rate,
            Text(sources),
            f"{fetch.stall_s * 1000:,.0f}",
            str(fetch.attempts),
            _mark(self.same_bytes(version, rollout)),
            _mark(self.same_output(version, rollout)),
        )

    def read_table(self) -> Table:
        """MB read over all versions: a row for each reader, a column for each source."""
        reads = self.reads()
        sources = [name for name in (TRAINER, *self.rollouts) if any(name == source for _, source in reads)]
        table = _table("who read from whom, MB")
        table.add_column("reader", overflow="fold")
        for source in sources:
            table.add_column(Text(f"from {source}"), justify="right", overflow="fold")
        for reader in self.rollouts:
            cells = (reads.get((reader, source), 0) / MB for source in sources)
            table.add_row(Text(reader), *(f"{cell:,.1f}" if cell else "·" for cell in cells))
        totals = (sum(reads.get((reader, source), 0) for reader in self.rollouts) / MB for source in sources)
        table.add_row("all", *(f"{total:,.1f}" for total in totals))
        return table


def _table(title: str) -> Table:
    """Narrow: at 80 columns nothing is cut, and the results of a few rollouts are not folded."""
    return Table(title=title, title_justify="left", title_style="bold", box=None, padding=(0, 1, 0, 0), pad_edge=False)


def _mark(good: bool) -> Text:
    return Text("equal", "green") if good else Text("DIFFERS", "bold red")
