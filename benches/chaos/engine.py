"""What elects a coordinator of the run, and which processes that takes.

As a program, `python -m benches.chaos.engine NAME HOST DIRECTORY NAME=HOST,...`: one member of etcd,
which ends with the thread that has started it.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import signal
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

CLIENT_PORT: Final = 2379
PEER_PORT: Final = 2380
LEASE_S: Final = 3  # of a coordinator's leadership
ETCD: Final = shutil.which("etcd") or "/usr/bin/etcd"
_PR_SET_PDEATHSIG: Final = 1


@dataclass(frozen=True, slots=True)
class Engine:
    """`kind`: as `--ha` names it; none: one coordinator, which is started again."""

    kind: str | None
    coordinators: tuple[str, ...]
    members: tuple[str, ...] = ()  # of etcd


ALONE: Final = Engine(None, ("coordinator",))
ENGINES: Final = {
    "lock": Engine("lock", ("coordinator-0", "coordinator-1")),
    "etcd": Engine("etcd", ("coordinator-0", "coordinator-1"), ("etcd-0", "etcd-1", "etcd-2")),
}


def url_of(engine: Engine, members: Iterable[str]) -> str | None:
    """What `serve(ha=)` takes, of the members' "HOST:PORT"."""
    return f"etcd://{','.join(members)}/chaos?lease_s={LEASE_S}" if engine.members else engine.kind


def main(name: str, host: str, directory: str, members: str) -> None:
    here, there = f"http://{host}:{CLIENT_PORT}", f"http://{host}:{PEER_PORT}"
    peers = (each.split("=") for each in members.split(","))
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    os.execv(
        ETCD,
        [
            "etcd",
            f"--name={name}",
            f"--data-dir={directory}",
            f"--listen-client-urls={here}",
            f"--advertise-client-urls={here}",
            f"--listen-peer-urls={there}",
            f"--initial-advertise-peer-urls={there}",
            "--initial-cluster="
            + ",".join(f"{peer}=http://{at}:{PEER_PORT}" for peer, at in peers),
            "--log-level=error",
            "--unsafe-no-fsync",  # processes die here, machines do not
        ],
    )


if __name__ == "__main__":
    main(*sys.argv[1:])
