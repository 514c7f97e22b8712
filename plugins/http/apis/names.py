"""The names that a client has for parameters, where the core has others: errors use the client's."""

from __future__ import annotations

import re
from collections.abc import Mapping
from types import MappingProxyType

from minisgl.server.errors import ApiError

NO_NAMES: Mapping[str, str] = MappingProxyType({})


def renamed(error: ApiError, names: Mapping[str, str]) -> ApiError:
    """Return an error about a request with the client's names. ``names``: field of the core → parameter of the client.

    A chat request has ``messages``, which the core calls ``prompt``, and may have ``max_completion_tokens``. In the
    message, only a name with an underscore is replaced: ``prompt`` is also a word. A failure of the server stays.
    """
    if error.status >= 500 or not names:
        return error
    message = error.message
    for inner, name in names.items():
        if "_" in inner:
            message = re.sub(rf"\b{inner}\b", name, message)
    return ApiError(error.status, message, names.get(error.param or "", error.param), error.code, error.headers)
