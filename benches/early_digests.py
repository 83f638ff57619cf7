"""What the digests that are made right after each publication cost a busy trainer, with no reader
about.

One process, whose trainer publishes after every step; a step multiplies matrices with all of
torch's threads, or runs pure Python. With early digests and without, in turns within a round; `with
/ without` is of the steps per second. `mutate` is the longest one: how long the digests that are
being made keep the trainer from its memory. `CPU ms/GiB` is what the thread that makes them takes,
which says more than a rate where other processes want the cores, too.

    python -m benches early_digests --mib 256 --rounds 15
"""

import argparse
import json
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from typing import Any

from benches.comparison.facts import facts
from benches.one_to_n import spread
from tensorhub import sync
from tensorhub.memory.chunks import ChunkMemory
from tensorhub.model.accesses import Access
from tensorhub.runtime.data.serving import SharedOwner
from tensorhub.runtime.worker.handle import Handle

WAYS = ("without", "with")
ROUND_S = 1.0  # of each way
PYTHON_STEPS = 200_000


class Made:
    """What early digests have cost."""

    def __init__(self) -> None:
        self.cpu_s = 0.0
        self.nbytes = 0


@contextmanager
def counted(made: Made) -> Iterator[None]:
    """Count what is digested by whole calls in this block: those that a publication begins."""
    make, keep = SharedOwner.make_digests, SharedOwner.keep_digest

    def makes(owner: SharedOwner, *what: Any, **how: Any) -> None:
        began = time.thread_time()
        make(owner, *what, **how)
        made.cpu_s += time.thread_time() - began

    def keeps(
        owner: SharedOwner, access: Access, memory: ChunkMemory, chunk: int, digest: int
    ) -> int:
        made.nbytes += memory.sizes[chunk]
        return keep(owner, access, memory, chunk, digest)

    SharedOwner.make_digests, SharedOwner.keep_digest = makes, keeps  # type: ignore[assignment,method-assign]
    try:
        yield
    finally:
        SharedOwner.make_digests, SharedOwner.keep_digest = make, keep  # type: ignore[method-assign]


@contextmanager
def early(is_early: bool) -> Iterator[None]:
    """Publications in this block have their digests made early, or not."""
    usual = Handle._digest_early
    if not is_early:
        Handle._digest_early = lambda handle: None  # type: ignore[assignment,method-assign]
    try:
        yield
    finally:
        Handle._digest_early = usual  # type: ignore[method-assign]


def measure(
    mib: int, rounds: int, name: str, step: Callable[[], object], seconds: float = ROUND_S
) -> dict[str, Any]:
    """Steps per second both ways; the first round does not count."""
    import torch

    tensors = {f"w{number}": torch.zeros(mib * 2**20 // 4 // 16) for number in range(16)}
    numbers, rates, longest = (
        count(1),
        {way: list[float]() for way in WAYS},
        dict.fromkeys(WAYS, 0.0),
    )
    made = Made()
    with (
        counted(made),
        sync.serve(token="") as coordinator,
        sync.connect(coordinator.address, token="") as hub,
    ):
        weights = hub.register("m", tensors)
        for round_ in range(rounds + 1):
            for way in WAYS if round_ % 2 else WAYS[::-1]:
                with early(way == "with"):
                    rate, mutate_s = _train(weights, tensors, numbers, step, seconds)
                if round_:
                    rates[way].append(rate)
                    longest[way] = max(longest[way], mutate_s)
    ratios = [some / none for some, none in zip(rates["with"], rates["without"], strict=True)]
    row: dict[str, Any] = {"trainer": name, "MiB": mib, "with / without": spread(ratios)}
    row["CPU ms/GiB"] = round(1000 * made.cpu_s / (made.nbytes / 2**30), 1)
    row |= {f"steps/s {way}": spread(rates[way]) for way in WAYS}
    return row | {f"longest mutate ms, {way}": round(1000 * longest[way], 1) for way in WAYS}


def _train(
    weights: sync.Weights,
    tensors: Mapping[str, Any],
    numbers: Iterator[int],
    step: Callable[[], object],
    seconds: float,
) -> tuple[float, float]:
    started, steps, longest_s = time.perf_counter(), 0, 0.0
    while (now := time.perf_counter()) < started + seconds:
        step()
        begins = time.perf_counter()
        with weights.mutate(next(numbers)):
            for tensor in tensors.values():
                tensor[:1024] += 1
        longest_s = max(longest_s, time.perf_counter() - begins)
        steps += 1
    return steps / (now - started), longest_s


def main(arguments: list[str] | None = None) -> int:
    import torch

    parser = argparse.ArgumentParser(prog="python -m benches early_digests", description=__doc__)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--mib", type=int, default=256, help="bytes of the model, in MiB")
    parser.add_argument("--seconds", type=float, default=ROUND_S, help="of each way in each round")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write facts and rows")
    options = parser.parse_args(arguments)
    if min(options.rounds, options.mib) < 1 or options.seconds <= 0:
        parser.error("give at least 1 of each")
    known = facts()
    for name, value in known.items():
        print(f"{name}: {value}")
    a = torch.rand(1024, 1024)
    steps: dict[str, Callable[[], object]] = {
        "torch, all threads": lambda: a @ a,
        "pure Python": lambda: sum(range(PYTHON_STEPS)),
    }
    rows = [
        measure(options.mib, options.rounds, name, step, options.seconds)
        for name, step in steps.items()
    ]
    for row in rows:
        print("  ".join(f"{name}: {value}" for name, value in row.items()))
    if options.json is not None:
        options.json.write_text(json.dumps({"machine": known, "rows": rows}))
    return 0
