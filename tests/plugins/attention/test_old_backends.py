"""Attention backends for minisgl 0.2, which do not derive from `AttentionBackend`."""

from __future__ import annotations

from pathlib import Path

import pytest

from minisgl import LLM, SamplingParams
from minisgl.config import ConfigError
from minisgl.options.compose import compose
from minisgl.plugin_manager.manager import PluginManager
from minisgl.testing.checkpoints import tiny_checkpoint

OLD = """
from dataclasses import dataclass
from minisgl.hooks import hookimpl
from minisgl.plugins.attention.paged import PagedAttention

PAGED = PagedAttention()

class OldBackend:
    def needs(self):
        return PAGED.needs()

    def bind(self, pool, layers, keys):
        self.pool = PAGED.pool = pool

    def plan(self, batch):
        PAGED.plan(batch)

    def forward(self, layer, q, out):
        return PAGED.forward(layer, q, out)

class OwnAttend(OldBackend):
    def attend(self, layer, q, k, v):
        raise NotImplementedError

@dataclass
class Old:
    own: bool = False

    def build(self):
        return OwnAttend() if self.own else OldBackend()

@hookimpl
def minisgl_configs():
    yield "attention", "old", Old
"""


def test_old_backend_computes_with_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """It gets `attend` and `norm_rope_store` from the base."""
    (tmp_path / "old.py").write_text(OLD)
    path = tiny_checkpoint("qwen3", tmp_path / "model")
    greedy = SamplingParams(max_tokens=6, temperature=0.0, ignore_eos=True)
    outputs = []
    for words in (["attention=paged"], [f"plugins={tmp_path / 'old.py'}", "attention=old"]):
        with LLM(str(path), overrides=["device=cpu", "num_pages=32", "cache=naive", *words]) as llm:
            outputs.append([answer.token_ids for answer in llm.generate([[5, 6, 7], [8] * 20], greedy)])
    assert outputs[0] == outputs[1]
    assert "attention=old: OldBackend has no method attend; derive OldBackend from AttentionBackend" in caplog.text


def test_own_method_attend_is_refused(tmp_path: Path) -> None:
    """A method `attend` with other arguments, as in the documentation of 0.2, is an error at the start."""
    (tmp_path / "old.py").write_text(OLD)
    manager = PluginManager.load([str(tmp_path / "old.py")])
    config = compose(manager, ["model=unused", "attention=old", "attention.own=true"])
    with pytest.raises(ConfigError, match=r"OwnAttend.attend\(layer, qkv, .* yours takes \(layer, q, k, v\)"):
        manager.build("attention", config.attention)
