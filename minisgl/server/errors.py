"""Errors as the OpenAI API shapes them: ``{"error": {"message", "type", "param", "code"}}`` with an HTTP status."""

from __future__ import annotations

from typing import Any

from minisgl.core import Finished, InvalidRequestError


class ApiError(Exception):
    """A request that gets an error for an answer. ``param`` names the parameter that was wrong, if one was."""

    def __init__(self, status: int, message: str, param: str | None = None, code: str | None = None):
        super().__init__(message)
        self.status, self.message, self.param, self.code = status, message, param, code

    @property
    def body(self) -> dict[str, Any]:
        """The error object."""
        kind = "invalid_request_error" if self.status < 500 else "server_error"
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}

    @staticmethod
    def of(refused: InvalidRequestError) -> ApiError:
        """What a client hears of a refusal."""
        return ApiError(400, refused.message, refused.field or None, refused.code)

    @staticmethod
    def ended(end: Finished, names: dict[str, str] | None = None) -> ApiError:
        """What a client hears of a request that ended with an error; ``names`` maps fields to its own parameters."""
        field = (names or {}).get(end.field, end.field)
        if end.status >= 500:
            return ApiError(end.status, end.error or "The request failed.")
        return ApiError(end.status, end.error, field or None, end.code or "invalid_value")


def refusal(uid: int, refused: InvalidRequestError) -> Finished:
    """The end of a request that was refused: what the processes behind the API server reply."""
    return Finished(uid, "error", error=refused.message, status=400, field=refused.field, code=refused.code)
