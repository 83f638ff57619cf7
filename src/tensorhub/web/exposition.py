"""Figures in the form of Prometheus: text or OpenMetrics, as the scraper asks.

Each label has a bound: kinds, states and phases are of this library's own lists, and models are the
`MODELS_MAX` that have published last; all others are "other". Names and units are a promise
(docs/observing.md).
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import TypeVar

from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
    SummaryMetricFamily,
)
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4, generate_latest
from prometheus_client.openmetrics import exposition as openmetrics
from prometheus_client.registry import Collector
from starlette.requests import Request

from tensorhub.coordinator.observing import SECONDS_BOUNDS, Counters, Histogram
from tensorhub.coordinator.overview import ModelOverview, Overview
from tensorhub.web.pages import Answer

MODELS_MAX = 64
LABEL_BYTES_MAX = 128  # of a model's name; a longer one is cut, and tells its hash
OTHER = "other"

Label = TypeVar("Label", bound=tuple[str, ...])
Encode = Callable[[Collector], bytes]


@dataclass(frozen=True, slots=True)
class Figures:
    """Of one coordinator."""

    overview: Overview
    models: Sequence[ModelOverview]
    behind_s: float
    steps: int
    steps_s: float
    counters: Counters


class _Families(Collector):
    def __init__(self, families: Iterable[Metric]) -> None:
        self._families = families

    def collect(self) -> Iterable[Metric]:
        return self._families


def exposition(families: Iterable[Metric], encode: Encode) -> bytes:
    """As `encode` writes them."""
    return encode(_Families(families))


def form_for(request: Request) -> tuple[Encode, str]:
    """OpenMetrics where the scraper takes it, else Prometheus' text; with its content type. (The
    client library's choice lets a scraper name versions as it likes.)
    """
    accepted = request.headers.get("accept", "").split(",")
    if any(each.partition(";")[0].strip() == "application/openmetrics-text" for each in accepted):
        return openmetrics.generate_latest, openmetrics.CONTENT_TYPE_LATEST
    return generate_latest, CONTENT_TYPE_PLAIN_0_0_4


def metrics_answer(request: Request, families: Iterable[Metric]) -> Answer:
    """In the form that the request asks for."""
    encode, kind = form_for(request)
    return Answer(exposition(families, encode), headers={"Content-Type": kind})


def label_of(name: str) -> str:
    """A model's name as a label."""
    encoded = name.encode("utf-8", "backslashreplace")
    if len(encoded) <= LABEL_BYTES_MAX:
        return encoded.decode()
    ident = hashlib.blake2b(encoded, digest_size=4).hexdigest()
    return f"{encoded[: LABEL_BYTES_MAX - 9].decode('utf-8', 'ignore')}~{ident}"


def of_coordinator(figures: Figures) -> Iterator[Metric]:
    """All families of a coordinator."""
    seen = figures.overview
    yield gauge("tensorhub_workers", "Workers by state", seen.workers, "state")
    yield gauge("tensorhub_sessions", "Connections of workers and observers", seen.sessions)
    yield gauge("tensorhub_models", "Models that are known", seen.models)
    serving = int(seen.state == "serving")
    yield gauge("tensorhub_serving", "1: the coordinator has its state; else 0", serving)
    behind_s = round(figures.behind_s, 6)
    yield gauge("tensorhub_behind_seconds", "How late the coordinator's loop is", behind_s)
    margin = "How long the worker that is nearest to being lost still counts"
    yield gauge(
        "tensorhub_lease_margin_seconds",
        margin,
        {} if seen.lease_margin_s is None else {"": seen.lease_margin_s},
    )
    steps = SummaryMetricFamily(
        "tensorhub_step_seconds",
        "Steps of the coordinator",
        count_value=figures.steps,
        sum_value=figures.steps_s,
    )
    yield steps
    yield from _of_counters(figures.counters)
    yield from _of_models(figures.models)


def _of_counters(counters: Counters) -> Iterator[Metric]:
    yield histogram(
        "tensorhub_update_seconds",
        "Ranks' calls that fill memory, by phase",
        counters.update_seconds,
        "phase",
    )
    yield counter(
        "tensorhub_bytes_total",
        "Bytes that ranks have read, by transport and kind of source",
        counters.bytes_total,
        "transport",
        "kind",
    )
    yield counter(
        "tensorhub_updates_total",
        "Calls of groups that fill memory, by outcome",
        {(outcome,): number for outcome, number in counters.updates_total.items()},
        "outcome",
    )
    yield counter(
        "tensorhub_refusals_total",
        "Questions and sessions that were refused, by the error's name",
        {(reason,): number for reason, number in counters.refused_total.items()},
        "reason",
    )
    retries, corrupt = (
        "Reads that failed, and went on elsewhere",
        "Of these, because of wrong bytes",
    )
    yield counter("tensorhub_retries_total", retries, {(): counters.retries_total})
    yield counter("tensorhub_corrupt_chunks_total", corrupt, {(): counters.corrupt_total})


def _of_models(models: Sequence[ModelOverview]) -> Iterator[Metric]:
    age = GaugeMetricFamily(
        "tensorhub_version_age_seconds",
        "Since the newest publication; at least, where the coordinator has restarted since",
        labels=["model"],
    )
    newest = GaugeMetricFamily(
        "tensorhub_newest_version", "The newest number ever published", labels=["model"]
    )
    replicas = GaugeMetricFamily(
        "tensorhub_replicas", "Copies of versions, by state", labels=["model", "state"]
    )
    states: dict[str, Counter[str]] = {}
    calls: Counter[tuple[str, str]] = Counter()
    longest: dict[tuple[str, str], float] = {}
    for place, each in enumerate(models):
        info, label = each.info, label_of(each.info.model) if place < MODELS_MAX else OTHER
        if place < MODELS_MAX and info.mark is not None:
            age.add_metric([label], round(each.age_s, 3))
            newest.add_metric([label], info.mark)
        counted = states.setdefault(label, Counter())
        for version in info.versions:
            if version.summary is not None:
                for state in ("ready", "filling", "draining", "torn"):
                    counted[state] += getattr(version.summary, state)
        for row in info.summary.calls if info.summary is not None else ():
            calls[row.call, row.waits_for] += row.count
            longest[row.call, row.waits_for] = max(
                row.longest_s, longest.get((row.call, row.waits_for), 0.0)
            )
    for label, counted in states.items():
        for state, number in counted.items():
            replicas.add_metric([label, state], number)
    waiting = GaugeMetricFamily(
        "tensorhub_calls_waiting",
        "Calls of groups that are under way, by what they wait for",
        labels=["call", "waits_for"],
    )
    standstill = GaugeMetricFamily(
        "tensorhub_calls_waiting_longest_seconds",
        "The longest time without progress of any of these calls",
        labels=["call", "waits_for"],
    )
    for key, number in calls.items():
        waiting.add_metric(key, number)
        standstill.add_metric(key, round(longest[key], 3))
    yield from (age, newest, replicas, waiting, standstill)


def counter(name: str, text: str, values: Mapping[Label, float], *labels: str) -> Metric:
    """What only grows, by the values of its labels."""
    family = CounterMetricFamily(name, text, labels=labels)
    for key, number in values.items():
        family.add_metric(key, number)
    return family


def histogram(name: str, text: str, values: Mapping[str, Histogram], label: str) -> Metric:
    """How many values were how large, by the values of a label."""
    family = HistogramMetricFamily(name, text, labels=[label])
    bounds = [*map(str, SECONDS_BOUNDS), "+Inf"]
    for key, each in values.items():
        family.add_metric([key], list(zip(bounds, accumulate(each.counts), strict=True)), each.sum)
    return family


def gauge(name: str, text: str, value: float | Mapping[str, float], label: str = "") -> Metric:
    """With one value, or one for each value of a label."""
    family = GaugeMetricFamily(name, text, labels=[label] if label else [])
    for key, number in (value if isinstance(value, Mapping) else {"": value}).items():
        family.add_metric([key] if label else [], number)
    return family
