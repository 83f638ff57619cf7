"""`python -m tests.rdma.guest COMMAND [ARGUMENT...]`: run a command in a guest that has RDMA
devices, in this directory. With TENSORHUB_RDMA_GUEST=built only if its kernel is there already.
"""

from __future__ import annotations

import os
import sys
import tempfile
from pathlib import Path

from tests.rdma.guest import machine

LIMIT_S = 900.0


def main(command: list[str]) -> int:
    if not command or (fault := machine.why_not()) is not None:
        sys.stderr.write(f"{fault if command else __doc__}\n")
        return 2
    with tempfile.TemporaryDirectory(prefix="tensorhub-guest-") as out:
        passed_on = {
            name: os.environ[name] for name in ("PYTHONPATH", "VIRTUAL_ENV") if name in os.environ
        }
        status = machine.run(command, Path(out), LIMIT_S, passed_on)
        sys.stdout.write((Path(out) / "console").read_text(errors="replace"))
    return status


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
