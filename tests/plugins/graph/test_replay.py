"""Tests of graph=replay: tokens, counts of replays and padding rows, and the conformance kit of graph runners."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch

from minisgl import LLM, SamplingParams
from minisgl.attention import GraphKey
from minisgl.plugins.graph.replay import Buffers, Replay, ReplayRunner
from minisgl.plugins.graph.simulated import Simulated, SimulatedRunner
from minisgl.testing.graph import GraphConformance, GraphFault, GraphRig

CPU = torch.device("cpu")
PROMPTS = ["Count from 5 to 9.", "What is a radix cache?", "What is 12 + 30?"]


class TestReplay(GraphConformance):
    """The kit of graph runners applied to graph=replay."""

    def make(self) -> ReplayRunner:
        return ReplayRunner(Replay(), CPU)


class TestReplayWithFewRows(GraphConformance):
    """The kit of graph runners applied to graph=replay with a small ``max_rows``."""

    def make(self) -> ReplayRunner:
        return ReplayRunner(Replay(max_rows=5), CPU)


class TestSimulated(GraphConformance):
    """The kit of graph runners applied to graph=simulated."""

    def make(self) -> SimulatedRunner:
        return SimulatedRunner(Simulated())


def generate(*overrides: str, tokens: int = 9) -> tuple[list[Sequence[int]], Any]:
    """Generate tokens for ``PROMPTS``. Return them, and (graph runner, operations of each recording, metrics)."""
    params = SamplingParams(max_tokens=tokens, temperature=0.0, ignore_eos=True)
    words = ["attention=torch", "device=cpu", "num_pages=64", "max_running_requests=4", *overrides]
    with LLM("tutor", overrides=words) as llm:
        tokens_of = [output.token_ids for output in llm.generate(PROMPTS, params)]
        graph: Any = llm.engine.graph  # type: ignore[attr-defined]
        operations = {len(recording.operations) for recording in getattr(graph, "recordings", {}).values()}
        return tokens_of, (graph, operations, llm.plugin_manager.hook.minisgl_metrics())


@pytest.mark.parametrize("overlap", ["true", "false"])
def test_in_the_engine(overlap: str) -> None:
    """graph=replay gives the same tokens as graph=none, and replays each decode step once.

    After one prefill step, which is not replayed, three requests decode 8 steps in a bucket of four rows.
    """
    plain, _ = generate("graph=none", f"overlap={overlap}")
    replayed, (graph, operations, metrics) = generate("graph=replay", f"overlap={overlap}")
    assert replayed == plain
    assert (graph.replays, graph.padded_rows) == (8, 8)
    assert "minisgl_graph_replays_total 8\n" in "".join(metrics)
    assert len(operations) == 1
    assert min(operations) > 100  # more where norms and activations are several operations of PyTorch


def test_buckets() -> None:
    """The buckets of graph=replay are powers of two, and the largest number of rows."""
    assert TestReplay().make().buckets(6) == [GraphKey(n) for n in (1, 2, 4, 6)]
    assert TestReplay().make().buckets(1) == [GraphKey(1)]
    assert ReplayRunner(Replay(max_rows=4), CPU).buckets(100) == [GraphKey(n) for n in (1, 2, 4)]


# ---- the kit finds faulty runners --------------------------------------------------------------------------


class _Rebound(Buffers):
    def fill(self, packed: Any) -> Any:
        self.packed = self.packed.clone()
        return super().fill(packed)


class _PageZero(Buffers):
    def padding(self) -> Any:
        column = super().padding()
        column[2] = 0
        return column


class _StaleLengths(Buffers):
    def fill(self, packed: Any) -> Any:
        before = self.packed[4].clone()
        batch = super().fill(packed)
        if packed is not None:
            self.packed[4, packed.shape[1] :] = before[packed.shape[1] :]
        return batch


def _runner(buffers: type[Buffers] = Buffers, **patches: Any) -> ReplayRunner:
    kind = type("Wrong", (ReplayRunner,), patches)
    runner: ReplayRunner = kind(Replay(), CPU)
    runner.input_buffers = buffers  # type: ignore[method-assign,assignment]
    return runner


WRONG: dict[str, tuple[Any, str]] = {
    "a buffer is replaced": (lambda: _runner(_Rebound), "rebound"),
    "padding writes to page 0": (lambda: _runner(_PageZero), "padding-page"),
    "sequence lengths of a larger step stay": (lambda: _runner(_StaleLengths), "stale"),
    "not the smallest bucket": (
        lambda: _runner(bucket=lambda self, rows: max((k for k in self.recordings if k.rows >= rows), default=None)),
        "pick",
    ),
    "buckets in decreasing order": (lambda: _runner(sizes=lambda self, max_rows: [max_rows, 1]), "buckets"),
    "a bucket that is too large": (lambda: _runner(sizes=lambda self, max_rows: [1, max_rows + 1]), "buckets"),
}


@pytest.mark.parametrize("fault", WRONG)
def test_rig_names_the_rule(fault: str) -> None:
    """`GraphRig` raises a `GraphFault` with the rule that a faulty runner breaks."""
    make, rule = WRONG[fault]
    with pytest.raises(GraphFault) as caught:
        GraphRig(make(), 6).run([6, 6, 5, 1, 3, 6, 2])
    assert caught.value.rule == rule
