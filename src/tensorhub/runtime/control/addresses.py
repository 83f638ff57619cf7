"""Where coordinators may be: addresses that say it, and names that are looked up.

Responsible for the schemes of addresses. Not responsible for "tcp://host:port" itself (`types`),
nor for connecting.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import partial
from importlib import import_module
from typing import Final

import anyio.to_thread

from tensorhub.errors import CoordinatorUnavailable, InvalidValue, StateError
from tensorhub.types import check_name, parse_address

# By scheme, a module whose `look_up(name)` gives the coordinator's "tcp://host:port" of now. It is
# named and not imported: it is an adapter, above this layer, and brings its framework.
LOOKED_UP: Final = {"ray-actor": "tensorhub.integrations.ray"}
ETCD: Final = "etcd"
ASKED_S = 5.0  # how long etcd may take to answer
CANDIDATES_MAX = 64  # besides the leader; each is connected to
_BETWEEN = re.compile(r",\s*(?=[a-z][a-z0-9+.-]*://)")  # other commas are an etcd:// URL's own


def split_addresses(given: str | Sequence[str]) -> list[str]:
    """The addresses in a list, or in one text with commas between them. Raises InvalidValue or
    InvalidType unless each is an address.
    """
    found = _BETWEEN.split(given.strip()) if isinstance(given, str) else list(given)
    for each in found:
        check_address(each)
    if not found:
        raise InvalidValue(
            'no coordinator address is given: give "tcp://HOST:PORT", or a list of them'
        )
    return found


def check_address(address: object) -> None:
    """Raise InvalidValue or InvalidType unless it is a coordinator's address, or a name that can be
    looked up.
    """
    scheme, name = _split(address)
    if scheme in LOOKED_UP:
        check_name("coordinator", name)
    elif scheme == ETCD:
        from tensorhub.runtime.control.etcd import place_of

        place_of(str(address))
    else:
        try:
            parse_address(address)
        except StateError as error:
            others = ", ".join(f'"{each}://NAME"' for each in LOOKED_UP)
            raise type(error)(
                f'{error}, "etcd://HOST:PORT[,HOST:PORT...]/PREFIX", or {others}'
            ) from None


class Addresses:
    """The addresses that one worker was given, and the coordinators that were found by them."""

    def __init__(self, given: str | Sequence[str]) -> None:
        """Raises as `split_addresses`."""
        self._given = split_addresses(given)
        # by name: the addresses of its last look-up; a name may not be found while it is needed
        self._behind: dict[str, Sequence[str]] = {}
        self._reached = ""  # the address by which a coordinator was reached last

    def __str__(self) -> str:
        return ", ".join(self._given)

    def known(self) -> list[str]:
        """Each "tcp://host:port" where a coordinator may be, the best first."""
        names = set(self.names())
        found = [each for each in self._given if each not in names]
        found += [each for behind in self._behind.values() for each in behind]
        return sorted(dict.fromkeys(found), key=lambda each: each != self._reached)

    def names(self) -> list[str]:
        """The names to look up."""
        return [each for each in self._given if _split(each)[0] in (*LOOKED_UP, ETCD)]

    async def look_up(self, name: str) -> Sequence[str]:
        """The coordinators behind a name now. Raises CoordinatorUnavailable; where etcd refuses to
        say, AuthenticationFailed or StateError.
        """
        scheme, name_there = _split(name)
        if scheme == ETCD:
            self._behind[name] = await _candidates(name)
            return self._behind[name]
        try:
            look_up = import_module(LOOKED_UP[scheme]).look_up
        except ImportError as error:
            raise CoordinatorUnavailable(
                f"{name} cannot be looked up here: {error}", retryable=False
            ) from error
        # The look-up may take longer than its caller waits; its thread is abandoned then.
        found: str = await anyio.to_thread.run_sync(
            partial(look_up, name_there), abandon_on_cancel=True
        )
        self._behind[name] = (found,)
        return self._behind[name]

    def reached(self, address: str) -> None:
        """A coordinator was reached by that address: it is the best from now on."""
        self._reached = address


async def _candidates(url: str) -> list[str]:
    """Where etcd says that coordinators lead or stand by; the leader is first."""
    from tensorhub.runtime.control import etcd

    place = etcd.place_of(url)
    client = etcd.Etcd(place)
    leader, candidates = place.key("leader"), place.key("candidates/")
    ranges = [etcd.get(leader), etcd.get(candidates, etcd.after(candidates), CANDIDATES_MAX)]
    try:
        found = await client.transact((), ranges, within_s=ASKED_S)
    except etcd.Unanswered as error:
        raise CoordinatorUnavailable(f"{place}: {error}") from error
    except etcd.Refused as error:
        raise error.for_caller() from error
    finally:
        await client.aclose()
    told = [each.value for some in found.ranges for each in some[:CANDIDATES_MAX]]
    addresses, why = list[str](), "no coordinator leads there, or stands by"
    for address in dict.fromkeys(each.decode(errors="replace") for each in told):
        try:
            parse_address(address)
            addresses.append(address)
        except StateError as error:
            why = str(error)
    if not addresses:
        raise CoordinatorUnavailable(f"{place}: {why}")
    return addresses


def _split(address: object) -> tuple[str, str]:
    scheme, _, name = address.partition("://") if isinstance(address, str) else ("", "", "")
    return scheme, name
