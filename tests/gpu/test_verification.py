"""Verification rows, late masks and prompt log-probabilities on a GPU, with and without CUDA graphs."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing, contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from minisgl.core import Admission, EngineSpec, SamplingParams, TokenMasks
from minisgl.engine.build import build_engine, start_engine
from minisgl.engine.engine import TorchEngine
from minisgl.engine.inputs import InputBuilder
from minisgl.options.compose import compose
from minisgl.plugin_manager.manager import PluginManager
from minisgl.plugins.graph.replaying import inputs as replaying_inputs
from minisgl.plugins.sampling.penalties import Penalties
from minisgl.plugins.speculation.verification import verifying_inputs
from minisgl.testing.checkpoints import tiny_checkpoint
from minisgl.testing.oracle import Oracle
from minisgl.testing.samplers import full_sampler
from minisgl.testing.steps import RowSpec, StepWriter
from minisgl.testing.verification import PROMPTS, check_verification, decode_one_by_one, run_step

pytest.importorskip("transformers", reason="transformers writes the checkpoints and is the oracle")
pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")

WORDS = ["device=cuda", "dtype=float32", "max_running_requests=8", "num_pages=640", "page_size=16", "moe=triton"]
GRAPHS = ["graph=cuda", "graph.max_tokens=128", "max_prefill_tokens=128"]
ONE_LAUNCH = [*GRAPHS, "max_running_requests=64", "num_pages=1280"]
GREEDY = SamplingParams(temperature=0.0)


@pytest.fixture(scope="module")
def manager() -> PluginManager:
    return PluginManager.load()


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_checkpoint("qwen3", tmp_path_factory.mktemp("qwen3"))


@contextmanager
def engine_of(manager: PluginManager, path: Path, *words: str) -> Iterator[TorchEngine]:
    engine = build_engine(compose(manager, [f"model={path}", *WORDS, *words]), manager)
    yield engine
    engine.close()


def watch_replays(engine: TorchEngine) -> list[Any]:
    """Return a list to which the engine's graph runner adds the bucket of each replay; `graph=none` replays none."""
    replayed: list[Any] = []
    graph: Any = engine.graph
    run = getattr(graph, "run", None)
    if run is not None:
        graph.run = lambda key: replayed.append(key) or run(key)
    return replayed


@pytest.mark.parametrize("graphs", [["graph=none"], GRAPHS, ONE_LAUNCH], ids=["eager", "pieces", "one launch"])
@pytest.mark.parametrize("attention", ["triton", "torch"])
def test_promise_8_verification(
    attention: str, graphs: list[str], manager: PluginManager, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Verification gives the tokens and log-probabilities of decoding one by one, for all sampling parameters."""
    words = [f"attention={attention}", *graphs]
    monkeypatch.setattr(replaying_inputs, "MAX_REPEATED_TOKENS", 1 << 14 if graphs == ONE_LAUNCH else -1)
    with engine_of(manager, path, *words) as engine:
        expected = decode_one_by_one(engine, 40)
    for late in (False, True):
        with engine_of(manager, path, *words) as engine:
            replayed = watch_replays(engine)
            check_verification(engine, expected, seed=3 + late, late=late, eps=1e-3)
        assert any(key.piecewise for key in replayed) == (len(graphs) > 1)
        whole = max((key.rows for key in replayed if not key.piecewise), default=0)
        assert (whole > 8) == (graphs == ONE_LAUNCH and attention == "triton")


@pytest.mark.parametrize("limit", [-1, 1 << 14], ids=["pieces", "one launch"])
@pytest.mark.parametrize("attention", ["flashinfer", "hybrid", "triton"])
def test_verification_in_half_precision(
    attention: str, limit: int, manager: PluginManager, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With kernels for rows of several tokens, or for decode rows, the tokens are those of transformers up to rounding.

    The step has four tokens, but must not be computed by the kernels for few rows, which store and read KV in one
    launch.
    """
    if attention != "triton":
        pytest.importorskip("flashinfer", reason="FlashInfer is not installed here")
    monkeypatch.setattr(replaying_inputs, "MAX_REPEATED_TOKENS", limit)
    words = [f"attention={attention}", "dtype=bfloat16", *GRAPHS]
    path, prompt = tiny_checkpoint("qwen3", tmp_path, head_dim=64), list(range(5, 40))
    oracle = Oracle(path)
    with engine_of(manager, path, *words) as engine:
        writer = StepWriter(engine.spec)
        output = [int(run_step(engine, writer.step(RowSpec.prompt(0, prompt, GREEDY))).tokens[0, 0])]
        run_step(engine, writer.step(RowSpec.prompt(1, prompt[:9], GREEDY)))
        for i in range(8):
            other = RowSpec.decode(1, 9 + i)
            position = len(prompt) + len(output) - 1
            drafts = [int(oracle.logits([*prompt, *output])[-1].argmax()), 7, 8]
            result = run_step(engine, writer.step(RowSpec.verify(0, position, drafts), other))
            output += result.tokens[1, : result.accepted[1]].tolist()
    assert len(output) > 12
    oracle.check(prompt, output, eps=0.1)


@pytest.mark.parametrize("words", [["graph=none"], GRAPHS], ids=["eager", "graphs"])
def test_late_masks(words: list[str], manager: PluginManager, path: Path) -> None:
    """Masks decide the tokens of decode and verification rows; the logits of a replay survive until `sample`."""
    bits = np.zeros((2, 10), np.int32)
    with engine_of(manager, path, "attention=triton", *words) as engine:
        writer = StepWriter(engine.spec)
        engine.launch(writer.step(*(RowSpec.prompt(i, PROMPTS[i], GREEDY) for i in range(3))))
        for i in range(6):
            rows = [RowSpec.decode(uid, len(PROMPTS[uid]) + i) for uid in (0, 1)]
            third = [RowSpec.verify(2, len(PROMPTS[2]) + i, [200 + i, 5])] if i % 2 else []
            last = third or [RowSpec.decode(2, len(PROMPTS[2]) + i)]
            engine.launch(writer.step(*rows, *last, late_sampling=True))
            assert engine.result().id == i
            bits[:] = 0
            for mask, token in zip(bits, (100 + i, 200 + i), strict=True):
                mask[token // 32] = np.uint32(1 << token % 32).astype(np.int32)
            engine.sample(TokenMasks(np.array([0, 2], np.int32), bits.copy()))
            bits[:] = -1  # the engine has copied the masks
            if i == 5:
                result = engine.result()
                assert result.tokens[[0, 2], 0].tolist() == [105, 205]
                assert result.accepted.tolist() == [1, 1, 2]


def test_launches_do_not_wait(manager: PluginManager, path: Path) -> None:
    """No call of `launch` or `sample` waits for the device: not for drafts, penalties, masks or prompts."""
    params = SamplingParams(temperature=0.9, top_k=30, frequency_penalty=0.5, logit_bias={5: 1.0}, logprobs=2)
    with engine_of(manager, path, "attention=triton", *GRAPHS) as engine:
        writer = StepWriter(engine.spec)
        for i in range(2):
            prompt = RowSpec.prompt(1, list(range(5, 45)), params)
            prompt.targets, prompt.num_top = list(range(6, 45)), 3
            run_step(engine, writer.step(RowSpec.prompt(0, list(range(5, 25)), params), prompt))
            first = writer.step(RowSpec.verify(0, 20, [7, 8, 9]), RowSpec.decode(1, 40), late_sampling=True)
            rows = RowSpec.verify(1, 41, [7, 8]), RowSpec.prompt(2, list(range(5, 30)), params)
            steps = first, writer.step(*rows)
            mode = "error" if i else "default"  # the first time, kernels are compiled
            torch.cuda.set_sync_debug_mode(mode)
            try:
                engine.launch(steps[0])
                engine.sample(TokenMasks(np.array([1, 4], np.int32), np.full((2, 10), 0x55555555, np.int32)))
                engine.launch(steps[1])
            finally:
                torch.cuda.set_sync_debug_mode("default")
            assert [engine.result().id, engine.result().id] == [step.id for step in steps]


@pytest.mark.parametrize("words", [["graph=none"], GRAPHS], ids=["eager", "graphs"])
def test_prompt_logprobs_equal_transformers(words: list[str], manager: PluginManager, path: Path) -> None:
    """Log-probabilities of a prompt in float32 are those of transformers, whole and in chunks."""
    prompt = list(range(30, 130))
    expected = Oracle(path, "float32").logits(prompt).log_softmax(-1)
    with engine_of(manager, path, "attention=triton", *words) as engine:
        writer = StepWriter(engine.spec)
        for req_pool_idx, cuts in ((0, [0, 100]), (1, [0, 7, 70, 100])):
            got = []
            for start, end in pairwise(cuts):
                row = RowSpec.prompt(req_pool_idx, prompt[start:end], GREEDY)
                row.start, row.first_position, row.targets, row.num_top = start, start, prompt[start + 1 : end + 1], 4
                got += run_step(engine, writer.step(row)).prompt_logprobs[0]
            assert len(got) == 99
            for position, entry in enumerate(got):
                top = expected[position].topk(4)
                assert entry.chosen == pytest.approx(float(expected[position, prompt[position + 1]]), abs=1e-4)
                assert entry.top == pytest.approx(top.values.tolist(), abs=1e-4)


def test_penalties_see_drafts() -> None:
    """As tests/engine: with ``frequency_penalty`` 2, three positions of one request give [4, 5, 4]."""
    device, spec = torch.device("cuda"), EngineSpec(4, 40, 4, 40, 8)
    sampler, builder, empty = full_sampler(4, 8, device), InputBuilder(spec, device), np.empty(0, np.int32)
    builder.verifying_inputs = verifying_inputs
    sampler.admit([Admission(2, 0, SamplingParams(temperature=0.0, frequency_penalty=2.0), 0, empty, empty)])
    logits = torch.zeros(3, 8, device=device)
    logits[:, 4], logits[:, 5] = 3.0, 2.0
    step = StepWriter(spec).step(RowSpec.verify(2, 10, [4, 4], 1))
    builder.update_page_table(step)
    inputs = builder.sampling_inputs(step, sampler.plan(np.repeat(step.req_pool_indices, 3)), builder.build(step)[1])
    sampled = sampler.sample(logits.clone(), inputs)
    assert sampled.tolist() == [4, 5, 5]
    assert inputs.verification is not None
    accepted = inputs.verification.accept(sampled)
    assert (accepted.length.tolist(), accepted.last.tolist()) == ([2], [5])
    sampler.commit(sampled, inputs, accepted)
    (history,) = (p.history for p in sampler.processors.values() if isinstance(p, Penalties))
    assert (history[2, 4:6] >> 1).tolist() == [1, 1]


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("graph", ["cuda", "none"])
def test_promise_7_two_gpus(graph: str, late: bool, manager: PluginManager, path: Path) -> None:
    """On two GPUs, both ranks continue with the accepted tokens that rank 0 sampled."""
    if torch.cuda.device_count() < 2:
        pytest.skip("needs 2 CUDA devices")
    words = [f"model={path}", *WORDS, "attention=triton", "communicator=torch", f"graph={graph}"]
    with engine_of(manager, path, "attention=triton", "graph=none") as engine:
        expected = decode_one_by_one(engine, 40)
    # Ranks in processes of their own: a CUDA call of one rank's thread would end the other rank's capture.
    with closing(start_engine(compose(manager, [*words, "tp=2"]), manager)) as engine:
        check_verification(engine, expected, seed=5, late=late, eps=1e-3)
