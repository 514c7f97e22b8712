"""Numbers in the text of the chapters are equal to those that the code gives."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch

from minisgl import LLM, SamplingParams
from minisgl.course.ladder import stages
from minisgl.course.site.diagrams import mask
from minisgl.server.worker_process import PLUGIN_CALLS_INTERVAL_SECONDS

ROOT = Path(__file__).parents[2]


def test_tokens_computed_without_kv_cache() -> None:
    report = stages.count()
    text = (ROOT / "chapters/01_foundations/index.md").read_text()
    assert f"between {report['without_cache']:,} and {report['stages'][0]['computed']:,} tokens" in text


def test_worst_gap_of_the_first_policy() -> None:
    mine = ROOT / "chapters/00_start/mine.py"
    options = [f"plugins={mine}", "scheduler=mine"]
    before = stages.count(options, [6])["stages"][0]["worst_gap"]
    text = (ROOT / "chapters/00_start/index.md").read_text()
    assert f"worst gap fell from {before:,} tokens to 128" in text


def test_interval_of_plugin_call_counts() -> None:
    text = (ROOT / "chapters/00_start/index.md").read_text()
    assert PLUGIN_CALLS_INTERVAL_SECONDS == 1 / 4 and "report their counts four times a second" in text


def test_positions_that_paged_attention_reads() -> None:
    with LLM("tutor", overrides=["attention=paged", "graph=none", "device=cpu"]) as llm:
        prompts = [[length] * length for length in (30, 60, 90, 900)]
        llm.generate(prompts, SamplingParams(max_tokens=2, temperature=0.0, ignore_eos=True))
        engine: Any = llm.engine
        layers, backend = len(engine.model.layers), engine.attention
    text = (ROOT / "chapters/04_attention/index.md").read_text()
    assert f"4 · 900 + 4 · 901 | {backend.positions_padded // layers:,} |" in text
    assert f"1,080 + 1,084 | {backend.positions_read // layers:,} |" in text


def test_masks_fit_on_a_phone() -> None:
    """The picture with the wrong and the correct mask is at most 360 pixels wide."""
    found = re.search(r' width="(\d+)"', mask())
    assert found is not None and int(found[1]) <= 360


def test_experts_of_each_subject() -> None:
    pytest.importorskip("transformers")
    from tokenizers import Tokenizer
    from transformers import AutoModelForCausalLM

    from minisgl.course.tutor import experts
    from minisgl.models.shipped import weights_dir

    folder = weights_dir("tutor-moe")
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    last = {
        subject: experts.use(model, experts.samples(subject, 3, tokenizer))[5]
        for subject in ("sum", "glossary", "drill")
    }
    assert last["sum"][[0, 5]].sum() > 0.5
    assert last["glossary"][[6, 3]].sum() > 0.5
    assert 0.22 < last["glossary"][3] < 0.25
    assert max(last["sum"][3], last["drill"][3]) <= 0.125
