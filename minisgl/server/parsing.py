"""`parse` reads a request's body as a struct: errors name the parameter that is wrong, unknown or missing.

This module knows nothing about the parameters of a kind of body.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any, TypeVar

import msgspec

from minisgl.sampling_params import shorten
from minisgl.server.errors import ApiError

S = TypeVar("S", bound=msgspec.Struct)
T = TypeVar("T")
fields_of = cache(msgspec.structs.fields)  # reads annotations, which takes 0.4 ms each time


def parse(body: bytes, kind: type[S], checks: Sequence[Callable[[type, dict[str, msgspec.Raw]], None]] = ()) -> S:
    """Return a request's body as a struct of type ``kind``. Raise `ApiError` (400) for a wrong parameter or bad JSON.

    A parameter with the value null is treated as a missing parameter, and a byte order mark is ignored (RFC 8259). Each
    of ``checks`` gets ``kind`` and the parameters, not decoded yet: it may refuse, change and remove them
    (`HttpExtension.check_fields`).
    """
    encoded = _decode(body.removeprefix(b"\xef\xbb\xbf"), dict[str, msgspec.Raw])
    for check in checks:
        check(kind, encoded)
    fields = {name: raw for name, raw in encoded.items() if bytes(memoryview(raw)[:5]) != b"null"}
    known = {field.name: field for field in fields_of(kind)}
    for name in fields:
        if name not in known:
            raise unknown_parameter(name)
    for name, field in known.items():
        if field.required and name not in fields:
            raise ApiError(400, f"The parameter {name} is missing.", name, "missing_required_parameter")
    return _decode(msgspec.json.encode(fields), kind)


def _decode(data: bytes, kind: type[T]) -> T:
    try:
        return msgspec.json.decode(data, type=kind)
    except msgspec.ValidationError as error:
        raise _wrong(error) from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ApiError(400, f"The body is not valid JSON: {error}") from None
    except RecursionError:
        raise ApiError(400, "The body has too many nested lists and objects.", code="invalid_value") from None


def unknown_parameter(name: str) -> ApiError:
    name = shorten(name)
    return ApiError(400, f"Unrecognized request argument supplied: {name}", name, "unknown_parameter")


def convert(fields: dict[str, Any], kind: type[S], prefix: str = "") -> S:
    """Return the fields as a struct of type ``kind``. Raise `ApiError` with the path of the wrong field.

    ``prefix`` is the path of the struct itself, such as ``messages[0]``.
    """
    try:
        return msgspec.convert(fields, kind)
    except msgspec.ValidationError as error:
        raise _wrong(error, prefix) from None


def _wrong(error: msgspec.ValidationError, prefix: str = "") -> ApiError:
    """Return the error for a value of a wrong type or range, or for a field that is unknown or missing."""
    what, _, path = str(error).partition(" - at `$")
    path = path.removeprefix(".").rstrip("`")
    named = re.search(r"(?:unknown|required) field `(.+)`", what)
    full_path = ".".join(part for part in (prefix, path, named[1] if named else "") if part)
    param = re.split(r"[.\[]", full_path)[0] or None
    if named:  # the field's name is in the path
        what = "Missing required field" if named[0].startswith("required") else "Unknown field"
    message = f"{shorten(full_path)}: {what}." if full_path else f"{what}."
    return ApiError(400, message, param and shorten(param), "invalid_type")
