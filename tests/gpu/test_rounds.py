"""Verification in rounds: the launch between two rounds, and replays of one graph whose inputs the device changes.

The kernel's test also runs under Triton's interpreter (tests/kernel).
"""

from __future__ import annotations

from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed here")

from torch import Tensor

from minisgl import LLM, SamplingParams
from minisgl.engine.build import build_engine, start_engine
from minisgl.engine.engine import TorchEngine
from minisgl.options.compose import compose
from minisgl.plugin_manager.manager import PluginManager
from minisgl.plugins.graph.replaying import inputs as replaying_inputs
from minisgl.plugins.kernels.ops import rounds
from minisgl.plugins.kernels.ops.triton import rounds as triton_rounds
from minisgl.plugins.speculation.repeat import RoundsRunner
from minisgl.testing.checkpoints import tiny_checkpoint
from minisgl.testing.steps import RowSpec, StepWriter
from minisgl.testing.verification import check_rounds, decode_one_by_one, follow, run_step

WORDS = ["dtype=float32", "max_running_requests=16", "num_pages=320", "page_size=16", "attention=triton"]
PAGE_SIZE = 4


@pytest.fixture(scope="module")
def manager() -> PluginManager:
    return PluginManager.load()


def watch(engine: TorchEngine) -> list[int]:
    """Return a list to which each step that is computed by replays of one graph adds its number of rounds."""
    seen: list[int] = []
    runner = engine.runner
    assert isinstance(runner, RoundsRunner)
    real = runner._repeat_on_device

    def counted(forward: Any, *rest: Any) -> Any:
        seen.append(forward.step.rounds)
        return real(forward, *rest)

    runner._repeat_on_device = counted  # type: ignore[method-assign]
    return seen


# ---- the launch between two rounds -------------------------------------------------------------------


def random_round(rows: int, width: int, seed: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return random arguments of `rounds.advance`: some drafts are right, and sequences of four tokens repeat."""
    rng, pool, longest = np.random.default_rng(seed), rows + 2, 60
    history = rng.integers(0, 4, (pool, longest + 3 * width + 3), np.int32)
    columns = history.shape[1] // PAGE_SIZE + 1
    page_table = rng.permutation(np.arange(pool * columns, dtype=np.int32)).reshape(pool, columns)
    starts, req = rng.integers(0, longest, rows).astype(np.int32), rng.permutation(pool)[:rows].astype(np.int32)
    tokens, ids = rng.integers(0, 4, (rows, width)), rng.integers(0, 4, (rows, width)).astype(np.int32)
    for row in range(rows):
        right = int(rng.integers(width))
        ids[row, 1 : 1 + right] = tokens[row, :right]
        ids[row, 0] = history[req[row], starts[row]]
    positions = starts[:, None] + np.arange(width, dtype=np.int32)
    packed = np.full((5, rows * width + 3), 77, np.int32)  # the last three columns belong to no row
    packed[0, :-3], packed[1, :-3], packed[4, :-3] = ids.ravel(), positions.ravel(), positions.ravel() + 1
    packed[3, :-3] = req.repeat(width)
    tensors = tokens, packed, history, page_table
    return tuple(torch.from_numpy(np.ascontiguousarray(array)) for array in tensors)  # type: ignore[return-value]


@pytest.mark.parametrize("block", [16, 2048])
@pytest.mark.parametrize(("rows", "width"), [(1, 5), (3, 4), (5, 2), (2, 17), (1, 33), (4, 1)])
def test_advance(
    rows: int, width: int, block: int, device: torch.device, compiled: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The launch equals the torch reference, and both equal the rule written as plain Python."""
    monkeypatch.setattr(triton_rounds, "BLOCK", block)  # 16: more than one block of history
    for seed in range(40 if compiled else 8):
        given = random_round(rows, width, seed)
        host, other = [t.clone() for t in given], [t.to(device, copy=True) for t in given]
        length = rounds.advance_torch(*host, PAGE_SIZE)
        assert triton_rounds.advance(*other, PAGE_SIZE).tolist() == length.tolist()
        assert all(torch.equal(there.cpu(), here) for here, there in zip(host, other, strict=True))
        tokens, packed, history, page_table = given
        assert (host[1][:, rows * width :] == 77).all()
        for row in range(rows):
            ids, positions, locations, req, ends = host[1][:, row * width : (row + 1) * width]
            drafts, sampled = packed[0, row * width + 1 : (row + 1) * width].tolist(), tokens[row].tolist()
            count = 1 + next((n for n, draft in enumerate(drafts) if draft != sampled[n]), width - 1)
            before = int(packed[1, row * width]) + 1
            known = history[req[0], :before].tolist() + sampled[:count]
            assert int(length[row]) == count
            assert host[2][req[0], : len(known)].tolist() == known
            assert ids.tolist() == [known[-1], *follow(known, width - 1)]
            assert positions.tolist() == list(range(len(known) - 1, len(known) - 1 + width))
            assert ends.tolist() == [position + 1 for position in positions.tolist()]
            pages = page_table[req[0], positions // PAGE_SIZE]
            assert locations.tolist() == (pages * PAGE_SIZE + positions % PAGE_SIZE).tolist()


def test_advance_at_the_end_of_history(device: torch.device) -> None:
    """Positions behind the last column of the history or the page table are clamped: nothing else is written."""
    tokens, packed, history, page_table = random_round(1, 4, 0)
    req, last = int(packed[3, 0]), history.shape[1] - 1
    packed[1, :4] = torch.arange(last - 4, last)
    wide = torch.cat((history, torch.full_like(history, -5)), 1)  # a write behind the row would be seen here
    inside = wide[:, : history.shape[1]]
    there = [t.to(device, copy=True) for t in (tokens, packed, wide, page_table)]
    triton_rounds.advance(there[0], there[1], there[2][:, : history.shape[1]], there[3], PAGE_SIZE)
    rounds.advance_torch(tokens, packed, inside, page_table, PAGE_SIZE)
    assert torch.equal(there[1].cpu()[1:], packed[1:])
    assert torch.equal(there[2].cpu()[:, last + 1 :], wide[:, last + 1 :])
    assert (wide[:, last + 1 :] == -5).all()
    assert torch.equal(there[2].cpu()[req, : last - 1], inside[req, : last - 1])


# ---- the engine --------------------------------------------------------------------------------------


def test_promise_8_rounds(
    manager: PluginManager, tmp_path: Path, device: torch.device, compiled: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Steps of several rounds, computed by replays of one graph, give the tokens of decoding one by one."""
    monkeypatch.setattr(replaying_inputs, "MAX_REPEATED_TOKENS", 1 << 14)
    path = tiny_checkpoint("qwen3", tmp_path)
    words = [f"model={path}", *WORDS, f"device={device.type}"]
    if not compiled:  # to record graphs takes long under the interpreter: none has more rows than the six that are used
        words = [word.replace("max_running_requests=16", "max_running_requests=6") for word in words]
    graph = "graph=cuda" if compiled else "graph=none"
    engine = build_engine(compose(manager, [*words, graph]), manager)
    expected = decode_one_by_one(engine, 40)
    engine.close()
    for seed in range(3 if compiled else 1):
        graph = "graph=cuda" if compiled else "graph=simulated"
        engine = build_engine(compose(manager, [*words, graph, "verification_rounds=3"]), manager)
        replayed = watch(engine)
        check_rounds(engine, expected, seed)
        assert {2, 3} <= set(replayed)
        engine.close()


def test_launches_of_rounds_do_not_wait(manager: PluginManager, tmp_path: Path, compiled: bool) -> None:
    """A launch of several rounds returns before the device has computed the first one: nothing is read between them."""
    if not compiled:
        pytest.skip("needs a CUDA device: a CPU computes during the launch")
    path, prompt = tiny_checkpoint("qwen3", tmp_path), list(range(5, 25))
    words = [f"model={path}", *WORDS, "device=cuda", "graph=cuda", "verification_rounds=4"]
    engine = build_engine(compose(manager, words), manager)
    replayed = watch(engine)
    try:
        for params in (
            SamplingParams(temperature=0.0),
            SamplingParams(temperature=0.9, top_k=30, frequency_penalty=0.5, logit_bias={5: 1.0}),
        ):
            writer = StepWriter(engine.spec)
            for mode in ("default", "error"):  # the first time, kernels are compiled
                run_step(engine, writer.step(RowSpec.prompt(0, prompt, params, with_tokens=True)))
                torch.cuda.set_sync_debug_mode(mode)
                try:
                    engine.launch(writer.step(RowSpec.verify(0, 20, [7, 8, 9]), rounds=4))
                finally:
                    torch.cuda.set_sync_debug_mode("default")
                assert engine.result().rounds is not None
    finally:
        engine.close()
    assert replayed == [4] * 4


@pytest.mark.parametrize("attention", ["auto", "triton"])
def test_nothing_is_compiled_after_the_start(attention: str, compiled: bool) -> None:
    """The first steps of several rounds compile no kernel. One token only is allowed, so that drafts are found."""
    if not compiled:
        pytest.skip("needs a CUDA device")
    words = ["load_format=dummy", "device=cuda", "dtype=bfloat16", "num_pages=1024", "max_prefill_tokens=2048"]
    rounds = ["speculation=ngram", "speculation.match_tokens=1", "verification_rounds=4", f"attention={attention}"]
    kinds: list[dict[str, Any]] = [{"temperature": 0.0}, {"temperature": 1.0}]
    kinds.append({"temperature": 0.9, "frequency_penalty": 0.1})
    params = [
        SamplingParams(max_tokens=60, ignore_eos=True, seed=1, logit_bias={7: 100.0, 8: 100.0}, **kind)
        for kind in kinds
    ]
    with LLM("qwen3-0.6b", overrides=[*words, *rounds]) as llm:
        assert isinstance(llm.engine, TorchEngine)
        replayed = watch(llm.engine)
        for each in params:
            llm.generate([[5, 6, 7]], each)
        llm.generate([[5, 6, 7], [8, 9]], params[:2])
        late = llm.engine.kernels.compilations
        # DeepGEMM's count has the kernels that other processes compile, such as other tests. This model uses none.
        counts = {name: count for name, count in late.counts().items() if name != "deep_gemm"}
        assert counts and not any(counts.values()), (counts, late.triton)
    assert max(replayed, default=0) == 4


def test_promise_7_rounds_on_two_gpus(manager: PluginManager, tmp_path: Path, compiled: bool) -> None:
    """On two GPUs, each round goes on after the accepted tokens that rank 0 sampled."""
    if not compiled or torch.cuda.device_count() < 2:
        pytest.skip("needs 2 CUDA devices")
    path = tiny_checkpoint("qwen3", tmp_path)
    words = [f"model={path}", *WORDS, "device=cuda", "communicator=torch", "graph=cuda"]
    engine = build_engine(compose(manager, words), manager)
    expected = decode_one_by_one(engine, 40)
    engine.close()
    with closing(start_engine(compose(manager, [*words, "tp=2", "verification_rounds=3"]), manager)) as ranks:
        check_rounds(ranks, expected, 1)
