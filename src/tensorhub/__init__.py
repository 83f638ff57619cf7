"""TensorHub: the weights of any live model version, fetched from the memory of the workers that hold them.

This module holds the public names and no logic. Importing it imports no torch.
"""

from tensorhub.embedded import Coordinator, serve
from tensorhub.errors import (
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
from tensorhub.fetched import Fetched
from tensorhub.hub import Hub, connect
from tensorhub.layouts.views import at, source
from tensorhub.model_summary import ModelSummary
from tensorhub.protocol.secret import read_only_token
from tensorhub.read_plan import PlannedSource, ReadPlan
from tensorhub.runtime.sigterm import leave_on_sigterm
from tensorhub.transport.shm.segments import shared_empty_like
from tensorhub.types import FetchReport, Location, ModelInfo, Options, SourceReport, VersionInfo
from tensorhub.weights import Weights

__version__ = "0.1.0"

__all__ = [
    "AuthenticationFailed",
    "Coordinator",
    "CoordinatorUnavailable",
    "DrainTimeout",
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
    "StateError",
    "TensorHubError",
    "TransportUnavailable",
    "VersionConflict",
    "VersionInfo",
    "VersionUnavailable",
    "Weights",
    "at",
    "connect",
    "leave_on_sigterm",
    "read_only_token",
    "serve",
    "shared_empty_like",
    "source",
]
