"""Imported by each Python process with this folder in its path, when the process starts."""

import os
from pathlib import Path

from tensorhub.testing.history import FOLDER_VARIABLE, record_from_now_on

if FOLDER_VARIABLE in os.environ:
    record_from_now_on(Path(os.environ[FOLDER_VARIABLE]))
