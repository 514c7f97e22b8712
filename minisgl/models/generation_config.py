"""What the files of a checkpoint say about generation: the ends of an answer, and the default sampling parameters.

This module reads ``generation_config.json`` and ``config.json``. It imports no torch, so that the API server can use
it. The end-of-sequence token of the tokenizer is known to `minisgl.tokenizer`.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import msgspec

from minisgl.config import Config, ConfigError
from minisgl.core import InvalidRequestError, SamplingParams
from minisgl.utils.json_file import read_json_if_present

__all__ = ["SAMPLING_FIELDS", "default_sampling_params", "eos_ids"]

FILE = "generation_config.json"
SAMPLING_FIELDS: Mapping[str, str] = MappingProxyType(
    {
        "temperature": "temperature",
        "top_k": "top_k",
        "top_p": "top_p",
        "min_p": "min_p",
        "repetition_penalty": "repetition_penalty",
        "max_new_tokens": "max_tokens",
    }
)
"""The fields of generation_config.json that are applied, as in vLLM: name → field of `SamplingParams`."""


def eos_ids(path: Path) -> frozenset[int]:
    """Return the end-of-sequence token ids of generation_config.json and of config.json together, as in SGLang.

    ``path`` is a model's directory or a config file. In each file, ``eos_token_id`` is an id, a list of ids, or null.
    Raise `ConfigError` for another value.
    """
    found: set[int] = set()
    for file in (path / FILE, path / "config.json") if path.is_dir() else (path,):
        value = read_json_if_present(file).get("eos_token_id")
        ids = value if isinstance(value, list) else [] if value is None else [value]
        for token in ids:
            # transformers writes -1 for a model without an end-of-sequence token
            if not isinstance(token, int) or isinstance(token, bool) or not -1 <= token < 2**31:
                raise ConfigError(f"{file}: eos_token_id must be a token id, a list of them or null, got {value!r}.")
        found.update(token for token in ids if token >= 0)
    return frozenset(found)


def default_sampling_params(config: Config, path: Path) -> dict[str, Any]:
    """Return the sampling parameters that generation_config.json in a model's directory recommends, by field name.

    The names are those of `SamplingParams`. The result is empty with ``generation_config=none``. Raise `ConfigError`
    for a value that a request could not have either.
    """
    if config.generation_config == "none":
        return {}
    file = path / FILE
    raw = read_json_if_present(file)
    given = {field: raw[name] for name, field in SAMPLING_FIELDS.items() if raw.get(name) is not None}
    try:
        params = SamplingParams(**given)
        params.check()
    except InvalidRequestError as error:
        names = {field: name for name, field in SAMPLING_FIELDS.items()}
        name = names.get(error.field, error.field)
        raise ConfigError(
            f"{file}: {name}={given.get(error.field)!r}: {error.message} Change the file, or start with "
            "generation_config=none."
        ) from None
    return {field: getattr(params, field) for field in given}


def with_defaults(defaults: Mapping[str, Any]) -> SamplingParams:
    """Return the sampling parameters of a request that sets none, for the result of `default_sampling_params`."""
    return msgspec.structs.replace(SamplingParams(), **defaults)
