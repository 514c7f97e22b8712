"""Errors in the OpenAI API's format: ``{"error": {"message", "type", "param", "code"}}`` with an HTTP status."""

from __future__ import annotations

import re
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from minisgl.core import Finished, InvalidRequestError

CLIENT_CLOSED_REQUEST = 499
"""The HTTP status of a response whose client has disconnected. No client receives it; only ``/metrics`` counts it."""


NO_NAMES: Mapping[str, str] = MappingProxyType({})


class ApiError(Exception):
    """An error response to an HTTP request. ``param`` is the name of the wrong parameter, or None.

    ``headers`` are headers of the response.
    """

    def __init__(
        self,
        status: int,
        message: str,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] = MappingProxyType({}),
    ):
        super().__init__(message)
        self.status, self.message, self.param, self.code, self.headers = status, message, param, code, headers

    @property
    def body(self) -> dict[str, Any]:
        """The response body: an OpenAI error object."""
        kind = "invalid_request_error" if self.status < 500 else "server_error"
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}

    @staticmethod
    def from_invalid(error: InvalidRequestError, names: Mapping[str, str] = NO_NAMES) -> ApiError:
        """Return the error response (400) for an invalid request. ``names`` are those of `from_finished`."""
        return ApiError(400, *_named(error.message, error.field, names), error.code)

    @staticmethod
    def from_finished(end: Finished, names: Mapping[str, str] = NO_NAMES) -> ApiError:
        """Return the error response for a request that ended with an error.

        ``names`` maps a field of `Finished` to the parameter that the client used for it, where the names differ: a
        chat request has ``messages``, which `Finished` calls ``prompt``, and may have ``max_completion_tokens``.
        """
        if end.status >= 500:
            return ApiError(end.status, end.error or "The request failed.")
        return ApiError(end.status, *_named(end.error, end.field, names), end.code or "invalid_value")


def _named(message: str, field: str, names: Mapping[str, str]) -> tuple[str, str | None]:
    """Return the message of an error and its field, with the client's name of each field.

    In the message, only a name with an underscore is replaced: ``prompt`` is also a word.
    """
    for inner, name in names.items():
        if "_" in inner:
            message = re.sub(rf"\b{inner}\b", name, message)
    return message, names.get(field, field) or None


def timed_out(seconds: float | None) -> ApiError:
    """Return the error response (504) for a request that took longer than ``server.request_timeout``, ``seconds``."""
    return ApiError(504, f"The request took longer than {seconds or 0:g} s (server.request_timeout).")
