"""What `tensorhub bench --cluster` has found, as a document and as tables. Pure."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import tensorhub

from .report import GIB, Spread


@dataclass
class Found:
    """Everything that was measured; machines have their ranks for names."""

    machines: list[dict[str, Any]] = field(default_factory=list)
    links: list[dict[str, Any]] = field(default_factory=list)
    copies: list[dict[str, Any]] = field(default_factory=list)
    reasons: dict[str, str] = field(default_factory=dict)  # why something was not measured
    mib: int = 0

    def document(self) -> dict[str, Any]:
        """Everything, so that another reader can come to other rows."""
        return {
            "tensorhub": tensorhub.__version__,
            "mib": self.mib,
            "machines": self.machines,
            "links": self.links,
            "copies": self.copies,
            "not measured": self.reasons,
        }

    def markdown(self) -> str:
        """Tables for people."""
        how = "with" if any(each["tls"] for each in self.machines) else "without"
        what = f"{len(self.machines)} machines, {self.mib} MiB a copy, {how} TLS"
        lines = [f"TensorHub {tensorhub.__version__}, {what}", ""]
        lines += ["| machine | CPU | Linux | interface |", "|---|---|---|---|"]
        for rank, each in enumerate(self.machines):
            shown = ", ".join(f"{name} {value}" for name, value in each["interface"].items())
            lines.append(
                f"| {rank} | {each['cores']} x {each['cpu']} | {each['kernel']} | {shown} |"
            )
        lines += [
            "",
            "| link | round trip us (p99) | Gbit/s, 1 socket | 4 sockets |",
            "|---|---|---|---|",
        ]
        for link in self.links:
            trip, rate = link["round trip us"], link["gbit/s"]
            lines.append(
                f"| {link['from']} -> {link['to']} | {trip['median']:.0f} ({trip['p99']:.0f}) "
                f"| {rate['1']:.2f} | {rate['4']:.2f} |"
            )
        lines += [
            "",
            "| copy | by | seconds | Gbit/s in all | of bare sockets | CPU s/GiB source, reader | from rank 0 |",
            "|---|---|---|---|---|---|---|",
        ]
        lines += [self._row(by, to) for to, by in self._rows()]
        lines += ["", *(f"{what}: {reason}" for what, reason in self.reasons.items())]
        return "\n".join(lines)

    def _rows(self) -> list[tuple[list[int], str]]:
        rows: list[tuple[list[int], str]] = []
        for copy in self.copies:
            if (row := (copy["to"], copy["by"])) not in rows:
                rows.append(row)
        return sorted(rows, key=lambda row: (len(row[0]), row[0]))

    def _seconds(self, to: Sequence[int]) -> dict[str, dict[int, float]]:
        """Of each mean: the median of each round."""
        found: dict[str, dict[int, list[float]]] = {}
        for copy in self.copies:
            if copy["to"] == to:
                found.setdefault(copy["by"], {}).setdefault(copy["round"], []).append(
                    copy["seconds"]
                )
        return {
            by: {number: statistics.median(times) for number, times in rounds.items()}
            for by, rounds in found.items()
        }

    def _row(self, by: str, to: Sequence[int]) -> str:
        mine = [copy for copy in self.copies if (copy["by"], copy["to"]) == (by, to)]
        gib = self.mib * 2**20 / GIB
        seconds = Spread.of([copy["seconds"] for copy in mine])
        rates = Spread.of([len(to) * self.mib * 2**20 * 8e-9 / copy["seconds"] for copy in mine])
        medians = self._seconds(to)
        ceilings = [rounds for name, rounds in medians.items() if name.startswith("bare-")]
        ratios = Spread.of(
            [
                min(rounds[number] for rounds in ceilings if number in rounds) / value
                for number, value in medians[by].items()
                if any(number in rounds for rounds in ceilings)
            ]
        )
        source = statistics.median(copy["source_cpu_s"] for copy in mine) / (gib * len(to))
        reader = statistics.median(max(copy["reader_cpu_s"]) for copy in mine) / gib
        share = ""
        if not by.startswith("bare-"):
            read = [each for copy in mine for one in copy["readers"] for each in one["sources"]]
            total = sum(each["bytes"] for each in read)
            share = (
                f"{sum(each['bytes'] for each in read if each['rank'] == 0) / max(total, 1):.0%}"
            )
        way = f"0 -> {', '.join(map(str, to))}"
        return f"| {way} | {by} | {seconds} | {rates} | {ratios or ''} | {source:.2f}, {reader:.2f} | {share} |"
