"""`python -m benches.testbed.trained LR VERSIONS BYTES FILE`: writes the versions of a real model,
the first so many bytes of each, one after the other (`benches.deltas`).
"""

from __future__ import annotations

import sys
from itertools import islice
from pathlib import Path

from benches.deltas import published, training_of

STEPS, CONTEXTS = 8, 8  # before the first version; of a batch: it is for few minutes on two cores


def main(learning_rate: float, versions: int, nbytes: int, file: Path) -> None:
    with file.open("wb") as out:
        for parameters in islice(training_of(learning_rate, CONTEXTS), STEPS, STEPS + versions):
            whole = b"".join(published([*parameters.values()], "bf16"))
            if len(whole) < nbytes:
                sys.exit(f"the model has {len(whole) / 1e6:g} MB: give less (--mb)")
            out.write(whole[:nbytes])


if __name__ == "__main__":
    main(float(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), Path(sys.argv[4]))
