"""What a real store gives back, beside what the simulated store has (R2)."""

from __future__ import annotations

from tensorhub.coordinator import Durable
from tensorhub.testing.sim.assertion import demand

READ_MAX = 64  # publications of a model, at the start: of more, the newest are read


def began(read: Durable, kept: Durable) -> None:
    """A term has read that."""
    demand(_are_equal(read, kept), "durable mark: {} was read, not {}", read, kept)


def was_cut(read: Durable, without: Durable, whole: Durable) -> bool:
    """That was read after a crash in the midst of a write. Whether it is durable."""
    is_there = _are_equal(read, whole)
    ok = is_there or _are_equal(read, without)
    demand(ok, "durable mark: {} was read after a crash, not {} nor {}", read, without, whole)
    return is_there


def wrote(epoch: int, newest: int, refused: str) -> None:
    """The newest term alone may write."""
    demand(
        (epoch == newest) is not bool(refused),
        "durable mark: epoch {} of {} {}",
        epoch,
        newest,
        refused or "writes",
    )


def _are_equal(read: Durable, kept: Durable) -> bool:
    return read == kept or (len(kept.publications) > READ_MAX and read.models == kept.models)
