"""The systems that are compared, by name, and what each needs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from benches.comparison import environments
from tensorhub.testing.flow.scenario import advice

# what stands between them is what a program adds to use a system
ENDS: Final = ("# lines", "# end of lines")


@dataclass(frozen=True, slots=True)
class Way:
    """`module`: in `systems`. `environment`: one that `--install` makes, whose packages it
    needs.
    """

    name: str
    title: str
    module: str
    options: Mapping[str, Any] = field(default_factory=dict)
    pauses: bool = False  # rollouts, in mid-generation
    is_fixed: bool = False  # a fixed group: nobody may come or go
    environment: str | None = None
    programs: tuple[str, ...] = ()
    roles: tuple[str, ...] = ()  # hosts that it needs besides trainer and rollouts

    def lacks(self) -> str | None:
        """Why it cannot run here; None if it can."""
        return environments.lacking(
            environments.default_directory(), self.environment, self.programs
        )

    def install(self) -> str | None:
        """Make its environment, if it needs one and there is none; why it could not be made."""
        return (
            environments.install(environments.default_directory(), self.environment)
            if self.environment
            else None
        )

    def lines(self) -> int:
        """Lines of code that it takes, on both sides: without blank ones, comments and docstrings
        of one line.
        """
        return sum(count_lines(_module(name).read_text()) for name in _MODULES[self.module])

    @property
    def is_ours(self) -> bool:
        return self.module == "hub"


_MODULES: Final = {
    "hub": ("hub",),
    "gloo": ("gloo", "base"),
    "sockets": ("sockets", "base"),
    "nixl": ("nixl", "sockets", "base"),
    "redis": ("redis", "storage", "base"),
    "s3": ("s3", "storage", "base"),
    "web": ("web", "storage", "base"),
}
_COORDINATED: Final = ("coordinator",)
_SEEDED: Final = ("coordinator", "seed")

WAYS: Final[Mapping[str, Way]] = {
    way.name: way
    for way in (
        Way("tensorhub", "TensorHub", "hub", roles=_COORDINATED),
        Way(
            "tensorhub+prefetch",
            "TensorHub, prefetch",
            "hub",
            {"prefetch": True},
            roles=_COORDINATED,
        ),
        Way("tensorhub+seeds", "TensorHub, seeds", "hub", {"seeds": True}, roles=_SEEDED),
        Way(
            "tensorhub+seeds+prefetch",
            "TensorHub, seeds and prefetch",
            "hub",
            {"seeds": True, "prefetch": True},
            roles=_SEEDED,
        ),
        Way("tensorhub+deltas", "TensorHub, deltas", "hub", {"deltas": True}, roles=_COORDINATED),
        Way("tensorhub+groups", "TensorHub, groups of 2", "hub", {"ranks": 2}, roles=_COORDINATED),
        Way(
            "tensorhub+resharded",
            "TensorHub, groups of 2, rows to columns",
            "hub",
            {"ranks": 2, "rollout cut": "columns"},
            roles=_COORDINATED,
        ),
        Way(
            "chain-waits",
            "collective (pipelined chain), waits",
            "gloo",
            {"how": "chain"},
            is_fixed=True,
        ),
        Way(
            "gloo-waits",
            "collective (gloo's broadcast), waits",
            "gloo",
            {"how": "broadcast"},
            is_fixed=True,
        ),
        Way(
            "chain-pauses",
            "collective (pipelined chain), pauses",
            "gloo",
            {"how": "chain"},
            pauses=True,
            is_fixed=True,
        ),
        Way(
            "gloo-pauses",
            "collective (gloo's broadcast), pauses",
            "gloo",
            {"how": "broadcast"},
            pauses=True,
            is_fixed=True,
        ),
        Way("sockets", "pull from the trainer, sockets", "sockets"),
        Way("nixl", "pull from the trainer, NIXL (UCX, tcp)", "nixl", environment="nixl"),
        Way(
            "redis",
            "push to Redis, pull from it",
            "redis",
            environment="redis",
            programs=("redis-server",),
            roles=("store",),
        ),
        Way("s3", "push to S3 (JuiceFS' MinIO), pull", "s3", environment="s3", roles=("store",)),
        Way(
            "web", "a file behind nginx, PUT and GET", "web", programs=("nginx",), roles=("store",)
        ),
    )
}


def count_lines(source: str) -> int:
    counted, inside = 0, False
    for line in map(str.strip, source.splitlines()):
        if line in ENDS:
            inside = line == ENDS[0]
        elif inside and line and not line.startswith(("#", '"""')):
            counted += 1
    return counted


def _module(name: str) -> Path:
    return Path(__file__).with_name("systems") / f"{name}.py"


def chosen(names: Sequence[str]) -> list[Way]:
    """Raises ValueError, naming what there is."""
    unknown = [name for name in names if name not in WAYS]
    if unknown:
        give = advice(unknown[0], tuple(WAYS), f"give {', '.join(WAYS)}")
        raise ValueError(f"there is no system {unknown[0]!r}: {give}")
    return [WAYS[name] for name in dict.fromkeys(names)]
