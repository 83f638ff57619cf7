"""What the environment of an engine says of TensorHub: variables that vLLM and SGLang have alike.

Responsible for their names, and for whether they are sound.
"""

from __future__ import annotations

import os
from typing import Final

from tensorhub.errors import InvalidValue, StateError
from tensorhub.runtime.control.addresses import split_addresses
from tensorhub.types import check_name

MODEL: Final = "TENSORHUB_MODEL"  # the published name
ADDRESS: Final = "TENSORHUB_ADDRESS"
URL: Final = "TENSORHUB_ENGINE_URL"
FLEET_HOST: Final = "TENSORHUB_FLEET_HOST"
FLEET_TOKEN: Final = "TENSORHUB_FLEET_TOKEN"


def check() -> list[str]:
    """The coordinator's addresses. Raises InvalidValue: with another address or name the engine
    would start with old weights.
    """
    if os.environ.get(FLEET_HOST) and not os.environ.get(MODEL):
        raise InvalidValue(
            f"{MODEL} is not set, but {FLEET_HOST} is: give {MODEL} the name that the trainer "
            f"publishes"
        )
    try:
        check_name("model", os.environ.get(MODEL, ""))
        return split_addresses(os.environ.get(ADDRESS, ""))
    except StateError as error:
        raise InvalidValue(f"{MODEL} and {ADDRESS} of the environment: {error}") from error
