"""How many workers a coordinator of `tensorhub serve` can have here: each session is a descriptor
(`ulimit -n`).

A process may raise its own soft limit to the hard limit, and `serve` does. Responsible for that,
and for the number of workers that the hard limit allows, with advice.
"""

from __future__ import annotations

import resource
import sys
from dataclasses import dataclass
from typing import Final

from tensorhub.runtime.control.accepting import caps, descriptors_for
from tensorhub.types import Options

SESSIONS_MAX: Final = Options().sessions_max


@dataclass(frozen=True)
class Descriptors:
    """What this process may have open."""

    hard: int
    sessions: int  # that fit beside pending connections and the reserve
    needed: int  # for SESSIONS_MAX of them

    @property
    def room(self) -> str:
        """For people: how many workers, and what keeps them from being more."""
        return (
            f"{self.sessions:,} workers{f' (`ulimit -Hn` is {self.hard})' if self.advice else ''}"
        )

    @property
    def advice(self) -> str:
        """What to do for more room; empty if there is room for SESSIONS_MAX."""
        if self.hard >= self.needed:
            return ""
        return (
            f"raise it to {self.needed} for {SESSIONS_MAX:,} (LimitNOFILE= in systemd, --ulimit "
            f"nofile= for containers)"
        )


def raise_descriptors() -> Descriptors:
    """Raise this process' soft limit to a coordinator's need, within the hard limit. Returns the
    limits then.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    found = descriptors()
    wanted = min(found.needed, found.hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    return found


def descriptors() -> Descriptors:
    """What there is room for under the hard limit."""
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    hard = sys.maxsize if limit == resource.RLIM_INFINITY else limit
    return Descriptors(hard, caps(SESSIONS_MAX, hard)[1], descriptors_for(SESSIONS_MAX))
