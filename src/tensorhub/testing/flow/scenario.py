"""A scenario file, checked; docs/simulation.md explains each key.

A mistake is a `ScenarioError` that names the file, the line, and what may stand there. Not
responsible for the chances that the scenario's seed decides (`timetable`).
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import MISSING, dataclass, fields, replace
from difflib import get_close_matches
from importlib import resources
from math import inf
from pathlib import Path
from typing import Any, Literal, NamedTuple, NoReturn

from tensorhub.errors import InvalidValue, shown

FILE_BYTES_MAX = 2**20
ROLES = ("trainer", "rollout", "seed")
Role = Literal["trainer", "rollout", "seed"]
WORKERS_MAX = 65_536
SUFFIX = ".toml"
_PARAMETERS = re.compile(r"([0-9]{1,6}(?:\.[0-9]{1,6})?)([MBT])")
_PARAMETERS_OF = {"M": 10**6, "B": 10**9, "T": 10**12}
BYTES_PER_PARAMETER = 2
BYTES_PER_GPU_MAX = 40 * 10**9  # of weights; half of a GPU's memory
_HEADER = re.compile(r"\s*\[\[?\s*([a-z_]+)\s*\]\]?")
_KEY = re.compile(r"\s*([A-Za-z0-9_-]+)\s*=")
_NO_TOML = re.compile(r"(.*) \(at (?:line ([0-9]+), column ([0-9]+)|end of document)\)", re.DOTALL)


class ScenarioError(InvalidValue):
    """A scenario cannot be used, or not at that scale."""


@dataclass(frozen=True, slots=True)
class Links:
    nic_mbit_per_s: float
    round_trip_ms: float
    rack_mbit_per_s: float = inf
    wan_mbit_per_s: float = inf
    wan_round_trip_ms: float = 0.0
    local_mbit_per_s: float = inf
    host_copy_mbit_per_s: float = 40_000.0

    @property
    def nic_bytes_per_s(self) -> float:
        return self.nic_mbit_per_s * 125_000


@dataclass(frozen=True, slots=True)
class Hosts:
    """`count`: of hosts; with `[scale]`, of groups. `slow`: how many times less their NICs
    carry.
    """

    role: Role
    site: str
    count: int
    spot: bool = False
    slow: float = 1.0


@dataclass(frozen=True, slots=True)
class Spot:
    on_copies: float
    off_copies: float
    spread: float
    notice_share: float
    notice_copies: float


@dataclass(frozen=True, slots=True)
class Kills:
    every_copies: float
    back_copies: float


@dataclass(frozen=True, slots=True)
class Scale:
    """What holds instead with `--gpus`."""

    parameters: str
    gpus_per_host: int
    hosts_per_rack: int
    chunk_bytes: int
    links: Links


@dataclass(frozen=True, slots=True)
class Scenario:
    """`ranks`: of a group, each of which has `rank_bytes` and a NIC."""

    name: str
    title: str
    seed: int
    versions: int
    rank_bytes: int
    chunk_bytes: int
    links: Links
    hosts: tuple[Hosts, ...]
    every_copies: float
    generate_mean_copies: float
    generate_sigma: float
    spot: Spot | None
    kills: Kills | None
    scale: Scale | None
    ranks: int = 1
    gpus_per_host: int = 1
    hosts_per_rack: int = WORKERS_MAX

    @property
    def copy_s(self) -> float:
        """The time in which one worker's bytes go over its NIC."""
        return self.rank_bytes / self.links.nic_bytes_per_s

    @property
    def ends_s(self) -> float:
        """When the run ends, at the latest, if no publication is held up."""
        return (self.versions + 1) * self.every_copies * self.copy_s

    def count(self, role: Role) -> int:
        return sum(each.count for each in self.hosts if each.role == role)

    @property
    def sites(self) -> tuple[str, ...]:
        """The trainer's first."""
        trainer = next(each.site for each in self.hosts if each.role == "trainer")
        return tuple(dict.fromkeys([trainer, *(each.site for each in self.hosts)]))


def names() -> tuple[str, ...]:
    """The built-in scenarios."""
    return tuple(
        sorted(
            each.name.removesuffix(SUFFIX)
            for each in _directory().iterdir()
            if each.name.endswith(SUFFIX)
        )
    )


def load(name: str) -> Scenario:
    """A built-in scenario, or that in a file. Raises ScenarioError, also where there is none of
    that name.
    """
    if name in names():
        return read(_directory().joinpath(name + SUFFIX).read_text(), name, name)
    path = Path(name)
    if not path.is_file():
        give = advice(name, names(), f"give {', '.join(names())}, or a file")
        raise ScenarioError(f"there is no scenario {shown(name)}: {give}")
    with path.open("rb") as file:
        given = file.read(FILE_BYTES_MAX + 1)
    if len(given) > FILE_BYTES_MAX:
        raise ScenarioError(
            f"{name}: it has more than {FILE_BYTES_MAX} bytes, which no scenario has"
        )
    try:
        text = given.decode()
    except UnicodeDecodeError as error:
        raise ScenarioError(
            f"{name}: it is no text in UTF-8: {error.reason} at byte {error.start}"
        ) from None
    return read(text, path.stem, name)


def read(text: str, name: str, where: str = "scenario") -> Scenario:
    """The scenario that this text says. `where`: what an error calls it."""
    try:
        given = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        if (match := _NO_TOML.fullmatch(str(error))) is None:
            raise ScenarioError(f"{where}: it is no TOML: {error}") from None
        line, column = (
            match[2] or len(text.splitlines()),
            f" at column {match[3]}" if match[3] else " at the end",
        )
        raise ScenarioError(f"{where}, line {line}: it is no TOML: {match[1]}{column}") from None
    return _Reading(where, _lines(text)).scenario(given, name)


def advice(given: str, known: Sequence[str], said: str) -> str:
    """The part of an error that lists the known names, after a question for the closest name, if
    one is close.
    """
    close = get_close_matches(given, known, 1)
    return f"did you mean {close[0]!r}? {said[0].upper()}{said[1:]}" if close else said


def parameters(text: str) -> int:
    """How many are meant by "7B", "70B" or "1T". Raises ScenarioError."""
    match = _PARAMETERS.fullmatch(text)
    number = float(match[1]) * _PARAMETERS_OF[match[2]] if match else 0.0
    if not number:
        raise ScenarioError(
            f"{shown(text)} is no number of parameters: write it as 500M, 7B, 70B or 1T"
        )
    return int(number)


def at_scale(
    scenario: Scenario, gpus: int, of: str | None = None, ranks: int | None = None
) -> Scenario:
    """This scenario with so many rollout GPUs, and a trainer's group beside them, by its `[scale]`.
    `of`: parameters, as "7B"; `ranks`: of a group; as few as their memory has room for, if not
    given. The WAN is so many times as wide, so that a copy takes as long over it.
    """
    scale = scenario.scale
    if scale is None:
        raise ScenarioError(f"{scenario.name} has no [scale]: it cannot be run with --gpus")
    number = parameters(of or scale.parameters)
    nbytes = number * BYTES_PER_PARAMETER
    if ranks is None:
        ranks = 1
        while nbytes / ranks > BYTES_PER_GPU_MAX:
            ranks *= 2
    _check_ranks(ranks)
    rollouts = [each for each in scenario.hosts if each.role == "rollout"]
    parts = sum(each.count for each in rollouts)
    groups, odd = divmod(gpus, ranks)
    if odd or groups < len(rollouts):
        least = ranks * len(rollouts)
        of_which = f"a group has {ranks} of them" if ranks > 1 else "each is a group"
        raise ScenarioError(
            f"{scenario.name} cannot be placed on {gpus} rollout GPUs: {of_which}, and the file "
            f"has {len(rollouts)}"
            f" [[hosts]] of rollouts; give "
            f"{f'a multiple of {ranks}, ' if ranks > 1 else ''}{least} or more"
        )
    if gpus > WORKERS_MAX:
        raise ScenarioError(f"--gpus {gpus}: give {WORKERS_MAX} or less")
    counts = _shared_out(groups, [each.count / parts for each in rollouts])
    hosts = tuple(
        replace(each, count=counts.pop(0)) if each.role == "rollout" else each
        for each in scenario.hosts
    )
    return replace(
        scenario,
        rank_bytes=-(-nbytes // ranks),
        chunk_bytes=scale.chunk_bytes,
        links=replace(scale.links, wan_mbit_per_s=scale.links.wan_mbit_per_s * ranks),
        hosts=hosts,
        ranks=ranks,
        gpus_per_host=scale.gpus_per_host,
        hosts_per_rack=scale.hosts_per_rack,
    )


def in_groups(scenario: Scenario, ranks: int) -> Scenario:
    """This scenario on about as many hosts, where the trainer, each rollout and each seed have
    several. The WAN is so many times as wide, so that a copy takes as long over it.
    """
    _check_ranks(ranks)
    hosts = tuple(
        replace(each, count=max(1, each.count // ranks)) if each.role == "rollout" else each
        for each in scenario.hosts
    )
    if (workers := ranks * sum(each.count for each in hosts)) > WORKERS_MAX:
        raise ScenarioError(
            f"{scenario.name} in groups of {ranks} has {workers} workers, more than {WORKERS_MAX}"
        )
    wan_mbit_per_s = scenario.links.wan_mbit_per_s * ranks
    return replace(
        scenario,
        hosts=hosts,
        ranks=ranks,
        links=replace(scenario.links, wan_mbit_per_s=wan_mbit_per_s),
    )


def left_out(scenario: Scenario, grouped: Scenario) -> str:
    """How many hosts no group has, since a kind's do not divide; or how many there are more. "":
    all are in groups.
    """
    pairs = zip(scenario.hosts, grouped.hosts, strict=True)
    lacking = [a.count - b.count * grouped.ranks for a, b in pairs if a.role == "rollout"]
    out, more = (
        sum(each for each in lacking if each > 0),
        -sum(each for each in lacking if each < 0),
    )
    return " and ".join(
        [_hosts(out, "left out")] * bool(out) + [_hosts(more, "added")] * bool(more)
    )


def _hosts(count: int, what: str) -> str:
    return f"{count} host{'s are' if count > 1 else ' is'} {what}"


def _check_ranks(ranks: int) -> None:
    if not 1 <= ranks <= WORKERS_MAX:
        raise ScenarioError(f"--ranks {ranks}: give 1 to {WORKERS_MAX}")


def _shared_out(whole: int, shares: Sequence[float]) -> list[int]:
    """A whole number for each share, at least 1, together the whole."""
    counts = [max(1, int(whole * share)) for share in shares]
    order = sorted(range(len(shares)), key=lambda n: int(whole * shares[n]) - whole * shares[n])
    for number in order * 2:
        if sum(counts) < whole:
            counts[number] += 1
    while sum(counts) > whole:
        counts[counts.index(max(counts))] -= 1
    return counts


def _directory() -> Any:
    return resources.files("tensorhub.testing.flow").joinpath("scenarios")


def _lines(text: str) -> dict[tuple[str, int, str], int]:
    """The line of each key, by its table, which of the tables of that name it is, and its name; ""
    for a table itself.
    """
    found: dict[tuple[str, int, str], int] = {}
    table, counts = "", dict[str, int]()
    for number, line in enumerate(text.splitlines(), 1):
        if header := _HEADER.match(line):
            table = header[1]
            counts[table] = counts.get(table, -1) + 1
            found.setdefault((table, counts[table], ""), number)
        elif key := _KEY.match(line):
            found.setdefault((table, counts.get(table, 0), key[1]), number)
    return found


class _Number(NamedTuple):
    least: float
    most: float = 1e12
    is_whole: bool = False


_Allowed = _Number | str | tuple[str, ...]
_Keys = Mapping[str, _Allowed]


_TEXT, _FLAG, _TABLE = "text", "flag", "table"
_LINKS: _Keys = {f.name: _Number(0.0 if f.name.endswith("_ms") else 1e-3) for f in fields(Links)}
_CHUNK_BYTES = _Number(4096, 2**30, True)
_TABLES: Mapping[str, _Keys] = {
    "": {
        "format": _Number(1, 1, True),
        "title": _TEXT,
        "seed": _Number(0, 2**63 - 1, True),
        "versions": _Number(2, 10_000, True),
        **dict.fromkeys(
            ("model", "links", "hosts", "trainer", "rollout", "spot", "kills", "scale"), _TABLE
        ),
    },
    "model": {"bytes": _Number(1, 2**50, True), "chunk_bytes": _CHUNK_BYTES},
    "links": _LINKS,
    "hosts": {
        "role": ROLES,
        "site": _TEXT,
        "count": _Number(1, WORKERS_MAX, True),
        "spot": _FLAG,
        "slow": _Number(1.0, 1e3),
    },
    "trainer": {"every_copies": _Number(0.1)},
    "rollout": {"generate_mean_copies": _Number(0.0), "generate_sigma": _Number(0.0, 5.0)},
    "spot": {
        "on_copies": _Number(0.1),
        "off_copies": _Number(0.0),
        "spread": _Number(0.0, 1.0),
        "notice_share": _Number(0.0, 1.0),
        "notice_copies": _Number(0.0),
    },
    "kills": {"every_copies": _Number(0.1), "back_copies": _Number(0.0)},
    "scale": {
        "parameters": _TEXT,
        "gpus_per_host": _Number(1, 64, True),
        "hosts_per_rack": _Number(1, WORKERS_MAX, True),
        "chunk_bytes": _CHUNK_BYTES,
        **_LINKS,
    },
}


# What a table may lack; `_links` and `_scale` say when some of it is needed.
_OPTIONAL = {"spot", "slow", "kills", "scale"} | {
    f.name for f in fields(Links) if f.default is not MISSING
}


class _Reading:
    """One file being read."""

    def __init__(self, where: str, lines: Mapping[tuple[str, int, str], int]) -> None:
        self._where, self._lines = where, lines

    def refuse(self, table: str, number: int, key: str, advice: str) -> NoReturn:
        places = ((table, number, key), (key, 0, ""), (table, number, ""))
        line = next((self._lines[place] for place in places if place in self._lines), None)
        place = f"{self._where}, line {line}" if line else self._where
        what = ".".join(filter(None, (table, key)))
        raise ScenarioError(f"{place}: {what}{': ' * bool(what)}{advice}")

    def scenario(self, given: dict[str, Any], name: str) -> Scenario:
        top = self._values("", 0, given)
        found = {each: self._table(given, each) for each in ("model", "trainer", "rollout")}
        hosts = tuple(self._hosts(given))
        several_sites = len({each.site for each in hosts}) > 1
        links = self._links("links", self._table(given, "links"), several_sites)
        spot = Spot(**self._table(given, "spot")) if "spot" in given else None
        for number, each in enumerate(hosts):
            if each.spot and spot is None:
                self.refuse(
                    "hosts",
                    number,
                    "spot",
                    "there is no [spot], which says how long spot hosts are there",
                )
        return Scenario(
            name=name,
            title=top["title"],
            seed=top["seed"],
            versions=top["versions"],
            rank_bytes=found["model"]["bytes"],
            chunk_bytes=found["model"]["chunk_bytes"],
            links=links,
            hosts=hosts,
            spot=spot,
            kills=Kills(**self._table(given, "kills")) if "kills" in given else None,
            scale=self._scale(self._table(given, "scale"), several_sites)
            if "scale" in given
            else None,
            **found["trainer"],
            **found["rollout"],
        )

    def _table(self, given: dict[str, Any], name: str) -> dict[str, Any]:
        if name not in given:
            raise ScenarioError(
                f"{self._where}: it has no table [{name}], with {', '.join(_TABLES[name])}"
            )
        return self._values(name, 0, given[name])

    def _values(self, name: str, number: int, given: object) -> dict[str, Any]:
        """The checked values of one table."""
        keys = _TABLES[name]
        if not isinstance(given, dict):
            self.refuse(name, number, "", f"write it as a table, [{name}]")
        for key in given:
            if key not in keys:
                whose = f"[{name}]" if name else "a scenario"
                has = advice(key, tuple(keys), f"it has {', '.join(keys)}")
                self.refuse(name, number, key, f"{whose} has no such key: {has}")
        if lacking := [key for key in keys if key not in given and key not in _OPTIONAL]:
            self.refuse(name, number, "", f"it lacks {', '.join(map(repr, lacking))}")
        for key, value in given.items():
            if wrong := _wrong(value, keys[key]):
                self.refuse(name, number, key, f"{shown(value)}: {wrong}")
        return {
            key: float(given[key]) if _is_number(keys[key]) else given[key]
            for key in keys
            if key in given
        }

    def _hosts(self, given: dict[str, Any]) -> Iterator[Hosts]:
        tables = given.get("hosts")
        if not isinstance(tables, list) or not tables:
            raise ScenarioError(
                f"{self._where}: it has no hosts: write [[hosts]] with "
                f"{', '.join(_TABLES['hosts'])}"
            )
        roles: dict[str, int] = {}
        for number, each in enumerate(tables):
            hosts = Hosts(**self._values("hosts", number, each))
            if hosts.spot and hosts.role != "rollout":
                self.refuse(
                    "hosts", number, "spot", f"a {hosts.role} is no spot host here; rollouts may be"
                )
            roles[hosts.role] = roles.get(hosts.role, 0) + hosts.count
            if roles.get("trainer", 0) > 1:
                self.refuse("hosts", number, "role", "there is one trainer, of count 1")
            yield hosts
        for role in ("trainer", "rollout"):
            if role not in roles:
                raise ScenarioError(f"{self._where}: it has no [[hosts]] with role = {role!r}")
        if sum(roles.values()) > WORKERS_MAX:
            raise ScenarioError(
                f"{self._where}: it has {sum(roles.values())} hosts, more than {WORKERS_MAX}"
            )

    def _links(self, table: str, given: dict[str, Any], several_sites: bool) -> Links:
        for key in ("wan_mbit_per_s", "wan_round_trip_ms") if several_sites else ():
            if key not in given:
                self.refuse(table, 0, "", f"there are several sites, and it lacks {key!r}")
        return Links(**{key: value for key, value in given.items() if key in _LINKS})

    def _scale(self, given: dict[str, Any], several_sites: bool) -> Scale:
        if given["gpus_per_host"] > 1 and "local_mbit_per_s" not in given:
            self.refuse(
                "scale",
                0,
                "gpus_per_host",
                "hosts have several workers, and 'local_mbit_per_s' is lacking",
            )
        try:
            parameters(given["parameters"])
        except ScenarioError as error:
            self.refuse("scale", 0, "parameters", str(error))
        links = self._links("scale", given, several_sites)
        return Scale(
            **{key: value for key, value in given.items() if key not in _LINKS}, links=links
        )


def _is_number(allowed: _Allowed) -> bool:
    return isinstance(allowed, _Number) and not allowed.is_whole


def _wrong(value: object, allowed: _Allowed) -> str:
    """What has to be given instead; "": the value may stand there."""
    if isinstance(allowed, _Number):
        kind = int if allowed.is_whole else int | float
        if (
            isinstance(value, bool)
            or not isinstance(value, kind)
            or not allowed.least <= value <= allowed.most
        ):
            if allowed.is_whole:
                return f"give a whole number, {allowed.least} to {allowed.most}"
            return f"give a number, {allowed.least:g} to {allowed.most:g}"
    elif allowed == _FLAG:
        return "" if isinstance(value, bool) else "give true or false"
    elif allowed != _TABLE:
        if not isinstance(value, str) or not 0 < len(value) <= 200 or not value.isprintable():
            return "give 1 to 200 printable characters, in quotes"
        if allowed != _TEXT and value not in allowed:
            return advice(value, tuple(allowed), f"give {', '.join(map(repr, allowed))}")
    return ""
