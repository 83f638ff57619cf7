"""What an exposition says, and how large it can become."""

from __future__ import annotations

from prometheus_client.exposition import generate_latest
from prometheus_client.parser import text_string_to_metric_families

from tensorhub.coordinator import limits
from tensorhub.coordinator.observing import KINDS, TRANSPORTS_MAX, Counters
from tensorhub.coordinator.overview import ModelOverview, Overview
from tensorhub.types import ModelInfo, VersionSummary, VersionView
from tensorhub.web.exposition import Figures, exposition, of_coordinator

BYTES_MAX = 200_000


def model(number: int) -> ModelOverview:
    """One whose name is as long as a name may be."""
    name = f"{number}-" + "\U0001f600" * (511 - len(str(number)))
    counted = VersionSummary(1, 10**6, 10**6, 10**6, 10**6, 0, 0, 0)
    version = VersionView(7, "c", "available", 1, 1, 0, False, summary=counted)
    return ModelOverview(ModelInfo(name, 0, 2**63 - 1, 0, (version,), (), (), ()), 1e6, False)


def test_a_scrape_stays_small_whatever_names_there_are() -> None:
    counters = Counters()
    for transport in range(TRANSPORTS_MAX):
        for kind in KINDS:
            counters.bytes_total[f"transport-{transport}", kind] = 2**63
    seen = Overview("c", 1, "serving", 10.0, 1, {"live": 1, "suspect": 0}, 1.0, 0.0, 10**5)
    models = [model(number) for number in range(limits.OVERVIEW_MODELS_MAX)]
    figures = Figures(seen, models, 0.0, 1, 1.0, counters)
    assert len(exposition(of_coordinator(figures), generate_latest)) < BYTES_MAX


def test_each_counter_is_exported_under_its_own_name() -> None:
    counters = Counters()
    counters.retries_total, counters.corrupt_total = 3, 2
    counters.refused_total["StateError"] = 5
    counters.updates_total["committed"] = 7
    counters.bytes_total["tcp", "live"] = 11
    seen = Overview("c", 1, "serving", 10.0, 1, {"live": 1, "suspect": 0}, 1.0, 0.0, 1)
    told = exposition(of_coordinator(Figures(seen, [], 0.0, 1, 1.0, counters)), generate_latest)
    samples = [
        (sample.name, sample.labels, sample.value)
        for family in text_string_to_metric_families(told.decode())
        for sample in family.samples
    ]
    for expected in (
        ("tensorhub_retries_total", {}, 3),
        ("tensorhub_corrupt_chunks_total", {}, 2),
        ("tensorhub_refusals_total", {"reason": "StateError"}, 5),
        ("tensorhub_updates_total", {"outcome": "committed"}, 7),
        ("tensorhub_bytes_total", {"transport": "tcp", "kind": "live"}, 11),
    ):
        assert expected in samples
