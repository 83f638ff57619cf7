"""A search whose import takes START_S seconds in the process that runs the seeds, or fails if that
is no number.
"""

import os
import sys
import time
from pathlib import Path

from tests.testing.standin import RECOVERY_PATHS, Fault, run_seed

__all__ = ["RECOVERY_PATHS", "Fault", "run_seed"]

if Path(sys.argv[0]).name == "simulate_worker.py":
    time.sleep(float(os.environ["START_S"]))
