"""What watching a large cluster costs its coordinator: CPU of a summary, of a page and of a part of
a whole description.

The pure coordinator with thin workers, at rest and while all of them wait or read. Each question is
asked again and again in one thread; its step and its answer's encoding are timed in this thread's
CPU time. Whoever watches asks once a second: 10 ms are one per cent of the coordinator's loop.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from statistics import median

from benches.scale.core import Core
from tensorhub.coordinator import Connected, Received, Send, Tick
from tensorhub.messages import Describe, FromWorker
from tensorhub.protocol import codec

WATCHER = 2**30  # its session
HEAD = (
    f"{'workers':>8}{'ranks':>6}  "
    f"{'all of them':<12}{'question':<12}{'step ms':>9}{'encoding ms':>13}{'bytes':>12}"
)


def ask(core: Core, question: Callable[[int], FromWorker], rounds: int) -> tuple[float, float, int]:
    """Median seconds of the step and of the encoding, and the bytes of the answer."""
    steps, encodings, nbytes = [], [], 0
    for number in range(rounds):
        began = time.thread_time()
        (answer,) = core.coordinator.step(Received(WATCHER, question(number)), core.now)
        stepped = time.thread_time()
        assert isinstance(answer, Send)
        nbytes = len(codec.encode(answer.message))
        steps.append(stepped - began)
        encodings.append(time.thread_time() - stepped)
    return median(steps), median(encodings), nbytes


def let_all_happen(core: Core) -> None:
    """But for what readers report by themselves."""
    while True:
        while core.said:
            core.step(core.said.popleft())
        deadline = core.coordinator.next_deadline()
        if deadline is None or deadline > core.now:
            return
        core.step(Tick())


def measure(workers: int, ranks: int, rounds: int) -> None:
    core = Core(workers, ranks, manifest_bytes=100_000)
    core.connect()
    core.version(1, wait_first=False)
    core.coordinator.step(Connected(WATCHER, "watcher.1", "observer"), core.now)
    (name,) = core.coordinator.cluster.models

    def show(doing: str) -> None:
        for question, make in (
            ("counts", lambda number: Describe(number, name, workers_max=0)),
            ("page of 40", lambda number: Describe(number, name, workers_max=40)),
            # the first of those that make up `describe(name)`
            ("a part", lambda number: Describe(number, name)),
        ):
            step_s, encoding_s, nbytes = ask(core, make, rounds)
            figures = f"{step_s * 1e3:>9.2f}{encoding_s * 1e3:>13.2f}{nbytes:>12,}"
            print(f"{workers:>8}{ranks:>6}  {doing:<12}{question:<12}{figures}", flush=True)

    show("hold it")
    core.call(2)
    let_all_happen(core)
    show("wait")
    core.unpublish(core.publishers)
    let_all_happen(core)
    core.publish(2)
    let_all_happen(core)
    show("read")


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m benches.scale.questions", description=__doc__)
    parser.add_argument("--workers", type=int, nargs="+", default=[64, 1024])
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 8], help="of a group")
    parser.add_argument("--rounds", type=int, default=15)
    options = parser.parse_args(arguments)
    print(HEAD)
    for ranks in options.ranks:
        for workers in options.workers:
            measure(workers, ranks, options.rounds)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
