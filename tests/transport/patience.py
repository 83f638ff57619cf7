"""Readers of the conformance suite: as patient as a loaded machine needs, and impatient with a
source that says nothing any more.
"""

from __future__ import annotations

import contextlib
import weakref
from typing import ClassVar

import pytest

from tensorhub.protocol.blocking import BlockingConnection
from tensorhub.protocol.lost import ConnectionLost
from tensorhub.testing.serving import ServedSource
from tensorhub.transport import peers
from tensorhub.transport.registry import Local
from tensorhub.types import Incarnation, Options
from tests.runtime.data_rig import SECRET, WAIT_S

PATIENT = Options(stall_timeout_s=WAIT_S, connect_timeout_s=WAIT_S)
MOMENT_S = 0.2


def local() -> Local:
    return Local(Incarnation("reader"), (SECRET,), PATIENT)


class _Noted(BlockingConnection):
    made: ClassVar[weakref.WeakSet[_Noted]] = weakref.WeakSet()  # by readers

    def __init__(self, *args: object, **options: object) -> None:
        super().__init__(*args, **options)  # type: ignore[arg-type]
        self.made.add(self)


def note_readers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let `QuietSource` find its readers."""
    monkeypatch.setattr(peers, "BlockingConnection", _Noted)


class QuietSource(ServedSource):
    """Once it is frozen nothing comes for certain: its readers wait a moment only."""

    def freeze(self) -> bool:
        is_frozen = super().freeze()
        for connection in list(_Noted.made):
            with contextlib.suppress(ConnectionLost):  # an earlier reader's
                connection.stall_timeout_s = MOMENT_S
                connection._limit_waits(MOMENT_S)
        return is_frozen
