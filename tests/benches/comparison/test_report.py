"""What is made of figures: ratios, rows, the table, the picture. No processes."""

from __future__ import annotations

import io
import re
from pathlib import Path
from xml.etree import ElementTree

import pytest
from rich.console import Console

from benches.comparison.backends import BACKENDS
from benches.comparison.network import Network
from benches.comparison.picture import draw
from benches.comparison.report import Row, as_json, complaints, ratios, rows, table
from benches.comparison.sizes import half_tiny
from benches.comparison.suite import Copy, Plan, Visit

NETWORK = Network(None, "reno")
HOST = Network("Operation not permitted: it takes root", "bbr")


def plan_of(*names: str, fans: tuple[int, ...] = (1,)) -> Plan:
    return Plan([backend for backend in BACKENDS if backend.name in names], 2, 3, 1024, fans, 1.0, Path("/none"))


def visited(backend: str, number: int, *seconds: float, fan: int = 1) -> Visit:
    copies = [Copy(each, 0.25 * each, 2.0) for each in seconds]
    return Visit(backend, fan, number, copies, number * 2**30, {"x": "1"})


VISITS = [
    visited("memcpy-1", 1, 0.2),
    visited("memcpy-2", 1, 0.1),
    visited("bare", 1, 0.5, 0.4, 9.0),
    visited("tensorhub-tcp", 1, 1.0, 0.9, 2.0),
    visited("tensorhub-tcp", 2, 2.0),
    visited("bare", 2, 1.0),
    visited("memcpy-1", 2, 0.4),
    visited("memcpy-2", 2, 0.8),
]


def test_a_ratio_is_of_the_medians_of_one_round() -> None:
    assert ratios(VISITS, "tensorhub-tcp", ["bare"]) == [0.5, 0.5]
    assert ratios(VISITS, "tensorhub-tcp", ["memcpy-1", "memcpy-2"]) == [0.1, 0.2]  # the faster one of each round
    assert ratios(VISITS, "bare", ["nobody"]) == []
    assert ratios([*VISITS, Visit("bare", 1, 3, reason="no")], "bare", ["bare"]) == [1.0, 1.0]


def test_a_row_is_of_all_copies() -> None:
    found = {row.backend.name: row for row in rows(plan_of("memcpy-1", "bare", "tensorhub-tcp", "redis"), VISITS, NETWORK)}
    hub = found["tensorhub-tcp"]
    assert hub.seconds == (1.5, 0.9, 2.0)
    assert hub.offered_s == (0.375, 0.225, 0.5)
    assert hub.gib_per_s is not None
    assert hub.gib_per_s.largest == pytest.approx(1 / 0.9)
    assert (hub.cpu_s_per_gib, hub.peak_gib) == ((2.0, 2.0, 2.0), 2.0)
    assert found["redis"].seconds is None
    assert as_json(hub)["seconds"] == {"median": 1.5, "least": 0.9, "largest": 2.0}


def test_speed_counts_every_receivers_bytes() -> None:
    (row,) = rows(plan_of("bare", fans=(4,)), [visited("bare", 1, 2.0, fan=4)], NETWORK)
    assert (row.gib_per_s, row.cpu_s_per_gib) == ((2.0, 2.0, 2.0), (0.5, 0.5, 0.5))


def test_the_congestion_control_of_a_row() -> None:
    def told(network: Network) -> dict[str, str | None]:
        chosen = plan_of("bare", "tensorhub-tcp", "tensorhub-cma", "nginx", "ray")
        return {row.backend.name: row.congestion_control for row in rows(chosen, [], network)}

    assert told(NETWORK) == {"bare": "reno", "tensorhub-tcp": "reno", "tensorhub-cma": None, "nginx": "reno", "ray": None}
    assert told(HOST) == {"bare": "reno", "tensorhub-tcp": "reno", "tensorhub-cma": None, "nginx": "bbr", "ray": None}
    assert "it takes root" in str(HOST)


def some_rows() -> list[Row]:
    visits = [visited("bare", 1, 0.5), visited("memcpy-1", 1, 0.25), Visit("redis", 1, 1, reason="not <there>")]
    return rows(plan_of("memcpy-1", "bare", "redis", fans=(1, 4)), [*visits, visited("bare", 1, 2.0, fan=4)], NETWORK)


def test_the_table() -> None:
    console = Console(width=160, record=True, file=io.StringIO())
    console.print(table(some_rows()))
    text = console.export_text()
    assert re.search(r"bare sockets\W+0\.500 \[0\.500-0\.500\]\W+0\.125\W+2\.000\W+1\.000 ", text)
    assert "1 -> 4" in text
    assert re.search(r"Redis\W+see below", text)


def test_what_could_not_be_measured_is_told_once() -> None:
    visits = [Visit("redis", fan, 1, reason="no") for fan in (1, 4)] + [Visit("zmq", 4, 1, reason="late")]
    found = complaints(rows(plan_of("redis", "zmq", fans=(1, 4)), visits, NETWORK))
    assert sorted(found) == ["1 -> 4: zmq: late", "redis: no"]


def test_the_picture() -> None:
    root = ElementTree.fromstring(draw(some_rows(), "a < b", ["a note"]))
    texts = ["".join(element.itertext()) for element in root.iter("{http://www.w3.org/2000/svg}text")]
    assert {"a < b", "a note", "1 source, 1 receiver", "1 source, 4 receivers", "memcpy"} <= set(texts)
    assert texts.count("bare sockets") == 4  # a bar and a line in either group
    assert "Redis" not in texts
    widths = [float(rect.get("width", "0")) for rect in root.iter("{http://www.w3.org/2000/svg}rect") if len(rect)]
    assert widths[1] == pytest.approx(widths[0] / 2, abs=0.1)  # bare: half of memcpy's speed


def test_sizes() -> None:
    sizes = half_tiny(64 * 2**20)
    assert (len(sizes), sum(sizes), {size % 4 for size in sizes}) == (300, 64 * 2**20, {0})
    with pytest.raises(ValueError, match="1 MiB"):
        half_tiny(2**19)
