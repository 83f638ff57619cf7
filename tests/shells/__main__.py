"""`python -m tests.shells --seeds 200`: real shells under seeds. A seed that fails prints the line
that runs it again.
"""

from __future__ import annotations

import argparse
import faulthandler
import os
import pickle
import sys
import time
from collections import Counter

# isort: off
import tests.shells.strands  # noqa: F401 - first: it replaces the clocks

# isort: on
from tests.shells.bugs import BUGS, planted
from tests.shells.world import Outcome, run_seed

SECONDS_MAX = 120  # of one seed; then its real threads are shown, and the run ends


def apart(seed: int) -> Outcome:
    """Run it in a process of its own, which ends with whatever the seed leaves."""
    read, write = os.pipe()
    if not (child := os.fork()):
        try:
            os.close(read)
            # one thread goes on at a time: a turn is passed on sooner on one core
            os.sched_setaffinity(
                0, {sorted(os.sched_getaffinity(0))[seed % len(os.sched_getaffinity(0))]}
            )
            faulthandler.dump_traceback_later(SECONDS_MAX, exit=True)
            with open(write, "wb") as pipe:
                pipe.write(pickle.dumps(run_seed(seed)))
        finally:
            os._exit(0)
    os.close(write)
    with open(read, "rb") as pipe:
        said = pipe.read()
    os.waitpid(child, 0)
    if not said:
        return Outcome(seed, ["its process has died"], [], Counter(), 0, "")
    found: Outcome = pickle.loads(said)
    return found


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.shells", description=__doc__)
    parser.add_argument("--seeds", type=int, default=100, help="how many")
    parser.add_argument("--start", type=int, default=0, help="the first one")
    parser.add_argument("--seed", type=int, help="only this one, with its trace")
    parser.add_argument("--bug", choices=BUGS, help="with this bug put into the code")
    given = parser.parse_args()
    if given.bug:
        planted(given.bug).__enter__()  # for good
    seeds = range(given.start, given.start + given.seeds)
    if given.seed is not None:
        seeds = range(given.seed, given.seed + 1)
    failed, counts, clock = 0, Counter[str](), time.perf_counter
    began = clock()
    for seed in seeds:
        found = apart(seed)
        counts.update(found.counts)
        if given.seed is not None:
            print("\n".join(found.trace))
            print(f"{found.points} points, order {found.order}, {dict(found.counts)}")
        if found.faults:
            failed += 1
            print(f"seed {seed}:")
            for fault in found.faults[:5]:
                print(f"  {fault}")
            print(f"reproduce: python -m tests.shells --seed {seed}", flush=True)
    print(
        f"{len(seeds)} seeds, {failed} failed, {clock() - began:.1f} s; {dict(sorted(counts.items()))}"
    )
    return 1 if failed else 0


if __name__ == "__main__":
    if os.environ.get("PYTHONHASHSEED") != "0":  # the order of sets is a part of the seed
        os.environ["PYTHONHASHSEED"] = "0"
        os.execv(sys.executable, [sys.executable, "-m", "tests.shells", *sys.argv[1:]])
    sys.exit(main())
