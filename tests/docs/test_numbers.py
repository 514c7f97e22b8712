"""Numbers that stand in a chapter's prose are those that the code counts today."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch

from minisgl import LLM, SamplingParams
from minisgl.course.ladder import stages
from minisgl.course.site.diagrams import mask
from minisgl.server.child import CALLS_SECONDS

ROOT = Path(__file__).parents[2]


def test_what_the_kv_cache_spares() -> None:
    counted = stages.count()
    text = (ROOT / "chapters/01_foundations/index.md").read_text()
    assert f"between {counted['without_cache']:,} and {counted['stages'][0]['computed']:,} tokens" in text


def test_what_one_line_of_the_first_policy_buys() -> None:
    mine = ROOT / "chapters/00_start/mine.py"
    words = [f"plugins={mine}", "scheduler=mine"]
    before = stages.count(words, [6])["stages"][0]["worst_gap"]
    text = (ROOT / "chapters/00_start/index.md").read_text()
    assert f"worst gap fell from {before:,} tokens to 128" in text


def test_how_late_counts_of_calls_may_be() -> None:
    text = (ROOT / "chapters/00_start/index.md").read_text()
    assert CALLS_SECONDS == 1 / 4 and "tell what they counted four times a second" in text


def test_what_paged_attention_reads() -> None:
    with LLM("tutor", overrides=["attention=paged", "graph=none", "device=cpu"]) as llm:
        prompts = [[length] * length for length in (30, 60, 90, 900)]
        llm.generate(prompts, SamplingParams(max_tokens=2, temperature=0.0, ignore_eos=True))
        engine: Any = llm.engine
        layers, backend = len(engine.model.layers), engine.attention
    text = (ROOT / "chapters/04_attention/index.md").read_text()
    assert f"4 · 900 + 4 · 901 | {backend.positions_padded // layers:,} |" in text
    assert f"1,080 + 1,084 | {backend.positions_read // layers:,} |" in text


def test_the_wrong_mask_and_the_right_one_are_seen_together_on_a_phone() -> None:
    found = re.search(r' width="(\d+)"', mask())
    assert found is not None and int(found[1]) <= 360


def test_which_experts_the_subjects_choose() -> None:
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
