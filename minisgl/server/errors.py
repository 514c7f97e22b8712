"""Errors in the OpenAI API's format: ``{"error": {"message", "type", "param", "code"}}`` with an HTTP status."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from minisgl.core import Finished, InvalidRequestError

CLIENT_CLOSED_REQUEST = 499
"""The HTTP status of a response whose client has disconnected. No client receives it; only ``/metrics`` counts it."""


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
    def from_invalid(error: InvalidRequestError) -> ApiError:
        """Return the error response (400) for an invalid request."""
        return ApiError(400, error.message, error.field or None, error.code)

    @staticmethod
    def from_finished(end: Finished) -> ApiError:
        """Return the error response for a request that ended with an error."""
        if end.status >= 500:
            return ApiError(end.status, end.error or "The request failed.")
        return ApiError(end.status, end.error, end.field or None, end.code or "invalid_value")


def timed_out(seconds: float | None) -> ApiError:
    """Return the error response (504) for a request that took longer than ``server.request_timeout``, ``seconds``."""
    return ApiError(504, f"The request took longer than {seconds or 0:g} s (server.request_timeout).")
