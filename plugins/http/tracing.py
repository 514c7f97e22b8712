"""OpenTelemetry traces: one span for each generation, with the attributes of the conventions for generative AI.

The conventions are still in development, so this module sets only their attributes for a request, its token counts and
its end. Prompts and outputs are in no span. The packages of ``minisgl[otel]`` are imported only if
``server.otlp_endpoint`` is set.
"""

from __future__ import annotations

import importlib.util
import threading
from typing import TYPE_CHECKING, Any

from minisgl import hookimpl
from minisgl.config import Config, ConfigError
from minisgl.plugins.http.apis.outcome import finish_reasons, prompt_tokens
from minisgl.server.extension import HttpExtension
from minisgl.server.request_record import RequestRecord, Stream
from minisgl.utils.version import __version__

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import SpanProcessor

_PACKAGES = ("opentelemetry.sdk", "opentelemetry.exporter.otlp.proto.http")


@hookimpl
def minisgl_http(config: Config) -> HttpExtension | None:
    endpoint = config.server.otlp_endpoint
    if endpoint is None:
        return None
    check_tracing(endpoint)
    return Tracer(otlp_processor(endpoint), config.server.served_model_name or config.model)


def check_tracing(endpoint: str | None) -> None:
    """Raise `ConfigError` if ``server.otlp_endpoint`` is set and the packages for it are not installed."""
    if endpoint is not None and not all(map(_is_installed, _PACKAGES)):
        raise ConfigError(
            f"server.otlp_endpoint={endpoint}: OpenTelemetry is not installed. Run: pip install 'minisgl[otel]'"
        )


def _is_installed(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:  # a parent package is not installed
        return False


def otlp_processor(endpoint: str) -> SpanProcessor:
    """Return the processor that sends spans to an OpenTelemetry collector, in batches, over HTTP.

    ``endpoint`` is the collector's address without the path ``/v1/traces``. The variables of the environment that the
    SDK knows, such as ``OTEL_EXPORTER_OTLP_HEADERS``, apply too.
    """
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
    from opentelemetry.sdk.trace.export import BatchSpanProcessor

    return BatchSpanProcessor(OTLPSpanExporter(endpoint=f"{endpoint.rstrip('/')}/v1/traces"))


class Tracer(HttpExtension):
    """Makes the spans of one server. ``model`` is the model's name in the API."""

    options = ("otlp_endpoint",)

    def __init__(self, processor: SpanProcessor, model: str):
        from opentelemetry.sdk.resources import OTELResourceDetector, Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        resource = Resource.create({"service.name": "minisgl", "service.version": __version__})
        resource = resource.merge(OTELResourceDetector().detect())  # the environment decides
        self._provider = TracerProvider(resource=resource, shutdown_on_exit=False)
        self._provider.add_span_processor(processor)
        self._tracer = self._provider.get_tracer("minisgl", __version__)
        self._propagator = TraceContextTextMapPropagator()
        self._model = model

    def on_end(self, record: RequestRecord) -> None:
        """Make the span of a request that has ended, if it was a generation.

        Its parent is that of the header ``traceparent``, which also decides whether the span is recorded.
        """
        from opentelemetry.trace import SpanKind, StatusCode

        stream = record.stream
        if stream is None:
            return
        operation = "chat" if stream.chat else "text_completion"
        span = self._tracer.start_span(
            f"{operation} {self._model}",
            context=self._propagator.extract(dict(record.headers)),
            kind=SpanKind.SERVER,
            attributes={
                "gen_ai.operation.name": operation,
                "gen_ai.provider.name": "minisgl",
                "gen_ai.request.model": self._model,
                "gen_ai.response.model": self._model,
                "http.request.method": record.method,
                "http.response.status_code": record.status,
                "http.route": record.route,
                "minisgl.request_id": record.id,
                **_generation_attributes(stream),
            },
            start_time=record.arrival_ns,
        )
        if record.error:
            span.set_attribute("error.type", str(record.status) if record.status >= 400 else "aborted")
            span.set_status(StatusCode.ERROR, record.error)
        span.end(record.arrival_ns + int(record.seconds * 1e9))

    def close(self, timeout: float) -> None:
        """Send the last spans, for at most ``timeout`` seconds."""
        # A thread that does not keep the program alive: a collector that does not answer would delay the end.
        thread = threading.Thread(target=self._provider.shutdown, daemon=True)
        thread.start()
        thread.join(timeout)


def _generation_attributes(stream: Stream) -> dict[str, Any]:
    params = stream.params
    attributes: dict[str, Any] = {
        "gen_ai.response.id": stream.response_id,
        "gen_ai.response.finish_reasons": finish_reasons(stream),
        "gen_ai.usage.output_tokens": stream.output_tokens,
        "gen_ai.request.max_tokens": params.max_tokens,
        "gen_ai.request.temperature": params.temperature,
        "gen_ai.request.top_p": params.top_p,
        "gen_ai.request.frequency_penalty": params.frequency_penalty,
        "gen_ai.request.presence_penalty": params.presence_penalty,
    }
    if (tokens := prompt_tokens(stream)) is not None:
        attributes["gen_ai.usage.input_tokens"] = tokens
    if params.top_k > 0:
        attributes["gen_ai.request.top_k"] = params.top_k
    if params.n != 1:
        attributes["gen_ai.request.choice.count"] = params.n
    if params.seed is not None:
        attributes["gen_ai.request.seed"] = params.seed
    if stream.first_token is not None:
        attributes["gen_ai.response.time_to_first_chunk"] = stream.first_token
    return attributes
