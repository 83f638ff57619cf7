"""TensorHub: the weights of any live model version, fetched from the memory of the workers that hold them.

This module holds the public names and no logic. Importing it imports no torch.
"""

from tensorhub.errors import (
    AuthenticationFailed,
    CoordinatorUnavailable,
    DrainTimeout,
    GroupAborted,
    IntegrityError,
    LeaseLost,
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
from tensorhub.hub import Coordinator, Hub, connect, serve
from tensorhub.protocol.secret import read_only_token
from tensorhub.transport.shm import shared_empty_like
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
    "LeaseLost",
    "Location",
    "ManifestMismatch",
    "ModelInfo",
    "MutabilityViolation",
    "OperationTimeout",
    "Options",
    "ProtocolError",
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
    "connect",
    "read_only_token",
    "serve",
    "shared_empty_like",
]
