"""OLMo 3 in parts of two and four ranks: the norms of whole projections count each head once."""

from __future__ import annotations

from minisgl.plugins.models.olmo3 import Olmo3ForCausalLM
from minisgl.testing.model import ModelConformance


class TestOlmo3(ModelConformance):
    architecture = "olmo3"
    ranks = (2, 4)  # with four ranks, each of the two KV heads is on two ranks

    def make(self) -> type:
        """Return the model class to test."""
        return Olmo3ForCausalLM
