"""How long a fill took, and for what. The phases of its report are wall time, and add up to the
call.

Responsible for the times that are noted while a call runs, for the `FetchReport` that is made of
them, and for what observers are told of them. Not responsible for what a pull's lanes count
(`runtime.data.lanes`).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Literal

from tensorhub.messages import Took
from tensorhub.observed import LINKS_MAX, LinkTiming
from tensorhub.runtime.data.lanes import PullReport
from tensorhub.types import FetchReport, OpKey
from tensorhub.worker.calls import Finish


@dataclass(slots=True)
class CallTimes:
    """When what happened in one call."""

    bound: float | None = None  # Start has come
    pulled_from: float = 0.0  # these four: where something was pulled
    verified_s: float = 0.0  # spent on what the memory held of that content already
    pulled: float = 0.0
    prepared: float = 0.0
    copied_s: float = 0.0  # spent on local copies: before the pull
    applied_s: float = 0.0  # and after the vote, of what was staged
    hooked: float | None = None  # when before_write began
    # what the hook, fences and room took between the binding and the pull, and after the vote
    before: defaultdict[str, float] = field(default_factory=partial(defaultdict, float))
    after: defaultdict[str, float] = field(default_factory=partial(defaultdict, float))
    pull: PullReport | None = None
    # verified bytes that have to be read again, since the new plan has other chunks
    lost_bytes: int = 0
    key: OpKey | None = None  # of its last operation
    links: list[LinkTiming] = field(default_factory=list)  # those that took longest

    def note(self, name: str, began: float, ended: float) -> None:
        """Something besides reading and copying ran; before the binding it counts as waiting for
        that.
        """
        if self.prepared:
            self.after[name] += ended - began
        elif self.bound is not None:
            self.before[name] += ended - max(began, self.bound)

    def begin_pull(self, now: float, *, again: bool) -> None:
        """It begins. `again`: see `add_pull`."""
        self.pulled_from = now
        if not again:
            # of one that was given up: no part of this one's time
            self.verified_s = 0.0
            self.after.clear()

    def add_pull(self, pull: PullReport, now: float, *, again: bool) -> None:
        """Add a finished pull. `again`: it has read again chunks that were not as published.
        Otherwise a pull that is not the call's first has gone on in other chunks.
        """
        before = self.pull
        if before is not None:
            reread = pull.bytes_read
            if not again:
                self.lost_bytes += max(
                    0, pull.bytes_wanted - (before.bytes_wanted - before.bytes_verified)
                )
                reread = min(self.lost_bytes, pull.bytes_verified)
                self.lost_bytes -= reread
            pull = replace(
                pull,
                bytes_read=before.bytes_read + pull.bytes_read,
                reread_bytes=before.reread_bytes + reread,
                retries=before.retries + pull.retries,
                phases={
                    name: before.phases[name] + seconds for name, seconds in pull.phases.items()
                },
                sources=(*before.sources, *pull.sources),
            )
        self.pull, self.pulled = pull, now

    def phases(self, started: float, ended: float) -> dict[str, float]:
        """See `observed.PHASE_NAMES`: of a call that has ended, well or not."""
        bound = ended if self.bound is None else self.bound
        pulled_from = self.pulled_from if self.pull is not None else ended
        pulled = self.pulled if self.pull is not None else ended
        prepared = max(pulled, self.prepared)
        before, after = self.before, self.after
        phases = {"resolve": bound - started}
        phases["prepare"] = pulled_from - bound - sum(before.values()) - self.copied_s
        for name in ("hook", "fence", "room"):
            phases[name] = before[name] + after[name]
        phases["copy"] = self.copied_s
        if self.pull is not None:
            phases |= pull_phases(self.pull, pulled - pulled_from - self.verified_s)
            phases["verify"] += self.verified_s
        phases["unpack"] = (prepared if self.prepared else pulled) - pulled
        phases["apply"] = self.applied_s
        phases["commit"] = ended - prepared - self.applied_s - sum(after.values())
        return phases

    def told(self, rank: int, started: float, ended: float) -> Took | None:
        """For observers; None: the call was not said to the coordinator."""
        if self.key is None:
            return None
        phases = [(name, took) for name, took in self.phases(started, ended).items() if took > 0]
        return Took(self.key, rank, ended - started, tuple(phases), tuple(self.links))

    def add_links(self, links: Iterable[LinkTiming]) -> None:
        """Lanes that have ended; the longest are kept."""
        found = sorted([*self.links, *links], key=lambda link: -link.seconds)
        self.links = found[:LINKS_MAX]

    def report_of(self, finish: Finish, started: float, ended: float) -> FetchReport:
        """Of a call that has ended well."""
        assert finish.version is not None
        pull, number, took = self.pull, finish.version.version, self.phases(started, ended)
        if pull is None or self.bound is None:
            seconds, phases = ended - started, {"resolve": ended - started}
            report = FetchReport(
                number, finish.changed, seconds=seconds, phases=phases, rebinds=finish.rebinds
            )
            return replace(report, verified_by=_verified_by(finish))
        fenced_s = self.after["fence"]
        phases = {name: took[name] for name in ("transfer", "verify", "resolve")}
        phases["unpack"] = took["copy"] + took["unpack"] + took["apply"]
        phases["commit"] = took["commit"] + fenced_s
        named_s = sum([took[name] for name in ("prepare", "hook", "fence", "room", "wait")])
        phases["wait"] = named_s - fenced_s
        return FetchReport(
            version=number,
            changed=finish.changed,
            bytes_read=pull.bytes_read,
            seconds=ended - started,
            phases=phases,
            sources=pull.sources,
            retries=pull.retries,
            reread_bytes=pull.reread_bytes,
            rebinds=finish.rebinds,
            verified_by=_verified_by(finish),
        )


def _verified_by(finish: Finish) -> Literal["publisher", "source"]:
    return "source" if finish.by_source else "publisher"


def pull_phases(pull: PullReport, seconds: float) -> dict[str, float]:
    """A pull's wall time: shared out as its lanes spent theirs, if they ran side by side; without a
    lane it waited.
    """
    lanes_s = max(sum(pull.phases.values()), seconds)
    transfer_s, verify_s = (
        pull.phases[name] * seconds / lanes_s if lanes_s else 0.0 for name in ("transfer", "verify")
    )
    return {
        "wait": max(0.0, seconds - transfer_s - verify_s),
        "transfer": transfer_s,
        "verify": verify_s,
    }
