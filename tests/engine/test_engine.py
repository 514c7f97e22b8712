"""Tests of `TorchEngine` through the calls that a scheduler uses: errors at construction, results, failures, graphs."""

from __future__ import annotations

import gc
import json
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from msgspec.structs import replace

from minisgl import LLM, SamplingParams
from minisgl.config import ConfigError
from minisgl.core import Admission, EngineDeadError, EngineSpec, InvalidRequestError, Step
from minisgl.engine import setup
from minisgl.engine.build import build_engine
from minisgl.engine.engine import TorchEngine
from minisgl.engine.ranks import Peers, follow
from minisgl.options.compose import compose
from minisgl.plugin_manager.manager import PluginManager
from minisgl.plugins.attention.torch import TorchAttention
from minisgl.testing.checkpoints import tiny_checkpoint
from minisgl.testing.oracle import Oracle

GREEDY = SamplingParams(temperature=0.0, max_tokens=10, ignore_eos=True)


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_checkpoint("qwen3", tmp_path_factory.mktemp("engine"))


@pytest.fixture(scope="module")
def manager() -> PluginManager:
    return PluginManager.load()


def engine_of(manager: PluginManager, path: Path, *words: str) -> TorchEngine:
    """Build a CPU engine for the checkpoint at ``path`` with the options ``words``."""
    return build_engine(compose(manager, [f"model={path}", "device=cpu", *words]), manager)


@pytest.fixture(scope="module")
def engine(manager: PluginManager, path: Path) -> Iterator[TorchEngine]:
    made = engine_of(manager, path, "max_running_requests=8", "num_pages=64", "page_size=4")
    yield made
    made.close()


def i32(*values: int) -> Any:
    return np.array(values, np.int32)


# ---- errors at construction ---------------------------------------------------------------------


def test_moe_without_experts(manager: PluginManager, path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A MoE backend that is selected for a dense model is not used, and the log says so."""
    for moe in ("grouped", "auto"):
        caplog.clear()
        config = compose(manager, [f"model={path}", "device=cpu", "num_pages=8", f"moe={moe}"])
        build_engine(config, manager).close()
        assert ("moe=grouped is not used" in caplog.text) == (moe == "grouped")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["tp=3"], "tp=3 does not divide the 4 query and 2 key-value heads .* use tp=1, 2, 4"),
        (["max_seq_len=513"], "max_seq_len=513 must be between 2 and the 512 positions"),
        (["num_pages=4", "page_size=16", "max_seq_len=100"], "max_seq_len=100 needs 7 pages .* num_pages=4 leaves 4"),
        (["num_pages=1", "page_size=1"], "No KV pool fits: num_pages=1 leaves 1 pages of 1 tokens"),
    ],
)
def test_contradicting_options(manager: PluginManager, path: Path, words: list[str], message: str) -> None:
    """Options that contradict the model raise a `ConfigError` that names the option and the limit."""
    with pytest.raises(ConfigError, match=message):
        engine_of(manager, path, *words)


def test_missing_device(manager: PluginManager, path: Path) -> None:
    """``device=cuda`` on a machine without CUDA raises a `ConfigError`."""
    if torch.cuda.is_available():
        pytest.skip("this machine has a CUDA device")
    with pytest.raises(ConfigError, match="finds no CUDA device here"):
        build_engine(compose(manager, [f"model={path}", "device=cuda"]), manager)


def test_unknown_architecture(manager: PluginManager, path: Path, tmp_path: Path) -> None:
    """An architecture without a plugin raises a `ConfigError` that lists the known architectures."""
    config = json.loads((path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "architectures": ["MambaForCausalLM"]}))
    with pytest.raises(
        ConfigError, match=r"is a MambaForCausalLM, which no plugin implements\..* Known: .*Qwen3ForCausalLM"
    ):
        engine_of(manager, tmp_path, "load_format=dummy")


PICKY = """
from dataclasses import dataclass
import torch
from minisgl import hookimpl
from minisgl.attention import AttnNeeds

@dataclass
class Picky:
    refuse: str = ""
    def build(self):
        return Backend(self.refuse)

class Backend:
    def __init__(self, refuse):
        self.refuse = refuse
    def needs(self):
        return AttnNeeds(page_sizes=(16, 64), kv_dtypes=(torch.bfloat16, torch.float16), refuse=self.refuse)
    def forward(self, layer, q, out):
        return out

@hookimpl
def minisgl_configs():
    yield "attention", "picky", Picky
"""


def test_attention_needs_not_met(path: Path, tmp_path: Path) -> None:
    """Page sizes, dtypes and machines that a backend cannot serve raise a `ConfigError` with the supported values."""
    (tmp_path / "picky.py").write_text(PICKY)
    manager = PluginManager.load([str(tmp_path / "picky.py")])
    words = ["attention=picky"]
    with pytest.raises(ConfigError, match="attention=picky can't serve page_size=4: use page_size=16, 64"):
        engine_of(manager, path, *words, "page_size=4")
    with pytest.raises(ConfigError, match="attention=picky can't serve dtype=float32: use dtype=bfloat16, float16"):
        engine_of(manager, path, *words, "page_size=16")
    with pytest.raises(ConfigError, match="attention=picky can't serve here: needs sm100"):
        engine_of(manager, path, *words, "attention.refuse=needs sm100")


# ---- decisions at construction ---------------------------------------------------------------------------------


def test_pool_is_limited_by_requests(manager: PluginManager, path: Path) -> None:
    """The pool has no more pages than ``max_running_requests`` requests of ``max_seq_len`` tokens can fill."""
    engine = engine_of(manager, path, "max_running_requests=3", "max_seq_len=70", "page_size=16")
    assert engine.spec.num_pages == 3 * 5
    assert engine.spec.max_seq_len == 70
    assert engine.dtype == torch.float32
    engine.close()


def test_small_pool_refuses_long_requests(path: Path) -> None:
    """A pool smaller than the model's maximum length does not prevent the start: it limits the length of requests."""
    with LLM(str(path), overrides=["device=cpu", "num_pages=3", "page_size=16"]) as llm:
        assert llm.engine.spec.max_seq_len == 512
        fits = SamplingParams(max_tokens=9, ignore_eos=True)
        assert len(llm.generate([[5] * 40], fits)[0].token_ids) == 9  # the last token's KV is never stored
        with pytest.raises(InvalidRequestError, match="together more than the KV pool can hold"):
            llm.generate([[5] * 41], fits)


def test_pool_size_on_cpu(manager: PluginManager, path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a CPU the pool takes 10 % of the machine's memory, but at most 4 GiB, minus attention's workspace."""
    config = compose(manager, [f"model={path}", "page_size=16"])
    spec = EngineSpec(page_size=16, num_pages=0, max_running_requests=256, max_seq_len=512, vocab_size=320)
    total = type("Memory", (), {"total": 2 << 30})
    monkeypatch.setattr(setup.psutil, "virtual_memory", lambda: total)
    pages = setup.size_pool(config, 1 << 20, spec, torch.device("cpu"), reserved=4 << 20)
    assert pages == int(0.1 * (2 << 30)) // (1 << 20) - 4 - 1
    monkeypatch.setattr(setup.psutil, "virtual_memory", lambda: type("Memory", (), {"total": 1 << 40}))
    assert setup.size_pool(config, 1 << 20, spec, torch.device("cpu"), reserved=0) == 4096 - 1


# ---- results --------------------------------------------------------------------------------


def prefill(
    step_id: int, req_pool_idx: int, tokens: list[int], pages: list[int], params: SamplingParams, seed: int = 0
) -> Step:
    """Build a step that admits a request into ``req_pool_idx`` and computes its whole prompt in ``pages``."""
    updates = (np.full(len(pages), req_pool_idx, np.int32), np.arange(len(pages), dtype=np.int32), i32(*pages))
    return Step(
        step_id, i32(req_pool_idx), i32(0), i32(len(tokens)), i32(1), 0, 0, i32(*tokens), updates,
        (Admission(req_pool_idx, step_id, params, seed),),
    )  # fmt: skip


def decode(step_id: int, req_pool_indices: list[int], positions: list[int]) -> Step:
    """Build a step with one decode row at the given position for each request, on its last sampled token."""
    n = len(req_pool_indices)
    none = np.empty(0, np.int32)
    pending = np.full(n, -1, np.int32)
    ones = np.ones(n, np.int32)
    return Step(step_id, i32(*req_pool_indices), i32(*positions), ones, ones, n, 0, pending, (none, none, none))


def test_two_steps_in_flight(engine: TorchEngine, path: Path) -> None:
    """Two steps can be in flight; results come in the order of launch; a further `result` raises."""
    prompt = [5, 6, 7, 8, 9]
    engine.launch(prefill(0, 3, prompt, [9, 4, 7], GREEDY))
    engine.launch(decode(1, [3], [5]))
    first = engine.result()
    engine.launch(decode(2, [3], [6]))
    results = [first, engine.result(), engine.result()]
    assert [r.id for r in results] == [0, 1, 2]
    assert all(r.tokens.shape == (1, 1) and r.tokens.dtype == np.int32 and r.accepted.tolist() == [1] for r in results)
    Oracle(path).check(prompt, [int(r.tokens[0, 0]) for r in results])
    with pytest.raises(EngineDeadError, match="every launched step was read"):
        engine.result()


def test_step_without_sampling(engine: TorchEngine, path: Path) -> None:
    """A chunk that is not the prompt's last samples no token; the next step mixes a decode row and the last chunk."""
    a, b = [11, 12, 13], list(range(20, 30))
    engine.launch(prefill(0, 0, a, [0, 1], GREEDY))
    chunk = prefill(1, 1, b[:6], [2, 3, 5], GREEDY)
    engine.launch(replace(chunk, num_sampled_tokens=i32(0)))
    none = np.empty(0, np.int32)
    mixed = Step(2, i32(0, 1), i32(3, 6), i32(1, 4), i32(1, 1), 1, 0, i32(-1, *b[6:]), (none, none, none))
    engine.launch(mixed)
    first, unsampled, both = engine.result(), engine.result(), engine.result()
    assert unsampled.accepted.tolist() == [0]
    assert unsampled.tokens.tolist() == [[0]]
    oracle = Oracle(path)
    oracle.check(a, [int(first.tokens[0, 0]), int(both.tokens[0, 0])])
    oracle.check(b, [int(both.tokens[1, 0])])


def test_logprobs(engine: TorchEngine, path: Path) -> None:
    """The engine reports log-probabilities only for requests that ask for them; they equal those of transformers."""
    prompt = [7, 8, 9]
    asked = SamplingParams(temperature=0.0, max_tokens=4, logprobs=2)
    engine.launch(prefill(0, 2, prompt, [0], asked))
    # The next request in the same request-pool row asks for none. The first step, still in flight, is not affected.
    engine.launch(prefill(1, 2, prompt, [1], GREEDY))
    first, second = engine.result(), engine.result()
    assert second.logprobs is None
    assert first.logprobs is not None
    assert first.logprobs[0] is not None
    (entry,) = first.logprobs[0]
    oracle = Oracle(path)
    with torch.inference_mode():
        expected = oracle.model(torch.tensor([prompt])).logits[0, -1].log_softmax(0)
    assert entry.chosen == pytest.approx(float(expected.max()), abs=1e-4)
    assert list(entry.top_ids) == expected.topk(2).indices.tolist()
    assert entry.top == pytest.approx(expected.topk(2).values.tolist(), abs=1e-4)


def test_device_failure(manager: PluginManager, path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A RuntimeError in a step becomes `EngineDeadError`. The engine can then be closed once or twice."""
    engine = engine_of(manager, path, "num_pages=8")

    def fail(*args: Any) -> None:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    monkeypatch.setattr(engine.model, "forward", fail)
    with pytest.raises(EngineDeadError, match="rank 0 failed on cpu: CUDA error: an illegal memory access"):
        engine.launch(prefill(0, 0, [5], [0], GREEDY))
    engine.close()
    engine.close()
    with pytest.raises(EngineDeadError, match="closed"):
        engine.launch(prefill(0, 0, [5], [0], GREEDY))


def test_bind_runs_on_engine_stream(manager: PluginManager, path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`AttentionBackend.bind` runs on the rank's own device and stream, because a backend may launch kernels in it.

    Regression test: on rank 1, FlashInfer's first launch went to the first GPU, and its first prefill failed.
    """
    computing, bound = [False], []

    @contextmanager
    def watched(engine: TorchEngine) -> Iterator[None]:
        computing[0] = True
        yield
        computing[0] = False

    def bind(backend: TorchAttention, *args: Any) -> None:
        bound.append(computing[0])
        original(backend, *args)

    original = TorchAttention.bind
    monkeypatch.setattr(TorchEngine, "_computing", watched)
    monkeypatch.setattr(TorchAttention, "bind", bind)
    engine_of(manager, path, "attention=torch", "num_pages=8").close()
    assert bound == [True]


def test_promise_7_followers_get_every_step(engine: TorchEngine) -> None:
    """Rank 0's engine sends each step before launching it; `follow` replays the bytes with the same results."""
    sent: list[bytes] = []
    engine.peers = Peers()
    engine.peers.send = sent.append  # type: ignore[method-assign]
    steps = [prefill(0, 4, [5, 6], [0], GREEDY), decode(1, [4], [2])]
    tokens = []
    for step in steps:
        engine.launch(step)
        tokens.append(engine.result().tokens.tolist())
    engine.peers = None
    # Replay the encoded steps: the tokens are the same, with at most two steps in flight.
    replay = _CountingEngine(engine)
    queue = iter([*sent, None])
    follow(replay, lambda: next(queue))
    assert replay.tokens == tokens
    assert replay.max_in_flight == 2


class _CountingEngine:
    """Wrapper of an engine that records the tokens and the largest number of steps in flight."""

    def __init__(self, engine: TorchEngine):
        self.engine, self.spec = engine, engine.spec
        self.in_flight = self.max_in_flight = 0
        self.tokens: list[Any] = []

    def launch(self, step: Step) -> None:
        self.engine.launch(step)
        self.in_flight += 1
        self.max_in_flight = max(self.max_in_flight, self.in_flight)

    def result(self) -> Any:
        result = self.engine.result()
        self.in_flight -= 1
        self.tokens.append(result.tokens.tolist())
        return result

    def close(self) -> None: ...


# ---- graphs ------------------------------------------------------------------------------------------

REPLAY = """
from dataclasses import dataclass, replace
import torch
from minisgl import hookimpl
from minisgl.attention import GraphKey
from minisgl.plugins.attention.torch import Torch, TorchAttention

@dataclass
class WithGraphs(Torch):
    def build(self, device):
        backend = Backend(self, device)
        backend.config = self
        return backend

@dataclass
class WithoutGraphs(WithGraphs):
    pass

class Backend(TorchAttention):
    def needs(self):
        return replace(super().needs(), graph=type(self.config) is WithGraphs)

@dataclass
class Replay:
    def build(self):
        return Runner()

class Runner:
    '''Runner that keeps the buffers and calls the forward pass on them again instead of replaying a recording.'''
    def __init__(self):
        self.ran = []
    def buckets(self, max_rows):
        return [GraphKey(n) for n in (1, 2, 4, 8) if n <= max_rows]
    def capture(self, keys, build, forward):
        self.buffers, self.forward = {}, forward
        for key in keys:
            self.buffers[key] = build(key)
            forward(self.buffers[key])
    def pick(self, rows, q_len, uniform):
        fitting = [key for key in self.buffers if key.rows >= rows] if uniform else []
        return min(fitting, default=None)
    def run(self, key):
        self.ran.append(key.rows)
        return self.forward(self.buffers[key])
    def close(self):
        pass

@hookimpl
def minisgl_configs():
    yield "attention", "with_graphs", WithGraphs
    yield "attention", "without_graphs", WithoutGraphs
    yield "graph", "eager_replay", Replay
"""


def test_decode_steps_run_in_buckets(path: Path, tmp_path: Path) -> None:
    """Decode steps run in the graph runner's buckets: the whole forward pass on static buffers, as a graph records it.

    A backend with ``AttnNeeds.graph`` False gets no buckets.
    """
    (tmp_path / "replay.py").write_text(REPLAY)
    words = [
        f"plugins={tmp_path / 'replay.py'}",
        "graph=eager_replay",
        "device=cpu",
        "max_running_requests=6",
        "num_pages=99",
    ]
    rng = np.random.default_rng(0)
    prompts = [rng.integers(3, 320, n).tolist() for n in (3, 17, 5, 9, 30, 2)]
    params = [SamplingParams(temperature=0.0, max_tokens=m, ignore_eos=True) for m in (12, 3, 9, 7, 5, 10)]
    with LLM(str(path), overrides=[*words, "attention=with_graphs"]) as llm:
        outputs = llm.generate(prompts, params)
        assert isinstance(llm.engine, TorchEngine)
        ran = llm.engine.graph.ran  # type: ignore[attr-defined]
    assert set(ran) == {1, 2, 4}  # steps of 5 or 6 rows are larger than any bucket and run eagerly
    Oracle(path).check_all(prompts, [output.token_ids for output in outputs])
    with LLM(str(path), overrides=[*words, "attention=without_graphs"]) as llm:
        llm.generate(prompts[:1], params[:1])
        assert llm.engine.graph.ran == []  # type: ignore[union-attr, attr-defined]


def test_close_releases_memory(manager: PluginManager, path: Path) -> None:
    """A closed engine releases pool, model and backend, so that another engine of the same size fits on the device."""
    engine = engine_of(manager, path, "num_pages=16", "max_running_requests=2")
    refs = [weakref.ref(part) for part in (engine.ctx.pool, engine.model, engine.attention)]
    engine.close()
    engine.close()
    gc.collect()
    assert [ref() for ref in refs] == [None, None, None]
    with pytest.raises(EngineDeadError, match="closed"):
        engine.launch(None)  # type: ignore[arg-type]
