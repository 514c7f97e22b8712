"""What generation_config.json says: the ends of an answer, and the default sampling parameters."""

from __future__ import annotations

import json
import logging
import math
from pathlib import Path
from typing import Any

import pytest

from minisgl import LLM
from minisgl.config import Config, ConfigError
from minisgl.core import SamplingParams
from minisgl.models.generation_config import default_sampling_params, eos_ids, with_defaults
from minisgl.plugins.models.generation_log import NOT_APPLIED, log_defaults
from minisgl.testing.checkpoints import tiny_checkpoint

QWEN3 = {"do_sample": True, "temperature": 0.6, "top_k": 20, "top_p": 0.95, "eos_token_id": [1, 2], "pad_token_id": 1}


def write(folder: Path, generation: Any, config: Any = None) -> Path:
    (folder / "config.json").write_text(json.dumps({} if config is None else config))
    if generation is not None:
        (folder / "generation_config.json").write_text(json.dumps(generation))
    return folder


@pytest.mark.parametrize(
    ("generation", "config", "expected"),
    [
        ([1, 2], 3, {1, 2, 3}), (5, 3, {3, 5}), (None, 3, {3}), (None, [3, 4], {3, 4}), (None, None, set()),
        ([], [3, 4], {3, 4}), ([], None, set()), (0, None, {0}), (-1, 3, {3}), ([7, 7], 7, {7}),
    ],
)  # fmt: skip
def test_eos_ids(tmp_path: Path, generation: Any, config: Any, expected: set[int]) -> None:
    """The ids of both files count. A list without ids hides none of the other file."""
    write(tmp_path, {"eos_token_id": generation}, {"eos_token_id": config})
    assert eos_ids(tmp_path) == expected


def test_eos_ids_without_files(tmp_path: Path) -> None:
    assert eos_ids(write(tmp_path, None)) == set()
    shape = tmp_path / "shape.json"
    shape.write_text('{"eos_token_id": 9}')
    assert eos_ids(shape) == {9}


@pytest.mark.parametrize("value", ["</s>", 1.5, True, [1, "2"], [[1]], {"a": 1}, 2**31, -2])
@pytest.mark.parametrize("file", ["generation_config.json", "config.json"])
def test_wrong_eos_ids(tmp_path: Path, value: Any, file: str) -> None:
    write(tmp_path, {})
    (tmp_path / file).write_text(json.dumps({"eos_token_id": value}))
    with pytest.raises(ConfigError, match=rf"/{file}: eos_token_id must be"):
        eos_ids(tmp_path)


def test_default_sampling_params(tmp_path: Path) -> None:
    write(tmp_path, {**QWEN3, "min_p": None, "repetition_penalty": 1.05, "max_new_tokens": 2048})
    defaults = default_sampling_params(Config(), tmp_path)
    assert defaults == {
        "temperature": 0.6, "top_k": 20, "top_p": 0.95, "repetition_penalty": 1.05, "max_tokens": 2048,
    }  # fmt: skip
    assert with_defaults(defaults) == SamplingParams(
        temperature=0.6, top_k=20, top_p=0.95, repetition_penalty=1.05, max_tokens=2048
    )
    assert default_sampling_params(Config(generation_config="none"), tmp_path) == {}
    assert default_sampling_params(Config(), tmp_path / "shape.json") == {}


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("temperature", -0.1), ("temperature", "0.6"), ("temperature", math.nan), ("temperature", math.inf),
        ("temperature", True), ("temperature", 10**400), ("top_k", -2), ("top_k", 1.5), ("top_k", 2**40),
        ("top_p", 0), ("top_p", 1.1), ("top_p", [0.9]), ("min_p", 2), ("repetition_penalty", 0), ("max_new_tokens", 0),
        ("max_new_tokens", 2**31),
    ],
)  # fmt: skip
def test_wrong_values(tmp_path: Path, name: str, value: Any) -> None:
    write(tmp_path, {name: value})
    with pytest.raises(ConfigError, match=rf"generation_config\.json: {name}=.*generation_config=none"):
        default_sampling_params(Config(), tmp_path)
    assert default_sampling_params(Config(generation_config="none"), tmp_path) == {}


@pytest.mark.parametrize("content", ["[]", "{", "\udc80", "[" * 100_000])
def test_a_broken_file(tmp_path: Path, content: str) -> None:
    (tmp_path / "generation_config.json").write_bytes(content.encode(errors="surrogateescape"))
    with pytest.raises(ConfigError, match=r"generation_config\.json"):
        default_sampling_params(Config(), tmp_path)


def test_the_log_names_what_is_applied_and_what_is_not(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    odd = {"no_repeat_ngram_size": 3, "suppress_tokens": [5], "typical_p": 1.0, "num_beams": 1}
    path = write(tmp_path, {**QWEN3, **odd})
    with caplog.at_level(logging.INFO):
        log_defaults(Config(), path, default_sampling_params(Config(), path))
    applied, ignored = caplog.messages
    assert "temperature=0.6, top_k=20, top_p=0.95 (generation_config=none turns them off)" in applied
    assert ignored.endswith("does not support it: no_repeat_ngram_size=3, suppress_tokens=[5]")
    caplog.clear()
    log_defaults(Config(generation_config="none"), path, {})
    assert caplog.messages == []


def test_an_engine_logs_it_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tiny_checkpoint("qwen3", tmp_path)
    (path / "generation_config.json").write_text(json.dumps({"temperature": 0.6, "num_beams": 2}))
    with LLM(str(path), overrides=["device=cpu", "num_pages=8"]):
        assert caplog.text.count("does not support it: num_beams=2") == 1


def test_no_log_without_values(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = write(tmp_path, {name: value for name, values in NOT_APPLIED.items() for value in (None, *values)})
    log_defaults(Config(), path, {})
    assert caplog.messages == []
