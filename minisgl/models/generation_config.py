"""What the files of a checkpoint say about generation: the ends of an answer, and the default sampling parameters.

This module reads ``generation_config.json`` and ``config.json``. It imports no torch, so that the API server can use
it. The end-of-sequence token of the tokenizer is known to `minisgl.tokenizer`.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import msgspec

from minisgl.config import Config, ConfigError
from minisgl.core import InvalidRequestError, SamplingParams
from minisgl.utils.json_file import read_json_if_present

__all__ = ["SAMPLING_FIELDS", "default_sampling_params", "eos_ids", "log_defaults"]

log = logging.getLogger(__name__)

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
NOT_APPLIED: Mapping[str, tuple[Any, ...]] = MappingProxyType(
    {
        "bad_words_ids": ([],),
        "begin_suppress_tokens": ([],),
        "constraints": ([],),
        "diversity_penalty": (0,),
        "do_sample": (True,),
        "dola_layers": (),
        "encoder_no_repeat_ngram_size": (0,),
        "encoder_repetition_penalty": (1,),
        "epsilon_cutoff": (0,),
        "eta_cutoff": (0,),
        "exponential_decay_length_penalty": (),
        "force_words_ids": ([],),
        "forced_bos_token_id": (),
        "forced_decoder_ids": ([],),
        "forced_eos_token_id": (),
        "guidance_scale": (1,),
        "max_time": (),
        "min_length": (0,),
        "min_new_tokens": (0,),
        "no_repeat_ngram_size": (0,),
        "num_beam_groups": (1,),
        "num_beams": (1,),
        "num_return_sequences": (1,),
        "penalty_alpha": (0,),
        "sequence_bias": ({}, []),
        "stop_strings": ([], ""),
        "suppress_tokens": ([],),
        "token_healing": (False,),
        "top_h": (),
        "typical_p": (1,),
        "watermarking_config": ({},),
    }
)
"""Fields that change the tokens in transformers, but not here: name → the values, besides null, without an effect."""


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


def log_defaults(config: Config, path: Path, defaults: Mapping[str, Any]) -> None:
    """Log the default sampling parameters, and a warning that names the fields that have no effect here."""
    if config.generation_config == "none":
        return
    file = path / FILE
    if defaults:
        given = ", ".join(f"{name}={value}" for name, value in defaults.items())
        log.info("default sampling parameters from %s: %s (generation_config=none turns them off)", file, given)
    raw = read_json_if_present(file)
    ignored = [
        f"{name}={value!r:.100}"
        for name, value in raw.items()
        if name in NOT_APPLIED and value is not None and not any(value == same for same in NOT_APPLIED[name])
    ]
    if ignored:
        log.warning("%s: not applied, because minisgl does not support it: %s", file, ", ".join(ignored))


def with_defaults(defaults: Mapping[str, Any]) -> SamplingParams:
    """Return the sampling parameters of a request that sets none, for the result of `default_sampling_params`."""
    return msgspec.structs.replace(SamplingParams(), **defaults)
