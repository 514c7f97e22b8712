"""What the log says about a model's generation_config.json: the defaults that it sets, and what has no effect here."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

from minisgl.config import Config
from minisgl.hooks import hookimpl
from minisgl.models.generation_config import default_sampling_params
from minisgl.models.resolve import resolve_model
from minisgl.utils.json_file import read_json_if_present

log = logging.getLogger(__name__)

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


@hookimpl
def minisgl_observer(config: Config) -> None:
    """Log it once, in rank 0's process. There is nothing to observe."""
    path = resolve_model(config.model)
    log_defaults(config, path, default_sampling_params(config, path))


def log_defaults(config: Config, path: Path, defaults: Mapping[str, Any]) -> None:
    """Log the default sampling parameters, and a warning that names the fields that have no effect here."""
    if config.generation_config == "none":
        return
    file = path / "generation_config.json"
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
