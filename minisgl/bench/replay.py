"""``python -m minisgl.bench replay``: plays a trace of real requests against an OpenAI-compatible server.

Requests arrive as in the trace, or faster or slower by a factor. The trace gives the lengths of prompts and outputs,
and which requests begin with the same tokens.
"""

from __future__ import annotations

from collections.abc import Sequence

from minisgl.bench.loadgen.options import ReplayOptions
from minisgl.bench.online import run


def main(argv: Sequence[str]) -> None:
    run("replay", __doc__ or "", ReplayOptions, argv)
