"""Traces calls by spans: queue, prefill, decode, deliver. They are exported only if OTEL_EXPORTER_OTLP_ENDPOINT is set.

The call's W3C trace context is passed on to its requests, with or without export.
"""

import os
import re
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass

from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter
from opentelemetry.trace import Span, SpanKind, StatusCode, set_span_in_context
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from orca.gateway.answer.delivery import CallTiming

TRACEPARENT = re.compile(r"[0-9a-f]{2}-[0-9a-f]{32}-[0-9a-f]{16}-[0-9a-f]{2}")

CLOSE_SECONDS = 1.0
"""Longest time for the last spans. The exporter's own limit, half a minute, is longer than a pod may take to end."""


@dataclass(frozen=True, slots=True)
class CallSpan:
    """The span of one call, and the trace context for its requests."""

    span: Span | None
    traceparent: str | None


class Tracing:
    """Makes spans, or only passes contexts on if there is no exporter."""

    def __init__(self, exporter: SpanExporter | None) -> None:
        self._provider: TracerProvider | None = None
        if exporter is not None:
            self._provider = TracerProvider(resource=Resource.create({"service.name": "orca-gateway"}))
            self._provider.add_span_processor(BatchSpanProcessor(exporter))

    @classmethod
    def from_environment(cls) -> "Tracing":
        """Read OpenTelemetry's own variables."""
        if not os.environ.get("OTEL_EXPORTER_OTLP_ENDPOINT"):
            return cls(None)
        # Imported only here: it is slow to load, and most gateways run without it.
        from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter

        return cls(OTLPSpanExporter())

    def start(self, name: str, traceparent: str | None) -> CallSpan:
        """Begin a call's span under the span that its `traceparent` header names. A malformed one is ignored."""
        given = None if traceparent is None or not TRACEPARENT.fullmatch(traceparent) else traceparent
        if self._provider is None:
            return CallSpan(None, given)
        context = TraceContextTextMapPropagator().extract({"traceparent": given} if given else {})
        span = self._provider.get_tracer(__name__).start_span(name, context, kind=SpanKind.SERVER)
        carrier: dict[str, str] = {}
        TraceContextTextMapPropagator().inject(carrier, set_span_in_context(span))
        return CallSpan(span, carrier.get("traceparent"))

    def fail(self, call: CallSpan, error: BaseException) -> None:
        """End the span of a call that was not accepted, with the error's type: its message may quote the client."""
        if call.span is not None:
            call.span.set_status(StatusCode.ERROR, type(error).__name__)
            call.span.end()

    def finish(
        self,
        call: CallSpan,
        timing: CallTiming,
        attributes: Mapping[str, str | int | float],
        first_claimed_ms: int | None = None,
    ) -> None:
        """End a call's span, with one child for each phase that the call reached.

        Args:
            first_claimed_ms: wall clock, Unix milliseconds; without it, waiting and the first iteration are one span.
        """
        if call.span is None or self._provider is None:
            return
        offset_ns = time.time_ns() - time.perf_counter_ns()
        started, first, last, ended = (
            None if seconds is None else int(seconds * 1e9) + offset_ns
            for seconds in (timing.started, timing.first_token, timing.last_token, timing.ended)
        )
        claimed = None if first_claimed_ms is None else first_claimed_ms * 1_000_000
        delivered = time.time_ns()
        phases = (
            ("queue", started, claimed),
            ("prefill", claimed or started, first),
            ("decode", first, last),
            ("deliver", ended, delivered),
        )
        context = set_span_in_context(call.span)
        for name, begin_ns, end_ns in phases:
            if begin_ns is not None and end_ns is not None:
                child = self._provider.get_tracer(__name__).start_span(name, context, start_time=begin_ns)
                child.end(max(begin_ns, end_ns))
        call.span.set_attributes(attributes)
        call.span.end(delivered)

    def close(self) -> None:
        """Export the remaining spans. Spans that the collector does not take in time are lost, and the process ends."""
        if self._provider is not None:
            closing = threading.Thread(target=self._provider.shutdown, daemon=True)
            closing.start()
            closing.join(CLOSE_SECONDS)
