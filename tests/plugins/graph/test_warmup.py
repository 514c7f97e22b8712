"""The steps of a warm-up: they use every part of sampling, and leave nothing behind that a request can see."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from minisgl import LLM, SamplingParams
from minisgl.core import PENDING, Step
from minisgl.engine.engine import TorchEngine
from minisgl.options.compose import compose
from minisgl.plugin_manager.manager import PluginManager
from minisgl.plugins.graph.replaying import warmup
from minisgl.testing.idle import check_idle
from minisgl.testing.ranks import leader_engine
from minisgl.testing.samplers import full_sampler
from minisgl.testing.steps import RowSpec, StepWriter

OPTIONS = ["device=cpu", "num_pages=64", "max_prefill_tokens=48", "max_running_requests=4", "max_seq_len=200"]


def test_a_warm_up_leaves_nothing_behind(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """Page table and KV pool, but for the scratch page, are as before, and requests get the same tokens."""
    params = [SamplingParams(max_tokens=8, temperature=0.7, seed=3), SamplingParams(max_tokens=8, temperature=0.0)]
    with LLM("tutor", overrides=[*OPTIONS, "verification_rounds=3"]) as llm:
        want = [output.token_ids for output in llm.generate(["Hello", "What is 2 + 2?"], params)]
    with LLM("tutor", overrides=[*OPTIONS, "verification_rounds=3"]) as llm:
        engine = llm.engine
        assert isinstance(engine, TorchEngine)
        monkeypatch.setattr(warmup, "WARMED_DEVICES", ("cpu",))
        caplog.set_level("INFO", "minisgl")
        warmup.warm_up(engine, llm.config, drafting=True)
        assert "to warm up in" in caplog.text
        assert (engine.model_runner.inputs.page_table == engine.spec.num_pages).all()
        assert engine.ctx.pool is not None
        for k, v in map(engine.ctx.pool.layer, range(2)):
            assert not k[: engine.spec.num_pages].any()
            assert not v[: engine.spec.num_pages].any()
        got = [output.token_ids for output in llm.generate(["Hello", "What is 2 + 2?"], params)]
        check_idle(llm.scheduler)
    assert got == want


def test_all_ranks_warm_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """With two ranks, both compute the same steps, and a prompt's first token is that of one rank."""
    manager, tokens = PluginManager.load(), []
    for size, devices in ((1, ()), (2, ("cpu",))):
        monkeypatch.setattr(warmup, "WARMED_DEVICES", devices)
        config = compose(manager, ["model=tutor", *OPTIONS, f"tp={size}", "graph=simulated"])
        with leader_engine(config, manager) as engine:
            prompt = RowSpec.prompt(0, range(30, 60), SamplingParams(temperature=0.0))
            engine.launch(StepWriter(engine.spec).step(prompt))
            tokens.append(engine.result().tokens.tolist())
    assert tokens[0] == tokens[1]


@pytest.mark.parametrize("rows", [1, 2, 300])
@pytest.mark.parametrize("max_tokens", [1, 2, 100, 8192])
def test_steps_fit_the_engine(rows: int, max_tokens: int) -> None:
    """No step has more rows, tokens or positions than the engine serves, or a row without a token."""
    from minisgl.core import EngineSpec

    spec = EngineSpec(16, 100, rows, 4096, 1000)
    steps = list(warmup._Steps(spec).all(max_tokens, drafting=True, rounds=3))
    assert [step.id for step in steps] == list(range(len(steps)))
    for step in steps:
        assert 0 < step.rows <= rows
        prompt_tokens = int(step.num_scheduled_tokens[step.num_continuing :].sum())
        assert prompt_tokens <= max_tokens
        assert step.num_scheduled_tokens.min() > 0
        assert (step.num_computed_tokens + step.rounds * step.num_scheduled_tokens).max() < spec.max_seq_len
        assert len(step.input_ids) == step.num_scheduled_tokens.sum()
        assert Step.decode(step.encode()).rows == step.rows
        continuing_tokens = len(step.input_ids) - prompt_tokens
        assert np.count_nonzero(step.input_ids[:continuing_tokens] == PENDING) == step.num_continuing
    assert any(step.num_verify for step in steps) == (max_tokens > 1)
    assert any(step.rounds > 1 for step in steps) == (max_tokens > 3)
    assert all(step.rounds == 1 for step in warmup._Steps(spec).all(max_tokens, drafting=True))


def test_every_part_of_sampling_is_used() -> None:
    """The parameters of the warm-up have every flag that a request can have, alone or with others."""
    each = full_sampler(4, 1000, torch.device("cpu"))
    flags = 0
    for kind in warmup.KINDS:
        flags |= each._flags_of(kind)
    assert flags == sum(each.groups)
