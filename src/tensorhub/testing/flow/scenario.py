"""What a scenario file says, checked; docs/simulation.md explains each key.

A mistake is a `ScenarioError` that names the file, the line, and what may stand there. Not responsible for what is drawn by
the scenario's seed (`timetable`).
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
from typing import Any, Literal, NoReturn

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
    """`count`: of hosts; with `[scale]`, of groups. `slow`: how many times less their NICs carry."""

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
    return tuple(sorted(each.name.removesuffix(SUFFIX) for each in _directory().iterdir() if each.name.endswith(SUFFIX)))


def load(name: str) -> Scenario:
    """A built-in scenario, or that in a file. Raises ScenarioError, also where there is none of that name."""
    if name in names():
        return read(_directory().joinpath(name + SUFFIX).read_text(), name, name)
    path = Path(name)
    if not path.is_file():
        give = advice(name, names(), f"give {', '.join(names())}, or a file")
        raise ScenarioError(f"there is no scenario {shown(name)}: {give}")
    with path.open("rb") as file:
        given = file.read(FILE_BYTES_MAX + 1)
    if len(given) > FILE_BYTES_MAX:
        raise ScenarioError(f"{name}: it has more than {FILE_BYTES_MAX} bytes, which no scenario has")
    try:
        text = given.decode()
    except UnicodeDecodeError as error:
        raise ScenarioError(f"{name}: it is no text in UTF-8: {error.reason} at byte {error.start}") from None
    return read(text, path.stem, name)


def read(text: str, name: str, where: str = "scenario") -> Scenario:
    """The scenario that this text says. `where`: what an error calls it."""
    try:
        given = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        if (match := _NO_TOML.fullmatch(str(error))) is None:
            raise ScenarioError(f"{where}: it is no TOML: {error}") from None
        line, column = match[2] or len(text.splitlines()), f" at column {match[3]}" if match[3] else " at the end"
        raise ScenarioError(f"{where}, line {line}: it is no TOML: {match[1]}{column}") from None
    return _Reading(where, _lines(text)).scenario(given, name)


def advice(given: str, known: Sequence[str], said: str) -> str:
    """What an error says there is, after a question for the closest of what is known, if one is close."""
    close = get_close_matches(given, known, 1)
    return f"did you mean {close[0]!r}? {said[0].upper()}{said[1:]}" if close else said


def parameters(text: str) -> int:
    """How many are meant by "7B", "70B" or "1T". Raises ScenarioError."""
    match = _PARAMETERS.fullmatch(text)
    number = float(match[1]) * _PARAMETERS_OF[match[2]] if match else 0.0
    if not number:
        raise ScenarioError(f"{shown(text)} is no number of parameters: write it as 500M, 7B, 70B or 1T")
    return int(number)


def at_scale(scenario: Scenario, gpus: int, of: str | None = None, ranks: int | None = None) -> Scenario:
    """The same with so many rollout GPUs, and a trainer's group beside them, by its `[scale]`. `of`: parameters, as "7B";
    `ranks`: of a group; as few as their memory has room for, if not given. The WAN is so many times as wide, so that a copy
    takes as long over it.
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
            f"{scenario.name} cannot be placed on {gpus} rollout GPUs: {of_which}, and the file has {len(rollouts)}"
            f" [[hosts]] of rollouts; give {f'a multiple of {ranks}, ' if ranks > 1 else ''}{least} or more"
        )
    if gpus > WORKERS_MAX:
        raise ScenarioError(f"--gpus {gpus}: give {WORKERS_MAX} or less")
    counts = _shared_out(groups, [each.count / parts for each in rollouts])
    hosts = tuple(replace(each, count=counts.pop(0)) if each.role == "rollout" else each for each in scenario.hosts)
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
    """The same on about as many hosts, where the trainer, each rollout and each seed have several. The WAN is so many times
    as wide, so that a copy takes as long over it.
    """
    _check_ranks(ranks)
    hosts = tuple(
        replace(each, count=max(1, each.count // ranks)) if each.role == "rollout" else each for each in scenario.hosts
    )
    if (workers := ranks * sum(each.count for each in hosts)) > WORKERS_MAX:
        raise ScenarioError(f"{scenario.name} in groups of {ranks} has {workers} workers, more than {WORKERS_MAX}")
    wan_mbit_per_s = scenario.links.wan_mbit_per_s * ranks
    return replace(scenario, hosts=hosts, ranks=ranks, links=replace(scenario.links, wan_mbit_per_s=wan_mbit_per_s))


def left_out(scenario: Scenario, grouped: Scenario) -> str:
    """How many hosts no group has, since a kind's do not divide; or how many there are more. "": all are in groups."""
    pairs = zip(scenario.hosts, grouped.hosts, strict=True)
    lacking = [a.count - b.count * grouped.ranks for a, b in pairs if a.role == "rollout"]
    out, more = sum(each for each in lacking if each > 0), -sum(each for each in lacking if each < 0)
    return " and ".join([_hosts(out, "left out")] * bool(out) + [_hosts(more, "added")] * bool(more))


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
    """The line of each key, by its table, which of the tables of that name it is, and its name; "" for a table itself."""
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


_TABLES: Mapping[str, tuple[str, ...]] = {
    "": ("format", "title", "seed", "versions", "model", "links", "hosts", "trainer", "rollout", "spot", "kills", "scale"),
    "model": ("bytes", "chunk_bytes"),
    "links": tuple(Links.__dataclass_fields__),
    "hosts": tuple(Hosts.__dataclass_fields__),
    "trainer": ("every_copies",),
    "rollout": ("generate_mean_copies", "generate_sigma"),
    "spot": tuple(Spot.__dataclass_fields__),
    "kills": tuple(Kills.__dataclass_fields__),
    "scale": ("parameters", "gpus_per_host", "hosts_per_rack", "chunk_bytes", *Links.__dataclass_fields__),
}


# What a table may lack; `_links` and `_scale` say when some of it is needed.
_OPTIONAL = {"spot", "slow", "kills", "scale"} | {f.name for f in fields(Links) if f.default is not MISSING}


class _Table:
    """One table of a file: its values, each of which is checked when it is taken."""

    def __init__(self, reading: _Reading, name: str, number: int, given: object) -> None:
        self._reading, self.name, self._number = reading, name, number
        if not isinstance(given, dict):
            self.refuse("", f"write it as a table, [{name}]")
        self._given: dict[str, Any] = given
        for key in given:
            if key not in _TABLES[name]:
                whose = f"[{name}]" if name else "a scenario"
                has = advice(key, _TABLES[name], f"it has {', '.join(_TABLES[name])}")
                self.refuse(key, f"{whose} has no such key: {has}")

    def refuse(self, key: str, advice: str) -> NoReturn:
        self._reading.refuse(self.name, self._number, key, advice)

    def __contains__(self, key: str) -> bool:
        return key in self._given

    def number(self, key: str, least: float, most: float = 1e12, default: float | None = None) -> float:
        value = self._value(key, default)
        if isinstance(value, bool) or not isinstance(value, int | float) or not least <= value <= most:
            self.refuse(key, f"{shown(value)}: give a number, {least:g} to {most:g}")
        return float(value)

    def whole(self, key: str, least: int, most: int, default: int | None = None) -> int:
        value = self._value(key, default)
        if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
            self.refuse(key, f"{shown(value)}: give a whole number, {least} to {most}")
        return value

    def text(self, key: str, allowed: Sequence[str] = ()) -> str:
        value = self._value(key, None)
        if not isinstance(value, str) or not 0 < len(value) <= 200 or not value.isprintable():
            self.refuse(key, f"{shown(value)}: give 1 to 200 printable characters, in quotes")
        if allowed and value not in allowed:
            give = advice(value, allowed, f"give {', '.join(map(repr, allowed))}")
            self.refuse(key, f"{shown(value)}: {give}")
        return value

    def flag(self, key: str) -> bool:
        value = self._value(key, False)
        if not isinstance(value, bool):
            self.refuse(key, f"{shown(value)}: give true or false")
        return value

    def _value(self, key: str, default: object) -> Any:
        value = self._given.get(key, default)
        if value is None:
            lacking = [each for each in _TABLES[self.name] if each not in self._given and each not in _OPTIONAL]
            self.refuse("", f"it lacks {', '.join(map(repr, lacking))}")
        return value


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
        top = _Table(self, "", 0, given)
        top.whole("format", 1, 1)
        model, trainer, rollout = (self._table(given, each) for each in ("model", "trainer", "rollout"))
        hosts = tuple(self._hosts(given))
        links = self._links(self._table(given, "links"), several_sites=len({each.site for each in hosts}) > 1)
        spot = self._spot(self._table(given, "spot")) if "spot" in top else None
        kills = self._table(given, "kills") if "kills" in top else None
        found = Scenario(
            name=name,
            title=top.text("title"),
            seed=top.whole("seed", 0, 2**63 - 1),
            versions=top.whole("versions", 2, 10_000),
            rank_bytes=model.whole("bytes", 1, 2**50),
            chunk_bytes=model.whole("chunk_bytes", 4096, 2**30),
            links=links,
            hosts=hosts,
            every_copies=trainer.number("every_copies", 0.1),
            generate_mean_copies=rollout.number("generate_mean_copies", 0.0),
            generate_sigma=rollout.number("generate_sigma", 0.0, 5.0),
            spot=spot,
            kills=Kills(kills.number("every_copies", 0.1), kills.number("back_copies", 0.0)) if kills else None,
            scale=self._scale(self._table(given, "scale"), hosts) if "scale" in top else None,
        )
        for number, each in enumerate(hosts):
            if each.spot and spot is None:
                self.refuse("hosts", number, "spot", "there is no [spot], which says how long spot hosts are there")
        return found

    def _table(self, given: dict[str, Any], name: str) -> _Table:
        if name not in given:
            raise ScenarioError(f"{self._where}: it has no table [{name}], with {', '.join(_TABLES[name])}")
        return _Table(self, name, 0, given[name])

    def _hosts(self, given: dict[str, Any]) -> Iterator[Hosts]:
        tables = given.get("hosts")
        if not isinstance(tables, list) or not tables:
            raise ScenarioError(f"{self._where}: it has no hosts: write [[hosts]] with {', '.join(_TABLES['hosts'])}")
        roles: dict[str, int] = {}
        for number, each in enumerate(tables):
            table = _Table(self, "hosts", number, each)
            role: Any = table.text("role", ROLES)
            site, count = table.text("site"), table.whole("count", 1, WORKERS_MAX)
            hosts = Hosts(role, site, count, table.flag("spot"), table.number("slow", 1.0, 1e3, default=1.0))
            if hosts.spot and role != "rollout":
                table.refuse("spot", f"a {role} is no spot host here; rollouts may be")
            roles[role] = roles.get(role, 0) + hosts.count
            if roles.get("trainer", 0) > 1:
                table.refuse("role", "there is one trainer, of count 1")
            yield hosts
        for role in ("trainer", "rollout"):
            if role not in roles:
                raise ScenarioError(f"{self._where}: it has no [[hosts]] with role = {role!r}")
        if sum(roles.values()) > WORKERS_MAX:
            raise ScenarioError(f"{self._where}: it has {sum(roles.values())} hosts, more than {WORKERS_MAX}")

    @staticmethod
    def _links(table: _Table, *, several_sites: bool) -> Links:
        given = {
            key: table.number(key, 0.0 if key.endswith("_ms") else 1e-3)
            for key in Links.__dataclass_fields__
            if key in table or key in ("nic_mbit_per_s", "round_trip_ms")
        }
        for key in ("wan_mbit_per_s", "wan_round_trip_ms") if several_sites else ():
            if key not in given:
                table.refuse("", f"there are several sites, and it lacks {key!r}")
        return Links(**given)

    @staticmethod
    def _spot(table: _Table) -> Spot:
        return Spot(
            on_copies=table.number("on_copies", 0.1),
            off_copies=table.number("off_copies", 0.0),
            spread=table.number("spread", 0.0, 1.0),
            notice_share=table.number("notice_share", 0.0, 1.0),
            notice_copies=table.number("notice_copies", 0.0),
        )

    def _scale(self, table: _Table, hosts: Sequence[Hosts]) -> Scale:
        gpus_per_host = table.whole("gpus_per_host", 1, 64)
        if gpus_per_host > 1 and "local_mbit_per_s" not in table:
            table.refuse("gpus_per_host", "hosts have several workers, and 'local_mbit_per_s' is lacking")
        text = table.text("parameters")
        try:
            parameters(text)
        except ScenarioError as error:
            table.refuse("parameters", str(error))
        return Scale(
            parameters=text,
            gpus_per_host=gpus_per_host,
            hosts_per_rack=table.whole("hosts_per_rack", 1, WORKERS_MAX),
            chunk_bytes=table.whole("chunk_bytes", 4096, 2**30),
            links=self._links(table, several_sites=len({each.site for each in hosts}) > 1),
        )
