"""How long a fill took, and for what. The phases of its report are wall time, and add up to the
call.

Responsible for the times that are noted while a call runs, and for the `FetchReport` that is made
of them. Not responsible for what a pull's lanes count (`runtime.data.lanes`).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from tensorhub.runtime.data.lanes import PullReport
from tensorhub.types import FetchReport
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
    hooked: float | None = None  # when before_write began, of a staged update
    hook_s: float = 0.0  # that it took there
    pull: PullReport | None = None
    # verified bytes that have to be read again, since the new plan has other chunks
    lost_bytes: int = 0

    def begin_pull(self, now: float, *, again: bool) -> None:
        """It begins. `again`: see `add_pull`."""
        self.pulled_from = now
        if not again:
            # of one that was given up: no part of this one's time
            self.verified_s = self.hook_s = 0.0

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

    def report_of(self, finish: Finish, started: float, ended: float) -> FetchReport:
        """Of a call that has ended well."""
        assert finish.version is not None
        pull, number = self.pull, finish.version.version
        if pull is None or self.bound is None:
            seconds, phases = ended - started, {"resolve": ended - started}
            report = FetchReport(
                number, finish.changed, seconds=seconds, phases=phases, rebinds=finish.rebinds
            )
            return replace(report, verified_by=_verified_by(finish))
        phases = pull_phases(pull, self.pulled - self.pulled_from - self.verified_s)
        phases["verify"] += self.verified_s
        phases["resolve"] = self.bound - started
        phases["wait"] += self.pulled_from - self.bound - self.copied_s + self.hook_s
        phases["unpack"] = self.prepared - self.pulled + self.copied_s + self.applied_s
        phases["commit"] = ended - self.prepared - self.applied_s - self.hook_s
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
