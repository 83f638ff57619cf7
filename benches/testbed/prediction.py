"""What the flow model says of the same scenario, beside what was measured.

The model knows links and the real scheduler, and neither processors nor kernels.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import Final

from benches.testbed.accounting import Attempt, attempts
from benches.testbed.report import Row
from benches.testbed.run import Result
from benches.testbed.ways import WAYS
from tensorhub.testing.flow import run as model
from tensorhub.testing.flow.scenario import Scenario, in_groups

MODELS: Final[Mapping[str, str]] = {
    "tensorhub": "tensorhub",
    "tensorhub+seeds": "tensorhub+seeds",
    "tensorhub+prefetch": "tensorhub+prefetch",
    "tensorhub+groups": "tensorhub",
    "tensorhub+resharded": "tensorhub+resharded",
    "chain-waits": "broadcast",
    "chain-pauses": "broadcast-pausing",
    "sockets": "pull",
    "nixl": "pull",
    "redis": "storage",
    "s3": "storage",
    "web": "storage",
}


def table(scenario: Scenario, rows: Sequence[Row], results: Sequence[Result]) -> list[str]:
    """Mean seconds of updates and of joins that were done, of both, and by how much the model is
    off.
    """
    lines = [f"{'system':<44}{'':>8}{'measured s':>12}{'predicted s':>12}{'off':>8}"]
    for row in rows:
        name = MODELS.get(row.way)
        mine = [
            attempt
            for result in results
            if result.way == row.way
            for attempt in attempts(result.events)
        ]
        grouped = in_groups(scenario, WAYS[row.way].options.get("ranks", 1))
        if name is None or not mine or name not in model.possible(grouped):
            continue
        said = model.run_one(grouped, name).row
        for what, predicted in (("join", said.joins.mean_s), ("update", said.updates.mean_s)):
            measured = mean_s(mine, what)
            if predicted is not None and measured is not None:
                figures = f"{measured:>12.3f}{predicted:>12.3f}{predicted / measured - 1:>+8.0%}"
                lines.append(f"{WAYS[row.way].title:<44}{what + 's':>8}{figures}")
    return lines


def mean_s(found: Sequence[Attempt], what: str) -> float | None:
    done = [
        attempt.seconds for attempt in found if attempt.what == what and attempt.outcome == "done"
    ]
    return fmean(done) if done else None
