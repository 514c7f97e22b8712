"""`speculation=none`: no drafts. Every decode row computes one token."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from minisgl.core import Req
from minisgl.hooks import hookimpl
from minisgl.plugins.speculation import DraftProposer


@dataclass
class NoSpeculation:
    """No drafts: every decode row computes one token."""

    def build(self) -> NoProposer:
        return NoProposer()


class NoProposer(DraftProposer):
    """Proposes nothing, so the scheduler never asks it."""

    max_drafts = 0

    def propose(self, reqs: Sequence[Req], positions: Sequence[int], limits: Sequence[int]) -> Sequence[Sequence[int]]:
        return [()] * len(reqs)


@hookimpl
def minisgl_configs() -> Any:
    yield "speculation", "none", NoSpeculation
