"""The demo's results: which rollout held which version, how it got there, and whether the bytes are
the trainer's.

Pure: events go in, news, tables and JSON come out.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from rich.table import Table
from rich.text import Text

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
    digest: str
    probe: list[float]
    seconds: float
    bytes_read: int
    sources: dict[str, int]  # bytes by the source's name


@dataclass
class Results:
    """All that the processes of a run have said."""

    rollouts: Sequence[str]
    ready: set[str] = field(default_factory=set)  # names of processes
    tensors: int = 0
    nbytes: int = 0
    publications: dict[int, Publication] = field(default_factory=dict)
    fetches: dict[tuple[int, str], Fetch] = field(default_factory=dict)

    def record(self, name: str, event: str, fields: Mapping[str, Any]) -> str:
        """Enter one event of the process `name`; returns it in words."""
        if event == "ready":
            self.ready.add(name)
            self.tensors, self.nbytes = fields["tensors"], fields["nbytes"]
            return f"ready: {self.tensors} tensors, {self.nbytes / MB:,.1f} MB"
        if event == "published":
            made = self.publications[fields["version"]] = Publication(**fields)
            return f"version {made.version} published, loss {made.loss:.4f}"
        fetch = self.fetches[fields["version"], name] = Fetch(**fields)
        return f"version {fetch.version} in {fetch.seconds:.3f} s from {', '.join(fetch.sources)}"

    def is_done(self, version: int) -> bool:
        """Whether the version is published, and every rollout has it."""
        return version in self.publications and all(
            (version, name) in self.fetches for name in self.rollouts
        )

    def same_bytes(self, version: int, rollout: str) -> bool:
        return self.fetches[version, rollout].digest == self.publications[version].digest

    def same_output(self, version: int, rollout: str) -> bool:
        """Whether a forward pass over the fetched weights gave what the trainer's own gave."""
        ours, theirs = self.fetches[version, rollout].probe, self.publications[version].probe
        return len(ours) == len(theirs) and all(
            math.isclose(a, b, rel_tol=PROBE_TOLERANCE, abs_tol=PROBE_TOLERANCE)
            for a, b in zip(ours, theirs, strict=True)
        )

    def problems(self) -> list[str]:
        """Everything that should not be; empty after a good run."""
        found = []
        for version, rollout in sorted(self.fetches):
            if version not in self.publications:
                found.append(
                    f"{rollout} holds version {version}, which the trainer did not publish"
                )
            elif not self.same_bytes(version, rollout):
                found.append(f"the bytes of version {version} at {rollout} are not the trainer's")
            elif not self.same_output(version, rollout):
                found.append(
                    f"version {version} computes something else at {rollout} than at the trainer"
                )
        return found

    def summary(self) -> str:
        """One line for the end of a good run."""
        given = sum(fetch.sources.get(TRAINER, 0) for fetch in self.fetches.values())
        copies = len(self.fetches)
        return (
            f"{len(self.publications)} versions of {self.nbytes / MB:,.1f} MB in {self.tensors} "
            f"tensors; "
            f"{copies} copies at {len(self.rollouts)} rollouts, every byte and every output equal "
            f"to the trainer's; "
            f"the trainer sent {given / (copies * self.nbytes):.0%} of what was read"
        )

    def as_json(self, weights: str) -> dict[str, object]:
        workers = [
            {"worker": name, "same_output": self.same_output(version, name), **asdict(fetch)}
            for (version, name), fetch in sorted(self.fetches.items())
        ]
        return {
            "ok": not self.problems(),
            "problems": self.problems(),
            "weights": weights,
            "tensors": self.tensors,
            "bytes": self.nbytes,
            "versions": [asdict(made) for made in self.publications.values()],
            "fetches": workers,
        }

    def table(self) -> Table:
        """One row for each version and rollout. At 80 columns nothing is cut, and a few rollouts'
        results are not folded.
        """
        table = Table(
            title="versions",
            title_justify="left",
            title_style="bold",
            box=None,
            padding=(0, 1, 0, 0),
            pad_edge=False,
        )
        for (
            column
        ) in "version|loss|step s|worker|fetch s|MB|MB/s|read from|stall ms|bytes|output".split(
            "|"
        ):
            left = column in ("worker", "read from", "bytes", "output")
            table.add_column(
                column,
                justify="left" if left else "right",
                overflow="fold",
                no_wrap=column == "worker",
            )
        for (version, rollout), fetch in sorted(self.fetches.items()):
            made = self.publications[version]
            table.add_row(
                *(
                    (str(version), f"{made.loss:.3f}", f"{made.step_s:.2f}")
                    if rollout == self.rollouts[0]
                    else ("", "", "")
                ),
                rollout,
                f"{fetch.seconds:.3f}",
                f"{fetch.bytes_read / MB:,.1f}",
                f"{fetch.bytes_read / fetch.seconds / MB:,.0f}" if fetch.seconds else "",
                Text(
                    ", ".join(
                        f"{name} {nbytes / MB:,.1f}" for name, nbytes in fetch.sources.items()
                    )
                ),
                f"{fetch.stall_s * 1000:,.0f}",
                _mark(self.same_bytes(version, rollout)),
                _mark(self.same_output(version, rollout)),
            )
        return table


def _mark(good: bool) -> Text:
    return Text("equal", "green") if good else Text("DIFFERS", "bold red")
