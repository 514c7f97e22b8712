"""Without ``plugins/grammar``, a request with a grammar is refused by name, and others are served."""

from __future__ import annotations

import numpy as np
import pytest

from minisgl.core import EngineSpec, InvalidRequestError
from minisgl.options.compose import compose
from minisgl.plugin_manager.manager import PluginManager
from minisgl.sampling_params import Grammar, SamplingParams
from minisgl.scheduler.build import build_scheduler
from minisgl.testing.null import NullEngine
from minisgl.tokenizer.tokenizer import build_grammars


def test_grammars_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("minisgl.tokenizer.tokenizer.exists", lambda name: False)
    manager = PluginManager.load()
    grammars = build_grammars(lambda: None, manager, None)
    spec = EngineSpec(page_size=4, num_pages=16, max_running_requests=2, max_seq_len=32, vocab_size=64)
    scheduler = build_scheduler(compose(manager, ["device=cpu"]), manager, NullEngine(spec), grammars=grammars)  # type: ignore[arg-type]
    prompt = np.array([1, 2, 3], np.int32)
    with pytest.raises(InvalidRequestError, match="plugins/grammar, which is missing") as error:
        scheduler.add_request(1, prompt, SamplingParams(grammar=Grammar("regex", "a", field="response_format")))
    assert error.value.field == "response_format"
    scheduler.add_request(2, prompt, SamplingParams(max_tokens=1))
    assert scheduler.has_work


@pytest.mark.parametrize("plugin", ["constraint/base", "constraint/manager"])
def test_grammars_without_constraints_are_refused(plugin: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The grammar is not read: the request alone is refused, by a message that names the plugin."""
    monkeypatch.setattr("minisgl.plugins.grammar.lazy.exists", lambda name: not name.endswith(plugin.replace("/", ".")))
    grammars = build_grammars(lambda: pytest.fail("the options were read"), PluginManager.load(), None)
    for call in (grammars.check, lambda grammar: grammars.constraint(grammar, 64, ())):
        with pytest.raises(InvalidRequestError, match=f"plugins/{plugin}, which is missing") as error:
            call(Grammar("regex", "a", field="response_format"))
        assert error.value.field == "response_format"
