"""TensorHub: the weights of any live model version, fetched from the memory of the workers that
hold them.

This module holds the public names and no logic. Importing it imports nothing: a name's module is
imported when the name is first used.
"""

# a type checker takes it for typing's own; to import typing would cost more than all of this module
TYPE_CHECKING = False
if TYPE_CHECKING:
    from tensorhub.api.archiving import Archive, ArchivedVersion, archive
    from tensorhub.api.embedded import Coordinator, serve
    from tensorhub.api.hub import Fetched, Hub, connect
    from tensorhub.api.stamping import check_stamp
    from tensorhub.api.weights import Weights
    from tensorhub.errors import (
        ArchiveUnavailable,
        AuthenticationFailed,
        CoordinatorUnavailable,
        DrainTimeout,
        GroupAborted,
        IntegrityError,
        InvalidType,
        InvalidValue,
        LeaseLost,
        LeftOutStateWarning,
        ManifestMismatch,
        MutabilityViolation,
        OperationTimeout,
        ProtocolError,
        RegistrationError,
        RetentionError,
        StaleWeightsWarning,
        StateError,
        TensorHubError,
        TransportUnavailable,
        VersionConflict,
        VersionUnavailable,
    )
    from tensorhub.layouts.views import at, source
    from tensorhub.model.read_plan import PlannedSource, ReadPlan
    from tensorhub.model.stamps import Stamp
    from tensorhub.observed import ClusterEvent, Explanation
    from tensorhub.protocol.certificates import TLS
    from tensorhub.protocol.secret import read_only_token
    from tensorhub.runtime.sigterm import leave_on_sigterm
    from tensorhub.transport.segments import shared_empty_like
    from tensorhub.types import (
        FetchReport,
        Location,
        ModelInfo,
        ModelSummary,
        Options,
        SourceReport,
        VersionInfo,
    )

__version__ = "0.1.0"

__all__ = [
    "TLS",
    "Archive",
    "ArchiveUnavailable",
    "ArchivedVersion",
    "AuthenticationFailed",
    "ClusterEvent",
    "Coordinator",
    "CoordinatorUnavailable",
    "DrainTimeout",
    "Explanation",
    "FetchReport",
    "Fetched",
    "GroupAborted",
    "Hub",
    "IntegrityError",
    "InvalidType",
    "InvalidValue",
    "LeaseLost",
    "LeftOutStateWarning",
    "Location",
    "ManifestMismatch",
    "ModelInfo",
    "ModelSummary",
    "MutabilityViolation",
    "OperationTimeout",
    "Options",
    "PlannedSource",
    "ProtocolError",
    "ReadPlan",
    "RegistrationError",
    "RetentionError",
    "SourceReport",
    "StaleWeightsWarning",
    "Stamp",
    "StateError",
    "TensorHubError",
    "TransportUnavailable",
    "VersionConflict",
    "VersionInfo",
    "VersionUnavailable",
    "Weights",
    "archive",
    "at",
    "check_stamp",
    "connect",
    "leave_on_sigterm",
    "read_only_token",
    "serve",
    "shared_empty_like",
    "source",
]

# that need no import of their own
_MODULES = ("conversion", "errors", "integrations", "sync", "testing", "types")
_MODULE_OF = dict.fromkeys(__all__, "errors") | {
    "TLS": "protocol.certificates",
    "Archive": "api.archiving",
    "ArchivedVersion": "api.archiving",
    "ClusterEvent": "observed",
    "Coordinator": "api.embedded",
    "Explanation": "observed",
    "FetchReport": "types",
    "Fetched": "api.hub",
    "Hub": "api.hub",
    "Location": "types",
    "ModelInfo": "types",
    "ModelSummary": "types",
    "Options": "types",
    "PlannedSource": "model.read_plan",
    "ReadPlan": "model.read_plan",
    "SourceReport": "types",
    "Stamp": "model.stamps",
    "VersionInfo": "types",
    "Weights": "api.weights",
    "archive": "api.archiving",
    "at": "layouts.views",
    "check_stamp": "api.stamping",
    "connect": "api.hub",
    "leave_on_sigterm": "runtime.sigterm",
    "read_only_token": "protocol.secret",
    "serve": "api.embedded",
    "shared_empty_like": "transport.segments",
    "source": "layouts.views",
}

if not TYPE_CHECKING:  # else every name would be taken for one of this module's

    def __getattr__(name: str) -> object:
        from importlib import import_module

        if name in _MODULES:
            return import_module(f"{__name__}.{name}")
        if name not in _MODULE_OF:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        value = getattr(import_module(f"{__name__}.{_MODULE_OF[name]}"), name)
        globals()[name] = value  # the next use comes straight to it
        return value

    def __dir__() -> list[str]:
        return sorted({*globals(), *__all__, *_MODULES})
