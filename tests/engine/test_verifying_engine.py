"""Tests of `TorchEngine` on steps that verify drafts or sample late: with and without graphs, on one and two ranks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from minisgl.core import EngineDeadError, SamplingParams, TokenMasks
from minisgl.engine import setup
from minisgl.engine.build import build_engine
from minisgl.engine.engine import TorchEngine
from minisgl.options.compose import compose
from minisgl.plugin_manager.manager import PluginManager
from minisgl.plugins.attention.torch import TorchAttention
from minisgl.plugins.graph.replaying import inputs as replaying_inputs
from minisgl.plugins.sampling.penalties import Penalties
from minisgl.plugins.speculation import repeat
from minisgl.testing.checkpoints import tiny_checkpoint
from minisgl.testing.oracle import Oracle
from minisgl.testing.ranks import leader_engine
from minisgl.testing.steps import RowSpec, StepWriter
from minisgl.testing.verification import (
    PARAMS,
    PROMPTS,
    Decoded,
    check_rounds,
    check_verification,
    decode_one_by_one,
    run_step,
)

VOCAB = 320
WORDS = ["device=cpu", "max_running_requests=8", "num_pages=160", "page_size=4"]
PIECEWISE = ["graph=simulated", "graph.max_tokens=128", "max_prefill_tokens=128"]
ONE_LAUNCH = ["graph=simulated", "max_running_requests=16", "num_pages=320"]
NONE = TokenMasks(np.empty(0, np.int32), np.empty((0, 10), np.int32))
GREEDY = SamplingParams(temperature=0.0)


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_checkpoint("qwen3", tmp_path_factory.mktemp("verifying"))


@pytest.fixture(scope="module")
def manager() -> PluginManager:
    return PluginManager.load()


@contextmanager
def engine_of(manager: PluginManager, path: Path, *words: str) -> Iterator[TorchEngine]:
    """Build a CPU engine of one rank, and close it at the end."""
    engine = build_engine(compose(manager, [f"model={path}", *WORDS, *words]), manager)
    yield engine
    engine.close()


def two_ranks(manager: PluginManager, path: Path, *words: str) -> AbstractContextManager[TorchEngine]:
    """Return an engine of two ranks, each a thread."""
    return leader_engine(compose(manager, [f"model={path}", *WORDS, "tp=2", *words]), manager)


@pytest.fixture(scope="module")
def expected(manager: PluginManager, path: Path) -> Decoded:
    """Return 40 tokens of each request and their log-probabilities, from decode rows on one rank."""
    with engine_of(manager, path) as engine:
        return decode_one_by_one(engine, 40)


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("words", [[], PIECEWISE, ONE_LAUNCH], ids=["eager", "piecewise", "one launch"])
def test_promise_8_verification(
    words: list[str], late: bool, manager: PluginManager, path: Path, expected: Decoded, monkeypatch: Any
) -> None:
    """Verification gives the tokens and log-probabilities of decoding one by one, also replayed in pieces or whole."""
    if words == PIECEWISE:
        monkeypatch.setattr(replaying_inputs, "MAX_REPEATED_TOKENS", -1)
    with engine_of(manager, path, *words) as engine:
        check_verification(engine, expected, seed=len(words) + late, late=late)
        if words:
            graphs = engine.graph.graphs.items()  # type: ignore[attr-defined]
            replayed = {key for key, graph in graphs if graph.replays}
            assert any(key.piecewise == (words == PIECEWISE) for key in replayed)


@pytest.mark.parametrize("fused_rows", [0, 2, 4])
def test_one_launch_for_few_repeated_reads(
    fused_rows: int, manager: PluginManager, path: Path, monkeypatch: Any
) -> None:
    """A step is replayed as one launch, if its drafts read little KV again.

    Its bucket has more rows than attention may read and store in one launch.
    """
    needs = TorchAttention.needs
    monkeypatch.setattr(TorchAttention, "needs", lambda backend: replace(needs(backend), fused_rows=fused_rows))
    prompt = list(range(5, 30))
    with engine_of(manager, path, *ONE_LAUNCH) as engine:
        graphs = engine.graph.graphs  # type: ignore[attr-defined]
        writer = StepWriter(engine.spec)
        run_step(engine, writer.step(RowSpec.prompt(0, prompt, GREEDY), RowSpec.prompt(1, prompt, GREEDY)))
        for limit, replays in ((27, 1), (26, 0)):  # the row has 27 tokens, and two of them in this step
            monkeypatch.setattr(replaying_inputs, "MAX_REPEATED_TOKENS", limit)
            before = {key.rows: graph.replays for key, graph in graphs.items() if not key.piecewise}
            run_step(engine, writer.step(RowSpec.decode(1, 25), RowSpec.verify(0, 25, [7])))
            after = {key.rows: graph.replays for key, graph in graphs.items() if not key.piecewise}
            assert sum(after.values()) - sum(before.values()) == replays
            assert all(after[rows] == before[rows] for rows in after if rows <= fused_rows)


@pytest.mark.parametrize("words", [[], PIECEWISE, ONE_LAUNCH], ids=["eager", "piecewise", "one launch"])
def test_promise_7_verification_on_two_ranks(
    words: list[str], manager: PluginManager, path: Path, expected: Decoded
) -> None:
    """All ranks continue with the accepted tokens that rank 0 sampled, at once or late."""
    for late in (False, True):
        with two_ranks(manager, path, *words) as engine:
            check_verification(engine, expected, seed=7, late=late)


@pytest.mark.parametrize("words", [[], ONE_LAUNCH, ["tp=2"]], ids=["eager", "one launch", "two ranks"])
def test_promise_8_rounds(words: list[str], manager: PluginManager, path: Path, expected: Decoded) -> None:
    """Steps of several rounds give the tokens of decoding one by one, for all sampling parameters."""
    build = two_ranks if words == ["tp=2"] else engine_of
    for seed in range(2):
        with build(manager, path, "verification_rounds=3", *words) as engine:
            check_rounds(engine, expected, seed)


def test_promise_8_verification_of_a_known_model(manager: PluginManager, path: Path) -> None:
    """Greedy tokens of verification rows are those of transformers, for right, partly right and wrong drafts."""
    prompt, oracle = [5, 6, 7, 8, 9], Oracle(path)
    with engine_of(manager, path) as engine:
        writer = StepWriter(engine.spec)
        output = [int(run_step(engine, writer.step(RowSpec.prompt(0, prompt, GREEDY))).tokens[0, 0])]
        rng = np.random.default_rng(0)
        while len(output) < 30:
            ids = torch.tensor([[*prompt, *output]])
            drafts = [int(oracle.model(ids).logits[0, -1].argmax()), *rng.integers(3, VOCAB, 4).tolist()]
            result = run_step(engine, writer.step(RowSpec.verify(0, len(prompt) + len(output) - 1, drafts)))
            assert result.accepted[0] >= 2
            output += result.tokens[0, : result.accepted[0]].tolist()
    oracle.check(prompt, output)


def test_more_positions_than_a_bucket_returns(manager: PluginManager, path: Path) -> None:
    """A step that needs more hidden states than a recording returns runs eagerly, with the same tokens."""
    words = ["graph=simulated", "graph.max_tokens=256", "max_prefill_tokens=256", "max_seq_len=120", "num_pages=240"]
    prompt, drafts = list(range(5, 30)), list(range(30, 100))
    results = []
    for more in ([], words):
        with engine_of(manager, path, "num_pages=240", *more) as engine:
            writer = StepWriter(engine.spec)
            run_step(engine, writer.step(RowSpec.prompt(0, prompt, GREEDY), RowSpec.prompt(1, prompt, GREEDY)))
            results.append(run_step(engine, writer.step(*(RowSpec.verify(i, len(prompt), drafts[i:]) for i in (0, 1)))))
            if more:
                replays = {key.rows: g.replays for key, g in engine.graph.graphs.items() if key.piecewise}  # type: ignore[attr-defined]
                assert replays[256] == 0
    assert results[0].tokens.tolist() == results[1].tokens.tolist()


# ---- late sampling -----------------------------------------------------------------------------------


def mask(*allowed: Sequence[int]) -> np.ndarray[Any, Any]:
    """Return the bits of masks that allow the listed tokens."""
    bits = np.zeros((len(allowed), VOCAB), bool)
    for i, tokens in enumerate(allowed):
        bits[i, list(tokens)] = True
    return np.packbits(bits, axis=1, bitorder="little").view(np.int32)


@pytest.mark.parametrize("words", [[], ["graph=simulated"], PIECEWISE], ids=["eager", "decode-graph", "piecewise"])
def test_late_masks(words: list[str], manager: PluginManager, path: Path) -> None:
    """Between `launch` and `sample` the preceding result can be read; the masks then decide the tokens."""
    with engine_of(manager, path, *words) as engine:
        writer = StepWriter(engine.spec)
        rows = [RowSpec.prompt(i, PROMPTS[i], PARAMS[i]) for i in range(3)]
        engine.launch(writer.step(*rows))
        for i in range(6):
            engine.launch(
                writer.step(*(RowSpec.decode(uid, len(PROMPTS[uid]) + i) for uid in range(3)), late_sampling=True)
            )
            previous = engine.result()
            assert previous.id == i
            if i:
                assert previous.tokens[[0, 2], 0].tolist() == [100 + i - 1, 200 + i - 1]
            engine.sample(TokenMasks(np.array([0, 2], np.int32), mask([100 + i], [200 + i])))
        assert engine.result().tokens[[0, 2], 0].tolist() == [105, 205]


def test_late_masks_on_two_ranks(manager: PluginManager, path: Path) -> None:
    """Only rank 0 gets masks; rank 1 continues with the tokens, so the next step computes the same on both ranks."""
    with engine_of(manager, path) as alone, two_ranks(manager, path) as engine:
        for each in (alone, engine):
            writer = StepWriter(each.spec)
            results = []
            each.launch(writer.step(RowSpec.prompt(0, PROMPTS[0], GREEDY), late_sampling=True))
            each.sample(TokenMasks(np.array([0], np.int32), mask([33])))
            results.append(each.result())
            each.launch(writer.step(RowSpec.verify(0, len(PROMPTS[0]), [44, 55]), late_sampling=True))
            each.sample(TokenMasks(np.array([0], np.int32), mask([44])))
            results.append(each.result())
            each.launch(writer.step(RowSpec.decode(0, len(PROMPTS[0]) + int(results[1].accepted[0]))))
            results.append(each.result())
            tokens = [result.tokens.tolist() for result in results]
            assert tokens[0] == [[33]]
            assert tokens[1][0][0] == 44
            if each is alone:
                expected = tokens
        assert tokens == expected


def test_wrong_order_of_calls(manager: PluginManager, path: Path) -> None:
    """`sample` must follow the `launch` of a late step, exactly once. Wrong calls raise, and change nothing."""
    with engine_of(manager, path) as engine:
        writer = StepWriter(engine.spec)
        with pytest.raises(EngineDeadError, match=r"sample\(\) was called, but no launched step waits"):
            engine.sample(NONE)
        late = writer.step(RowSpec.prompt(0, PROMPTS[0], GREEDY), late_sampling=True)
        engine.launch(late)
        with pytest.raises(EngineDeadError, match=r"result\(\) was called, but step 0 waits for sample\(\)"):
            engine.result()
        with pytest.raises(EngineDeadError, match=r"step 1 was launched, but step 0 waits for sample\(\)"):
            engine.launch(writer.step(RowSpec.decode(0, len(PROMPTS[0]))))
        with pytest.raises(ValueError, match="a mask is for position 1; the step samples at 1 positions"):
            engine.sample(TokenMasks(np.array([1], np.int32), mask([3])))
        with pytest.raises(ValueError, match=r"the shape \(1, 9\); expected \(1, 10\)"):
            engine.sample(TokenMasks(np.array([0], np.int32), mask([3])[:, :9]))
        engine.sample(TokenMasks(np.array([0], np.int32), mask([3])))
        with pytest.raises(EngineDeadError, match="no launched step waits"):
            engine.sample(NONE)
        assert engine.result().tokens.tolist() == [[3]]


def test_late_step_without_sampling(manager: PluginManager, path: Path) -> None:
    """A late step in which no row samples still waits for `sample`."""
    with engine_of(manager, path) as engine:
        writer = StepWriter(engine.spec)
        row = RowSpec.prompt(0, PROMPTS[0][:4], GREEDY)
        row.num_sampled = 0
        result = run_step(engine, writer.step(row, late_sampling=True))
        assert result.accepted.tolist() == [0]
        assert result.tokens.tolist() == [[0]]


def test_close_between_launch_and_sample(manager: PluginManager, path: Path) -> None:
    """An engine that is closed before a late step was sampled releases the rank that waits for its tokens."""
    with two_ranks(manager, path) as engine:  # the context checks that rank 1 ends
        engine.launch(StepWriter(engine.spec).step(RowSpec.prompt(0, PROMPTS[0], GREEDY), late_sampling=True))


# ---- memory ------------------------------------------------------------------------------------------


def test_pool_leaves_room_for_state(manager: PluginManager, path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The pool is smaller by the bytes of the page table, and by what the sampler may allocate later.

    Processors and the tokens for later rounds are allocated before, so that a GPU has less memory left for the pool.
    """
    asked: list[Any] = []
    available, new_history = setup._available_bytes, repeat.new_history

    def watched(config: Any, device: Any, reserved: int) -> tuple[int, str]:
        asked.append(reserved)
        return available(config, device, reserved)

    def allocated(*args: Any) -> torch.Tensor:
        asked.append(tuple((made := new_history(*args)).shape))
        return made

    make = Penalties.__init__

    def with_history(self: Penalties, *args: Any) -> None:
        make(self, *args)
        asked.append(tuple(self.history.shape))

    monkeypatch.setattr(setup, "_available_bytes", watched)
    monkeypatch.setattr(repeat, "new_history", allocated)
    monkeypatch.setattr(Penalties, "__init__", with_history)
    for rounds in (1, 2):
        words = ["num_pages=null", "max_seq_len=60", f"verification_rounds={rounds}"]
        with engine_of(manager, path, *words) as engine:
            assert engine.spec.vocab_size == VOCAB
    last, page_table = 8, 4 * 15
    one = 9 * (last + page_table + 4 * 3) + 4 * VOCAB
    assert asked[:2] == [(9, VOCAB), one]
    assert (sorted(asked[2:4]), asked[4:]) == ([(9, 61), (9, VOCAB)], [one])
