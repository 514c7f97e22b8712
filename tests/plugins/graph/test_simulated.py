"""Tests of graph=simulated in the engine: tokens, counts of replays and padding rows, and errors that name the rule."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from minisgl import LLM, SamplingParams
from minisgl.attention import GraphKey
from minisgl.config import ConfigError
from minisgl.plugins.graph.cuda import CudaGraph, CudaGraphRunner
from minisgl.plugins.graph.replaying import piecewise
from minisgl.plugins.graph.simulated import Simulated, SimulatedRunner
from minisgl.testing.checkpoints import tiny_checkpoint

PROMPTS = [[5, 6, 7], [9, 8, 7, 6, 5] * 4, [3] * 30, [4], list(range(3, 50))]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_checkpoint("qwen3", tmp_path_factory.mktemp("qwen3"))


def generate(model: Path, params: SamplingParams, *overrides: str) -> tuple[list[list[int]], Any]:
    """Generate tokens for ``PROMPTS``. Return them, and (operations, replays, padded rows) of graph=simulated."""
    words = ["attention=torch", "moe=torch", "device=cpu", "num_pages=64", "max_running_requests=4", *overrides]
    with LLM(str(model), overrides=words) as llm:
        outputs = llm.generate(PROMPTS, params)
        graph = getattr(llm.engine, "graph", None)
        counts = (graph.operations, graph.replays, graph.padded_rows) if isinstance(graph, SimulatedRunner) else None
        return [list(output.token_ids) for output in outputs], counts


@pytest.mark.parametrize("cache", ["radix", "naive"])
@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(max_tokens=9, temperature=0.0, ignore_eos=True),
        SamplingParams(max_tokens=9, temperature=1.0, top_k=20, seed=7, ignore_eos=True),
    ],
    ids=["greedy", "sampled"],
)
def test_tokens_equal_without_graphs(checkpoint: Path, params: SamplingParams, cache: str) -> None:
    """Tokens with graph=simulated equal those with graph=none, for greedy and random sampling."""
    plain, _ = generate(checkpoint, params, "graph=none", f"cache={cache}")
    replayed, counts = generate(checkpoint, params, "graph=simulated", f"cache={cache}")
    assert replayed == plain
    operations, replays, _ = counts
    assert set(operations) == {GraphKey(1), GraphKey(2), GraphKey(4)}
    assert len(set(operations.values())) == 1
    assert replays > 0


def test_counts(checkpoint: Path) -> None:
    """graph=simulated replays each decode step once, and counts the padding rows.

    After one prefill step, which is not replayed, three requests decode 8 steps in a bucket of four rows.
    """
    words = ["attention=torch", "device=cpu", "num_pages=64", "max_running_requests=4", "graph=simulated"]
    with LLM(str(checkpoint), overrides=words) as llm:
        llm.generate(PROMPTS[:3], SamplingParams(max_tokens=9, temperature=0.0, ignore_eos=True))
        graph: Any = llm.engine.graph  # type: ignore[attr-defined]
        assert graph.replays == 8
        assert graph.padded_rows == 8


PROMPT_WORDS = [
    [],
    ["scheduler=mixed", "max_prefill_tokens=16"],
    ["cache=radix", "page_size=4", "num_pages=100"],
    ["graph.max_rows=1"],  # decode steps of more rows are replayed in pieces too
]


@pytest.mark.parametrize("words", PROMPT_WORDS, ids=" ".join)
def test_piecewise_replay(checkpoint: Path, words: list[str]) -> None:
    """With graph.max_tokens, steps with prompts are replayed in pieces and give the same tokens as with graph=none."""
    params = SamplingParams(max_tokens=9, temperature=0.0, ignore_eos=True)
    plain, _ = generate(checkpoint, params, "graph=none", *(word for word in words if "graph" not in word))
    replayed, counts = generate(checkpoint, params, "graph=simulated", "graph.max_tokens=40", *words)
    assert replayed == plain
    operations, replays, _ = counts
    pieces = [key.rows for key in operations if key.piecewise]
    assert pieces == ([16] if "max_prefill_tokens=16" in words else [16, 32, 40])
    assert replays > 0


KEEPS = """
from minisgl import hookimpl
from minisgl.plugins.models.qwen3 import Qwen3ForCausalLM

class KeepsAttention:
    def __init__(self, ctx):
        self.ctx, self.attention = ctx, ctx.attention
    def __getattr__(self, name):
        return getattr(self.ctx, name)

class Qwen3Keeps(Qwen3ForCausalLM):
    def __init__(self, config, ctx):
        super().__init__(config, KeepsAttention(ctx))

@hookimpl
def minisgl_models():
    return {"Qwen3Keeps": Qwen3Keeps}
"""


def test_model_that_keeps_the_backend(checkpoint: Path, tmp_path: Path) -> None:
    """Attention is not recorded in pieces, even if the model keeps a reference to the backend of its construction.

    On a GPU, attention recorded in a piece would read the rows of the recording in every replay.
    """
    (tmp_path / "keeps.py").write_text(KEEPS)
    words = ["device=cpu", "num_pages=64", "max_running_requests=4", "graph=simulated", "graph.max_tokens=40"]
    words += [f"plugins={tmp_path / 'keeps.py'}", "architecture=Qwen3Keeps"]
    with LLM(str(checkpoint), overrides=words) as llm:
        graphs: Any = llm.engine.graph.graphs  # type: ignore[attr-defined]
        for key, graph in graphs.items():
            names = [operation.name for operation in graph.operations]
            assert names.count("PiecewiseAttention._attend") == (2 if key.piecewise else 0)
            assert sum(name.endswith("Attention.forward") for name in names) == (0 if key.piecewise else 2)


def test_steps_that_fit_are_replayed(checkpoint: Path) -> None:
    """graph=simulated replays a step if its rows or tokens fit a bucket.

    A prompt of 30 tokens is replayed in a bucket of 32, and 4 decode steps in a bucket of one row. A prompt of 47
    tokens is larger than the largest bucket of 40 and runs eagerly.
    """
    words = ["attention=torch", "device=cpu", "graph=simulated", "graph.max_tokens=40", "cache=naive"]
    with LLM(str(checkpoint), overrides=words) as llm:
        graph: Any = llm.engine.graph  # type: ignore[attr-defined]
        llm.generate([PROMPTS[2]], SamplingParams(max_tokens=5, temperature=0.0, ignore_eos=True))
        assert (graph.replays, graph.padded_rows) == (5, 2)
        assert graph.graphs[GraphKey(32, q_len=0)].replays == 1
        llm.generate([PROMPTS[4]], SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True))
        assert graph.replays == 5


@pytest.mark.parametrize("recorded_zeros", [0, 1024])
def test_piecewise_padding(checkpoint: Path, recorded_zeros: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """In piecewise buffers, stale data of an earlier, larger step does not change the tokens of a later step."""
    monkeypatch.setattr(piecewise, "MAX_RECORDED_ZEROS", recorded_zeros)
    greedy = SamplingParams(max_tokens=3, temperature=0.0, ignore_eos=True)
    words = ["attention=torch", "device=cpu", "cache=naive", "num_pages=64"]
    with LLM(str(checkpoint), overrides=[*words, "graph=none"]) as llm:
        plain = [list(llm.generate([prompt], greedy)[0].token_ids) for prompt in PROMPTS]
    with LLM(str(checkpoint), overrides=[*words, "graph=simulated", "graph.max_tokens=64"]) as llm:
        for order in ([4, 0, 2, 3, 1], [0, 4, 3, 2, 1]):
            for i in order:
                assert list(llm.generate([PROMPTS[i]], greedy)[0].token_ids) == plain[i]


def test_backend_without_graph_support(checkpoint: Path) -> None:
    """With attention=paged, which graphs cannot record, all steps are replayed in pieces only."""
    greedy = SamplingParams(max_tokens=5, temperature=0.0, ignore_eos=True)
    plain, _ = generate(checkpoint, greedy, "graph=none")
    replayed, (operations, replays, _) = generate(
        checkpoint, greedy, "graph=simulated", "graph.max_tokens=128", "attention=paged"
    )
    assert replayed == plain
    assert all(key.piecewise for key in operations)
    assert replays > 0


@pytest.mark.parametrize(
    "words",
    [
        ["graph=simulated", "graph.max_rows=0"],
        ["graph=simulated", "graph.max_tokens=-1"],
        ["graph=replay", "graph.max_rows=0"],
    ],
)
def test_sizes_out_of_range(checkpoint: Path, words: list[str]) -> None:
    """graph.max_rows below 1 and graph.max_tokens below 0 raise a `ConfigError`."""
    with pytest.raises(ConfigError, match="must be at least 1"):
        generate(checkpoint, SamplingParams(max_tokens=2), *words)


@pytest.mark.parametrize(
    ("words", "max_tokens"),
    [
        (["max_prefill_tokens=100000", "max_seq_len=60", "max_running_requests=4"], 240),
        (["max_prefill_tokens=100000", "num_pages=6", "page_size=16", "max_seq_len=90"], 96),
        (["max_prefill_tokens=50"], 50),
    ],
)
def test_largest_piecewise_bucket(checkpoint: Path, words: list[str], max_tokens: int) -> None:
    """If the largest possible step has fewer tokens than graph.max_tokens, it is the largest piecewise bucket."""
    options = ["attention=torch", "device=cpu", "num_pages=64", "graph=simulated", "graph.max_tokens=300", *words]
    with LLM(str(checkpoint), overrides=options) as llm:
        graph: Any = llm.engine.graph  # type: ignore[attr-defined]
        assert max(key.rows for key in graph.graphs if key.piecewise) == max_tokens


def test_cuda_picks_piecewise_buckets() -> None:
    """graph=cuda pads steps up to graph.max_tokens; larger steps are replayed only if they fill a bucket exactly.

    The test runs without a GPU: the recordings are simulated graphs of a trivial function.
    """
    runner = CudaGraphRunner(CudaGraph(max_tokens=64), torch.device("cpu"))
    keys = runner.piecewise(1000)
    assert [key.rows for key in keys] == [16, 32, 48, 64, 1000]
    runner.capture(keys, lambda key: torch.zeros(key.rows), lambda x: x + 1)
    picked = {n: runner.pick_tokens(n) for n in (1, 17, 64, 65, 999, 1000, 1001)}
    assert {n: key.rows for n, key in picked.items() if key} == {1: 16, 17: 32, 64: 64, 1000: 1000}
    assert runner.pick(1, 1, True) is None
    assert list(CudaGraphRunner(CudaGraph(max_tokens=0), torch.device("cpu")).piecewise(1000)) == []


def test_collectives(checkpoint: Path) -> None:
    """With two ranks, graph=simulated records the collectives, and tokens equal those with graph=none."""
    greedy = SamplingParams(max_tokens=5, temperature=0.0, ignore_eos=True)
    plain, _ = generate(checkpoint, greedy, "graph=none")
    replayed, _ = generate(checkpoint, greedy, "graph=simulated", "tp=2")
    assert replayed == plain
    replayed, _ = generate(checkpoint, greedy, "graph=simulated", "graph.max_tokens=64", "tp=2")
    assert replayed == plain


def test_host_read_in_a_backend(tmp_path: Path) -> None:
    """A backend that breaks a rule is refused at start, with the rule and the source line.

    moe=torch reads the number of tokens of each expert on the host. A CUDA graph could not record it either.
    """
    model = tiny_checkpoint("qwen3_moe", tmp_path)
    with pytest.raises(ConfigError, match=r"(?s)graph=simulated.*\[(dynamic-shape|host-read)\].*plugins/moe/torch\.py"):
        generate(model, SamplingParams(max_tokens=2), "graph=simulated")


def test_pick() -> None:
    """`pick` returns the smallest recorded bucket that holds the decode rows, and None for any other step."""
    runner = SimulatedRunner(Simulated(max_rows=6))
    keys = runner.buckets(100)
    assert [key.rows for key in keys] == [1, 2, 4, 6]
    assert [key.rows for key in runner.buckets(1)] == [1]
    assert [key.rows for key in runner.buckets(4)] == [1, 2, 4]
    assert runner.pick(1, 1, True) is None  # nothing recorded yet
    runner.capture(keys, lambda key: torch.zeros(key.rows), lambda x: x + 1)
    assert [runner.pick(rows, 1, True) for rows in (1, 2, 3, 5, 6, 7)] == [*map(GraphKey, (1, 2, 4, 6, 6)), None]
    assert runner.padded_rows == 2
    assert runner.pick(2, 1, False) is None  # a prefill chunk among the rows
    assert runner.pick(2, 4, True) is None
    runner.close()
    assert runner.pick(1, 1, True) is None


def test_wrong_device() -> None:
    """graph=simulated is refused on a GPU and graph=cuda on a CPU, each with the other one as suggestion."""
    with pytest.raises(ConfigError, match="graph=cuda"):
        Simulated().build(torch.device("cuda"))
    with pytest.raises(ConfigError, match="graph=simulated"):
        CudaGraph().build(torch.device("cpu"))
