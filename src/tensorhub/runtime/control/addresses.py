"""Where a coordinator is: addresses that say it, and names that are looked up anew at each
connection.

Responsible for the schemes of addresses. Not responsible for "tcp://host:port" itself (`types`),
nor for connecting.
"""

from __future__ import annotations

from functools import partial
from importlib import import_module
from typing import Final

import anyio.to_thread

from tensorhub.errors import CoordinatorUnavailable, StateError
from tensorhub.types import check_name, parse_address

# By scheme, a module whose `look_up(name)` gives the coordinator's "tcp://host:port" of now. It is
# named and not imported: it is an adapter, above this layer, and brings its framework.
LOOKED_UP: Final = {"ray-actor": "tensorhub.integrations.ray"}


def check_address(address: object) -> None:
    """Raise InvalidValue or InvalidType unless it is a coordinator's address, or a name that can be
    looked up.
    """
    scheme, name = _split(address)
    if scheme in LOOKED_UP:
        check_name("coordinator", name)
    else:
        try:
            parse_address(address)
        except StateError as error:
            others = ", ".join(f'"{each}://NAME"' for each in LOOKED_UP)
            raise type(error)(f"{error}, or {others}") from None


async def locate(address: str) -> tuple[str, int]:
    """The current host and port behind an address. Raises CoordinatorUnavailable for an unknown
    name.
    """
    scheme, name = _split(address)
    if scheme not in LOOKED_UP:
        return parse_address(address)
    try:
        look_up = import_module(LOOKED_UP[scheme]).look_up
    except ImportError as error:
        raise CoordinatorUnavailable(
            f"{address} cannot be looked up here: {error}", retryable=False
        ) from error
    # The look-up may take longer than its caller waits; its thread is abandoned then.
    return parse_address(
        await anyio.to_thread.run_sync(partial(look_up, name), abandon_on_cancel=True)
    )


def _split(address: object) -> tuple[str, str]:
    scheme, _, name = address.partition("://") if isinstance(address, str) else ("", "", "")
    return scheme, name
