"""What happens in a run, as its log and its plot have it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Event:
    """What happened. `kind`: a fault's kind; or up, publish, commit, ok, error of a process; or
    what the run did.
    """

    at_s: float
    process: str
    kind: str
    text: str = ""
    until_s: float | None = None  # of a fault

    def __str__(self) -> str:
        return f"{self.at_s:7.2f} s  {self.process:11} {self.kind:10} {self.text}"
