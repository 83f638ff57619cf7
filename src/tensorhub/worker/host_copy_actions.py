"""What a worker's host copies (`worker.host_copies`) ask of their shell: a closed union."""

from __future__ import annotations

from dataclasses import dataclass

from tensorhub.types import FetchReport, VersionInfo
from tensorhub.worker.calls import Call, Say
from tensorhub.worker.registration_session import Shard


@dataclass(frozen=True, slots=True)
class StartHandle:
    """Make a handle over host memory and call `HostCopies.began`."""

    shard: Shard


@dataclass(frozen=True, slots=True)
class DropHandle:
    """Give that registration up, at once. Its memory is fenced and given back; then
    `HostCopies.ended`.
    """

    registration: str


@dataclass(frozen=True, slots=True)
class BeginCall:
    """Begin this call on that handle; then, in any case, `HostCopies.call_ended` with its
    number.
    """

    number: int
    registration: str
    call: Call
    timeout_s: float


@dataclass(frozen=True, slots=True)
class CancelCall:
    """End the call that was begun under that number, with `error`, if it still runs."""

    number: int
    registration: str
    error: Exception


@dataclass(frozen=True, slots=True)
class AskManifest:
    """Ask the coordinator for the manifest; then `HostCopies.call_ended` with its number."""

    number: int
    version: VersionInfo
    shard: int
    timeout_s: float


@dataclass(frozen=True, slots=True)
class Unload:
    """Give back what is loaded of that archived version, once its readers are through; then
    `HostCopies.unloaded`. `in_turn`: not before its turn is over, as another one wants the room.
    """

    registration: str
    in_turn: bool


@dataclass(frozen=True, slots=True)
class LogEvent:
    """Log this about a copy."""

    event: str
    registration: str
    reason: str
    is_warning: bool = False


@dataclass(frozen=True, slots=True)
class FinishRequest:
    """The request of this number is over: it returns (with the report of a fill), or raises."""

    request: int
    report: FetchReport | None = None
    error: Exception | None = None


CopyAction = (
    Say
    | StartHandle
    | DropHandle
    | BeginCall
    | CancelCall
    | AskManifest
    | Unload
    | LogEvent
    | FinishRequest
)
