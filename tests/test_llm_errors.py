"""`minisgl.llm.LLM` after a refused request, an error and Ctrl-C: it goes on, or every call says that it is closed."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import minisgl
import minisgl.llm
from minisgl.core import EngineDeadError, EngineSpec, InvalidRequestError, SamplingParams
from minisgl.llm import LLM, llm_class
from minisgl.testing.checkpoints import tiny_checkpoint
from minisgl.testing.idle import check_idle
from minisgl.testing.sim import SimEngine
from minisgl.testing.truth import SimRequest

GREEDY = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True)


@pytest.fixture
def llm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[LLM]:
    """Return an LLM, without care for Ctrl-C, on the simulated engine, which checks every step that it gets."""
    requests: dict[int, SimRequest] = {}
    spec = EngineSpec(page_size=4, num_pages=24, max_running_requests=4, max_seq_len=64, vocab_size=320)
    monkeypatch.setattr(minisgl.llm, "start_engine", lambda *_: SimEngine(spec, requests))
    path = tiny_checkpoint("qwen3", tmp_path, tokenizer=True)
    with LLM(str(path), overrides=["device=cpu", "page_size=4"]) as made:
        add = made.scheduler.add_request

        def add_request(uid: int, prompt_ids: Any, params: SamplingParams) -> None:
            requests[uid] = SimRequest(list(prompt_ids), params)
            add(uid, prompt_ids, params)

        monkeypatch.setattr(made.scheduler, "add_request", add_request)
        yield made


def test_the_exported_class_adds_to_the_plain_one() -> None:
    assert minisgl.LLM is llm_class()
    assert issubclass(minisgl.LLM, LLM)


def test_a_refused_request_cancels_its_call_only(llm: LLM) -> None:
    kept = llm.add_request([5, 6, 7], GREEDY)
    with pytest.raises(InvalidRequestError, match="prompt 1"):
        llm.generate([[8, 9], []], GREEDY)
    ended = []
    while llm.has_unfinished_requests():
        ended += [output.request_id for output in llm.step() if output.finished]
    assert ended == [kept]
    check_idle(llm.scheduler)


@pytest.mark.parametrize("error", [EngineDeadError("the device is gone"), KeyboardInterrupt(), ZeroDivisionError()])
def test_another_error_closes_it(llm: LLM, monkeypatch: pytest.MonkeyPatch, error: BaseException) -> None:
    def fail(*_: Any) -> Any:
        raise error

    monkeypatch.setattr(llm.engine, "result", fail)
    with pytest.raises(type(error)):
        llm.generate([[5, 6, 7]], GREEDY)
    assert llm.engine.closed  # type: ignore[union-attr]
    for call in (llm.step, llm.has_unfinished_requests, lambda: llm.generate([[1]])):
        with pytest.raises(RuntimeError, match=f"this LLM was closed after {type(error).__name__}") as caught:
            call()
        assert (type(caught.value) is EngineDeadError) == isinstance(error, EngineDeadError)
    llm.close()
