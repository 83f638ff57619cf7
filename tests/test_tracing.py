"""OpenTelemetry: a span for each call, with its phases, below the caller's own."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator

import numpy as np
import pytest

from tensorhub import sync
from tensorhub.api.tracing import traced
from tensorhub.errors import VersionUnavailable
from tensorhub.types import FetchReport
from tests.rig import OPTIONS, cluster, published, tensors, write

sdk = pytest.importorskip("opentelemetry.sdk.trace", reason="opentelemetry-sdk is not installed")

from opentelemetry import trace  # noqa: E402
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider  # noqa: E402
from opentelemetry.sdk.trace.export import SimpleSpanProcessor  # noqa: E402
from opentelemetry.sdk.trace.export.in_memory_span_exporter import (  # noqa: E402
    InMemorySpanExporter,
)


@pytest.fixture
def exporter(monkeypatch: pytest.MonkeyPatch) -> Iterator[InMemorySpanExporter]:
    """The host program has set a provider."""
    provider, exporter = TracerProvider(), InMemorySpanExporter()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    monkeypatch.setattr(trace, "_TRACER_PROVIDER", provider)
    yield exporter
    provider.shutdown()


def named(exporter: InMemorySpanExporter, name: str) -> ReadableSpan:
    (found,) = [each for each in exporter.get_finished_spans() if each.name == name]
    return found


def below(exporter: InMemorySpanExporter, span: ReadableSpan) -> list[ReadableSpan]:
    """Its children, in their order in time."""
    found = [
        each
        for each in exporter.get_finished_spans()
        if each.parent is not None and each.parent.span_id == span.context.span_id
    ]
    return sorted(found, key=lambda each: (each.start_time or 0, each.end_time or 0))


def seconds(span: ReadableSpan) -> float:
    assert span.start_time is not None
    assert span.end_time is not None
    return (span.end_time - span.start_time) / 1e9


async def test_an_update_has_its_phases_below_it(exporter: InMemorySpanExporter) -> None:
    async with cluster("trainer", "reader") as c:
        theirs = tensors(1)
        source = await c.hubs[0].register("m", theirs)
        await source.publish(1)
        weights = await c.hubs[1].register("m", tensors(), group="r")
        with trace.get_tracer("host").start_as_current_span("step") as step:
            report = await weights.update()
        span = named(exporter, "tensorhub.update")
        assert span.parent == step.get_span_context()
        assert dict(span.attributes or {}) == {
            "tensorhub.model": "m",
            "tensorhub.version": 1,
            "tensorhub.bytes": report.bytes_read,
            "tensorhub.changed": True,
            "tensorhub.sources": ("trainer",),
        }
        phases = below(exporter, span)
        assert {each.name for each in phases} == set(report.phases)
        for each in phases:
            assert seconds(each) == pytest.approx(report.phases[each.name], abs=1e-3)
            assert (span.start_time or 0) <= (each.start_time or 0)
            assert (each.end_time or 0) <= (span.end_time or 0)
        assert seconds(span) >= report.seconds
        assert named(exporter, "tensorhub.publish").attributes == {
            "tensorhub.model": "m",
            "tensorhub.version": 1,
            "tensorhub.bytes": report.bytes_read,
        }
        exporter.clear()
        async with source.mutate(2):
            write(theirs, 2)
        mutate = named(exporter, "tensorhub.mutate")
        assert [each.name for each in below(exporter, mutate)] == ["unpublish", "body", "publish"]
        await c.hubs[1].fetch("m")
        assert named(exporter, "tensorhub.fetch").attributes is not None


async def test_a_call_that_fails_says_why(exporter: InMemorySpanExporter) -> None:
    async with cluster("trainer", "reader") as c:
        await published(c.hubs[0])
        weights = await c.hubs[1].register("m", tensors(), group="r")
        with pytest.raises(VersionUnavailable):
            await weights.update(7)
        span = named(exporter, "tensorhub.update")
        assert span.status.status_code is trace.StatusCode.ERROR
        assert "VersionUnavailable: " in (span.status.description or "")
        assert [each.name for each in span.events] == ["exception"]
        with pytest.raises(RuntimeError, match="the body"):
            async with (await c.hubs[0].register("n", tensors())).mutate(1):
                raise RuntimeError("the body")
        assert named(exporter, "tensorhub.mutate").status.status_code is trace.StatusCode.ERROR


def test_without_an_event_loop(exporter: InMemorySpanExporter) -> None:
    with (
        sync.serve(token="", options=OPTIONS) as coordinator,
        sync.connect(coordinator.address, name="one", token="", options=OPTIONS) as hub,
        trace.get_tracer("host").start_as_current_span("step") as step,
    ):
        hub.register("m", {"w": np.ones(4)}).publish(1)
    assert named(exporter, "tensorhub.publish").parent == step.get_span_context()


async def test_without_a_provider_nothing_is_made() -> None:
    """OpenTelemetry is imported, and not set up."""
    assert isinstance(trace.get_tracer_provider(), trace.ProxyTracerProvider)
    with traced("publish", "m") as its:
        its.ended(FetchReport(1, True, phases={"resolve": 1.0}))
    async with cluster("trainer") as c:
        assert (await published(c.hubs[0])).version == 1


@pytest.mark.heavy
def test_tensorhub_does_not_import_it() -> None:
    program = (
        "import sys; from tensorhub import sync\n"
        "import numpy as np\n"
        "with sync.serve(token='') as c, sync.connect(c.address, token='') as hub:\n"
        "    hub.register('m', {'w': np.ones(4)}).publish(1)\n"
        "print([name for name in sys.modules if name.startswith('opentelemetry')])\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=120
    )
    assert (done.stdout, done.returncode) == ("[]\n", 0), done.stderr
