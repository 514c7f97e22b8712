"""OpenTelemetry spans: their attributes, their parent, and the option without the packages."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import httpx
import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.sdk.trace import ReadableSpan, SpanProcessor
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind, StatusCode

from minisgl.config import Config, ConfigError
from minisgl.plugins.http import HttpConfig
from minisgl.plugins.http.tracing import Tracer, check_tracing
from minisgl.testing.serving import Server, patient_timeout

RunApp = Callable[..., None]
BODY = {"prompt": [5, 6, 7], "max_tokens": 2}
TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"


def spans_of(run_app: RunApp, *requests: tuple[dict[str, Any], dict[str, str]], **app: Any) -> list[ReadableSpan]:
    """Return the spans of requests, given as body and headers. A body with messages is a chat."""
    exporter = InMemorySpanExporter()
    tracer = Tracer(SimpleSpanProcessor(exporter), "m")

    async def test(server: Any) -> None:
        async with server.client() as client:
            await client.get("/health")
            for body, headers in requests:
                route = "chat/completions" if "messages" in body else "completions"
                await client.post(f"/v1/{route}", json=body, headers=headers)

    run_app(test, extensions=[tracer], **app)
    return list(exporter.get_finished_spans())


def test_span_of_a_chat(run_app: RunApp) -> None:
    body = {"messages": [{"role": "user", "content": "secret"}], "n": 2, "temperature": 0.5, "seed": 7, "top_k": 3}
    (span,) = spans_of(run_app, ({**body, "max_tokens": 9}, {"X-Request-Id": "r-1"}))
    assert (span.name, span.kind, span.parent) == ("chat m", SpanKind.SERVER, None)
    found = dict(span.attributes or {})
    assert 0 < found.pop("gen_ai.response.time_to_first_chunk") < 60  # type: ignore[operator]
    assert found == {
        "gen_ai.operation.name": "chat",
        "gen_ai.provider.name": "minisgl",
        "gen_ai.request.model": "m",
        "gen_ai.request.choice.count": 2,
        "gen_ai.request.frequency_penalty": 0.0,
        "gen_ai.request.max_tokens": 9,
        "gen_ai.request.presence_penalty": 0.0,
        "gen_ai.request.seed": 7,
        "gen_ai.request.temperature": 0.5,
        "gen_ai.request.top_k": 3,
        "gen_ai.request.top_p": 1.0,
        "gen_ai.response.finish_reasons": ("length", "length"),
        "gen_ai.response.id": "chatcmpl-r-1",
        "gen_ai.response.model": "m",
        "gen_ai.usage.input_tokens": 3,
        "gen_ai.usage.output_tokens": 4,
        "http.request.method": "POST",
        "http.response.status_code": 200,
        "http.route": "/v1/chat/completions",
        "minisgl.request_id": "r-1",
    }
    assert span.status.status_code is StatusCode.UNSET
    assert span.start_time is not None
    assert span.end_time is not None
    assert 0 < span.end_time - span.start_time < 60e9
    assert span.resource.attributes["service.name"] == "minisgl"
    assert "secret" not in span.to_json()


@pytest.mark.parametrize(("flags", "recorded"), [("01", True), ("00", False)])
def test_parent_of_a_span(run_app: RunApp, flags: str, recorded: bool) -> None:
    """The span belongs to the client's trace, and is not recorded if the client did not sample the trace."""
    spans = spans_of(run_app, ({**BODY, "stream": True}, {"traceparent": f"00-{TRACE}-{PARENT}-{flags}"}))
    assert len(spans) == recorded
    for span in spans:
        assert span.name == "text_completion m"
        assert span.parent is not None
        assert f"{span.parent.trace_id:032x}" == f"{span.context.trace_id:032x}" == TRACE
        assert f"{span.parent.span_id:016x}" == PARENT


def test_unusable_parent_is_ignored(run_app: RunApp) -> None:
    (span,) = spans_of(run_app, (BODY, {"traceparent": "00-zz-1-01"}))
    assert span.parent is None


def test_span_of_a_failed_request(run_app: RunApp) -> None:
    full, stream = spans_of(run_app, (BODY, {}), ({**BODY, "stream": True}, {}), silent=True, request_timeout=1.0)
    assert full.status.status_code is stream.status.status_code is StatusCode.ERROR
    assert (full.attributes or {})["error.type"] == "504"
    assert (stream.attributes or {})["error.type"] == "aborted"
    assert "server.request_timeout" in (stream.status.description or "")


def test_service_name_of_the_environment(run_app: RunApp, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_SERVICE_NAME", "mine")
    monkeypatch.setenv("OTEL_RESOURCE_ATTRIBUTES", "deployment.environment=test")
    (span,) = spans_of(run_app, (BODY, {}))
    assert span.resource.attributes["service.name"] == "mine"
    assert span.resource.attributes["deployment.environment"] == "test"


def test_option_without_the_packages(monkeypatch: pytest.MonkeyPatch) -> None:
    check_tracing(None)
    check_tracing("http://localhost:4318")
    for module in [name for name in sys.modules if name.startswith("opentelemetry.exporter")]:
        monkeypatch.delitem(sys.modules, module)
    monkeypatch.setitem(sys.modules, "opentelemetry.exporter", None)
    with pytest.raises(ConfigError, match=r"server.otlp_endpoint=http://x: .* pip install 'minisgl\[otel\]'"):
        check_tracing("http://x")


@pytest.mark.parametrize("endpoint", ["", "localhost:4318", "http://", "http://a b", "ftp://x"])
def test_wrong_endpoint(endpoint: str) -> None:
    with pytest.raises(ConfigError, match=r"server\.otlp_endpoint"):
        Config(server=HttpConfig(otlp_endpoint=endpoint)).check()


class Collector(HTTPServer):
    """An OpenTelemetry collector that keeps the spans which it gets."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.names: list[str] = []
        threading.Thread(target=self.serve_forever, daemon=True).start()


class _Handler(BaseHTTPRequestHandler):
    def do_POST(self) -> None:
        assert isinstance(self.server, Collector)
        assert self.path == "/v1/traces"
        request = ExportTraceServiceRequest.FromString(self.rfile.read(int(self.headers["content-length"])))
        scopes = [scope for resource in request.resource_spans for scope in resource.scope_spans]
        self.server.names += [span.name for scope in scopes for span in scope.spans]
        self.send_response(200)
        self.send_header("content-length", "0")
        self.end_headers()

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002
        pass


def test_spans_reach_a_collector(tiny: Path) -> None:
    """The spans that are not sent yet are sent when the server ends."""
    collector = Collector()
    endpoint = f"server.otlp_endpoint=http://127.0.0.1:{collector.server_port}"
    with Server(f"model={tiny}", "num_pages=64", endpoint, "server.served_model_name=t") as server:
        httpx.post(f"{server.url}/v1/completions", json=BODY, timeout=60).raise_for_status()
        server.process.terminate()
        assert server.wait(patient_timeout(60)) == 0
    assert collector.names == ["text_completion t"]
    collector.shutdown()
    collector.server_close()


def test_slow_collector_does_not_delay_the_end() -> None:
    class Stuck(SpanProcessor):
        released = threading.Event()

        def shutdown(self) -> None:
            self.released.wait()

    tracer = Tracer(Stuck(), "m")
    tracer.close(0.01)
    assert not Stuck.released.is_set()
    Stuck.released.set()
