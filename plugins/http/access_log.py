"""The access log: a line for each HTTP request, when its response has ended."""

from __future__ import annotations

import logging
from typing import Any

from minisgl import hookimpl
from minisgl.config import Config
from minisgl.plugins.http.apis.outcome import finish_reasons, prompt_tokens
from minisgl.server.extension import HttpExtension
from minisgl.server.request_record import RequestRecord

access_log = logging.getLogger("minisgl.access")

_PROBES = frozenset({"/health", "/ready", "/metrics", "/get_load", "/v1/loads"})
"""Routes that other programs ask for every few seconds. They are logged at debug level if all is well."""
_IN_LINE = ("method", "path", "status", "seconds")
"""The fields that the line of the access log contains as text. A log of text lines does not repeat them."""


@hookimpl
def minisgl_http(config: Config) -> HttpExtension:
    return AccessLog()


class AccessLog(HttpExtension):
    """Writes the lines, with their fields."""

    def on_end(self, record: RequestRecord) -> None:
        quiet = record.route in _PROBES and record.status == 200
        level = logging.DEBUG if quiet else logging.INFO
        if access_log.isEnabledFor(level):
            line = f"{record.method} {record.path} {record.status or '-'} in {record.seconds:.3f} s"
            access_log.log(level, "%s", line, extra={"fields": _fields(record), "said": _IN_LINE})


def _fields(record: RequestRecord) -> dict[str, Any]:
    fields: dict[str, Any] = {
        "request_id": record.id,
        "client": record.client,
        "method": record.method,
        "path": record.path,
        "status": record.status,
        "seconds": round(record.seconds, 6),
    }
    if record.error:
        fields["error"] = record.error
    stream = record.stream
    if stream is not None:
        fields["uid"], fields["choices"] = stream.uids[0], len(stream.uids)
        fields["prompt_tokens"], fields["output_tokens"] = prompt_tokens(stream), stream.output_tokens
        fields["finish_reasons"] = sorted(set(finish_reasons(stream)))
        if stream.first_token is not None:
            fields["first_token_seconds"] = round(stream.first_token, 6)
    return fields
