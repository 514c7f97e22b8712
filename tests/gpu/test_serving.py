"""Serving on a GPU with the default backends: FlashInfer and Triton, in CUDA graphs.

No launch may make the host wait for the device.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import pytest
import torch

from minisgl import LLM, SamplingParams
from minisgl.core import Step, StepResult, TokenMasks
from minisgl.engine.build import build_engine
from minisgl.models.shipped import weights_dir
from minisgl.options.compose import compose
from minisgl.plugin_manager.manager import PluginManager
from minisgl.scheduler.build import build_scheduler
from minisgl.testing.attention import CASES, AttentionCase, run_case
from minisgl.testing.idle import check_idle
from minisgl.testing.oracle import Oracle

# Without cases with a window or a soft cap, for each of which FlashInfer compiles for a minute; Triton's tests have
# them. None of these backends has attention sinks.
SERVED = [
    replace(case, dtype=torch.bfloat16, head_dim=head_dim)
    for case in dict.fromkeys(
        replace(c, dtype=torch.bfloat16) for c in CASES if c.window < 0 and not c.soft_cap and not c.sinks
    )
    for head_dim in (64, 128)
]
TRTLLM = ("attention=hybrid", "attention.decode=trtllm")
QUESTIONS = ("What is a radix cache?", "What is 17 + 25?", "Count from 3 to 9.", "Hello!")
GREEDY = SamplingParams(max_tokens=24, temperature=0.0, logprobs=0)


@pytest.fixture(autouse=True)
def on_a_gpu(device: torch.device) -> None:
    """Skip all tests of the module without a GPU."""
    if device.type != "cuda":
        pytest.skip("needs a CUDA device")


def needs_packages(words: tuple[str, ...]) -> None:
    """Skip the test if a package that the options need is not installed."""
    if words == TRTLLM:
        pytest.importorskip("flashinfer", reason="FlashInfer is not installed here")
    if words == ("attention=flash_attn",):
        pytest.importorskip("flash_attn.cute", reason="FlashAttention 4 is not installed here")


def asked(llm: LLM, count: int) -> list[list[int]]:
    """Return the token ids of ``count`` questions in the chat template."""
    texts = [f"<|im_start|>user\n{QUESTIONS[i % 4]}<|im_end|>\n<|im_start|>assistant\n" for i in range(count)]
    return [llm.tokenizer.encode(text) for text in texts]  # type: ignore[union-attr]


@pytest.mark.parametrize("name", ["flashinfer", "hybrid", "auto"])
@pytest.mark.parametrize("case", dict.fromkeys(SERVED), ids=str)
def test_attention_agrees_with_softmax_in_float64(name: str, case: AttentionCase, device: torch.device) -> None:
    pytest.importorskip("flashinfer", reason="FlashInfer is not installed here")
    manager = PluginManager.load()
    got, want = run_case(manager.build("attention", manager.make("attention", name), device=device), case, device)
    torch.testing.assert_close(got.cpu(), want.cpu(), atol=2e-2, rtol=2e-2)


@pytest.mark.parametrize(
    "words",
    [
        (),
        ("page_size=1", "scheduler=mixed", "max_prefill_tokens=16"),
        ("overlap=false",),
        ("attention=flash_attn",),
        TRTLLM,
    ],
    ids=" ".join,
)
@pytest.mark.parametrize("graph", ["cuda", "none"])
def test_promise_8_bfloat16(words: tuple[str, ...], graph: str) -> None:
    """Greedy tokens in a batch of 64 are those of transformers, up to ties within rounding.

    The tolerance is twice the largest difference between the log-probabilities of batch 1 and of batch 64.
    """
    needs_packages(words)
    path = weights_dir("tutor")
    options = ["dtype=bfloat16", "device=cuda", "num_pages=8192", f"graph={graph}", *words]
    with LLM(str(path), overrides=options) as llm:
        prompts = asked(llm, 64)
        alone = [llm.generate([prompt], GREEDY)[0] for prompt in prompts[:4]]
        batch = llm.generate(prompts, GREEDY)
        check_idle(llm.scheduler)
    spread = 0.0
    for one, many in zip(alone, batch[:4], strict=True):
        for a, b in zip(one.logprobs or (), many.logprobs or (), strict=False):
            spread = max(spread, abs(a.chosen - b.chosen))
    assert spread < 0.2, "batch 1 and batch 64 differ by more than bfloat16 explains"
    Oracle(path).check_all(prompts, [output.token_ids for output in batch], eps=max(2 * spread, 0.02))


class NoSyncEngine:
    """An engine wrapper that raises an error if a launch makes the host wait for the device, once ``forbid`` is set."""

    def __init__(self, engine):  # type: ignore[no-untyped-def]
        self.engine, self.spec, self.eos_ids = engine, engine.spec, engine.eos_ids
        self.forbid = False

    @contextmanager
    def forbidden(self) -> Iterator[None]:
        """Make waits for the device an error inside the context."""
        torch.cuda.set_sync_debug_mode("error" if self.forbid else "default")
        try:
            yield
        finally:
            torch.cuda.set_sync_debug_mode("default")

    def launch(self, step: Step) -> None:
        """Launch the step, without any wait for the device."""
        with self.forbidden():
            self.engine.launch(step)

    def sample(self, masks: TokenMasks) -> None:
        """Sample the step launched last, without any wait for the device."""
        with self.forbidden():
            self.engine.sample(masks)

    def result(self) -> StepResult:
        """Return the result of the oldest step, which may wait."""
        return self.engine.result()

    def close(self) -> None:
        """Close the engine."""
        self.engine.close()


@pytest.mark.parametrize(
    "attention",
    [
        ("attention=auto",),
        ("attention=auto", "speculation=ngram", "speculation.match_tokens=1"),
        ("attention=flashinfer",),
        ("attention=triton",),
        ("attention=flash_attn",),
        TRTLLM,
    ],
    ids=" ".join,
)
def test_no_launch_waits_for_the_device(attention: tuple[str, ...]) -> None:
    """Mixed batches, admissions and all kinds of sampling run without a wait for the device.

    The first round is exempt, because libraries initialise themselves in it.
    """
    needs_packages(attention)
    manager = PluginManager.load()
    words = [*attention, "device=cuda", "dtype=bfloat16", "num_pages=4096", "scheduler=mixed"]
    config = compose(manager, ["model=tutor", "max_prefill_tokens=64", *words])
    engine = NoSyncEngine(build_engine(config, manager))
    try:
        scheduler = build_scheduler(config, manager, engine)  # type: ignore[arg-type]
        kinds = (
            {"temperature": 0.0},
            {"temperature": 0.7, "top_p": 0.9},
            {"temperature": 0.7, "top_k": 5, "min_p": 0.1},
            {"temperature": 0.0, "repetition_penalty": 1.3, "logit_bias": {5: 2.0}, "logprobs": 3},
        )
        uid = 0
        for engine.forbid in (False, True):
            for _ in range(3):
                for kind in kinds:
                    params = SamplingParams(max_tokens=12, ignore_eos=True, seed=1, **kind)  # type: ignore[arg-type]
                    scheduler.add_request(uid, [(7 * uid + j) % 2000 for j in range(20 + 9 * (uid % 7))], params)
                    uid += 1
            while scheduler.has_work:
                scheduler.step()
        check_idle(scheduler)
    finally:
        engine.close()
