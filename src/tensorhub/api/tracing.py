"""OpenTelemetry: a span for each call that publishes or fills, with its phases below it.

The host program chooses: spans are made once it has imported OpenTelemetry and set a provider of
tracers. Until then a call costs one look into a dictionary. Nothing is measured for it: the spans
are made when the call ends, from the times that it reports. The phases of a report are durations;
their spans follow one another in the order of the report.

    tensorhub.publish, replicate, update, prefetch, fetch      the call; below it `FetchReport.phases`
    tensorhub.mutate                                           below it unpublish, body, publish

Attributes: `tensorhub.model`, and of a call that has succeeded `tensorhub.version`,
`tensorhub.bytes` (published, or read), `tensorhub.changed` and `tensorhub.sources` (names).
"""  # noqa: E501 - a table

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Any, Concatenate, Final, ParamSpec, Protocol, TypeVar

from tensorhub.types import FetchReport, VersionInfo

API: Final = "opentelemetry.trace"
SOURCES_MAX: Final = 64  # that a span names


class _OfModel(Protocol):
    @property
    def model(self) -> str: ...


P = ParamSpec("P")
R = TypeVar("R")
M = TypeVar("M", bound=_OfModel)


class Call:
    """One call, as its span tells of it. `phases`: seconds by name."""

    def __init__(self) -> None:
        self._clock, self._began_ns = time.perf_counter_ns, time.time_ns()
        self._began = self._clock()
        self.attributes: dict[str, Any] = {}
        self.phases: dict[str, float] = {}

    def phase(self, name: str) -> None:
        """It has lasted from the end of the phase before until now."""
        elapsed_s = (self._clock() - self._began) / 1e9
        self.phases[name] = elapsed_s - sum(self.phases.values())

    def ended(self, result: object) -> None:
        """With this result."""
        if isinstance(result, VersionInfo):
            self._tell(version=result.version, bytes=result.nbytes)
        elif isinstance(result, FetchReport):
            self.phases |= result.phases
            sources = [each.name for each in result.sources[:SOURCES_MAX]]
            self._tell(
                version=result.version,
                bytes=result.bytes_read,
                changed=result.changed,
                sources=list(dict.fromkeys(sources)),
            )

    def _tell(self, **attributes: object) -> None:
        self.attributes |= {f"tensorhub.{name}": value for name, value in attributes.items()}

    def emit(self, trace: Any, name: str, model: str, error: BaseException | None) -> None:
        """Make its spans, below the caller's present one. `trace`: OpenTelemetry's API."""
        ended_ns = self._began_ns + self._clock() - self._began
        tracer = trace.get_tracer("tensorhub")
        about = {"tensorhub.model": model, **self.attributes}
        span = tracer.start_span(f"tensorhub.{name}", attributes=about, start_time=self._began_ns)
        if span.is_recording():
            context, at_ns = trace.set_span_in_context(span), self._began_ns
            for phase, seconds in self.phases.items():
                until_ns = min(at_ns + round(seconds * 1e9), ended_ns)
                tracer.start_span(phase, context=context, start_time=at_ns).end(until_ns)
                at_ns = until_ns
            if error is not None:
                span.record_exception(error, timestamp=ended_ns)
                span.set_status(trace.StatusCode.ERROR, f"{type(error).__name__}: {error}")
        span.end(ended_ns)


class _Untold(Call):
    def phase(self, name: str) -> None: ...

    def ended(self, result: object) -> None: ...


_UNTOLD: Final = _Untold()


@contextmanager
def traced(name: str, model: str) -> Iterator[Call]:
    """Within the block runs that call of that model."""
    trace = sys.modules.get(API)
    if trace is None:
        yield _UNTOLD
        return
    call, failed = Call(), None
    try:
        yield call
    except BaseException as error:
        failed = error
        raise
    finally:
        call.emit(trace, name, model, failed)


def tracing(
    call: Callable[Concatenate[M, P], Coroutine[Any, Any, R]],
) -> Callable[Concatenate[M, P], Coroutine[Any, Any, R]]:
    """The call of an object of one model, traced under its own name."""

    @wraps(call)
    async def told(of: M, /, *given: P.args, **named: P.kwargs) -> R:
        if API not in sys.modules:
            return await call(of, *given, **named)
        with traced(call.__name__, of.model) as its:
            result = await call(of, *given, **named)
            its.ended(result)
            return result

    return told
