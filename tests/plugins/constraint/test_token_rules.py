"""The rules about tokens, with ``tutor``: without overlap, with drafts, a small pool, several choices, a grammar."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np
import pytest

from minisgl import LLM, SamplingParams
from minisgl.core import InvalidRequestError, Req
from minisgl.plugin_manager.manager import PluginManager
from minisgl.plugins.constraint.after_token import AfterToken
from minisgl.plugins.constraint.base import Constraint
from minisgl.plugins.constraint.token_rules import TokenRules, bad_word_ids
from minisgl.sampling_params import Grammar
from minisgl.testing.idle import check_idle

USER = [{"role": "user", "content": "What is 12 + 30?"}]
RUNS = {
    "overlap": ("num_pages=256",),
    "no overlap": ("num_pages=256", "overlap=false"),
    "drafts": ("num_pages=256", "speculation=ngram"),
    "small pool": ("num_pages=12",),
}


def answers(options: Sequence[str], params: SamplingParams, count: int = 1) -> tuple[list[Any], LLM]:
    """Return the choices of ``count`` chats, and the closed LLM that answered them."""
    with LLM("tutor", overrides=["device=cpu", *options]) as llm:
        outputs = llm.chat([USER] * count, params)
        stats = llm.scheduler.stats()
        check_idle(llm.scheduler)
    if "num_pages=12" in options and count > 1:
        assert stats["retractions"] > 0
    return [choice for output in outputs for choice in output.choices], llm


@pytest.mark.parametrize("run", RUNS)
def test_min_tokens(run: str) -> None:
    """No answer ends before, its text goes on where it would have ended, and it is the same in each kind of run."""
    params = SamplingParams(max_tokens=80, temperature=0.0, n=3, min_tokens=40)
    (short, *_), llm = answers((), msgspec.structs.replace(params, min_tokens=0, n=1))
    assert short.finish_reason == "stop"
    assert len(short.token_ids) < 40
    found, _ = answers(RUNS[run], params, 6)
    reference, _ = answers(("num_pages=256",), params)
    ends = llm.scheduler.eos_ids
    for choice in found:
        assert len(choice.token_ids) >= 40
        assert not ends & set(choice.token_ids[:40])
        assert choice.token_ids == reference[0].token_ids
        assert choice.token_ids[: len(short.token_ids) - 1] == short.token_ids[:-1]


def test_min_tokens_and_stops() -> None:
    """Stop token ids are forbidden before, and stop strings in the text before are text."""
    (plain, *_), _ = answers((), SamplingParams(max_tokens=60, temperature=0.0, ignore_eos=True))
    token, word = plain.token_ids[3], plain.text[2:6]
    base = SamplingParams(max_tokens=60, temperature=0.0, ignore_eos=True)
    (early, *_), _ = answers((), msgspec.structs.replace(base, stop_token_ids=(token,)))
    assert len(early.token_ids) == 4
    (late, *_), _ = answers((), msgspec.structs.replace(base, stop_token_ids=(token,), min_tokens=20))
    assert token not in late.token_ids[:20]
    assert len(late.token_ids) >= 20
    (cut, *_), _ = answers((), msgspec.structs.replace(base, stop=(word,)))
    assert word not in cut.text
    (kept, *_), _ = answers((), msgspec.structs.replace(base, stop=(word,), min_tokens=20))
    assert word in kept.text
    assert len(kept.token_ids) >= 20
    assert plain.text.startswith(kept.text)


@pytest.mark.parametrize("run", ["overlap", "drafts", "small pool"])
def test_bad_words(run: str) -> None:
    """A word of several tokens does not come, and the answer is another one only from there on."""
    base = SamplingParams(max_tokens=40, temperature=0.0, ignore_eos=True)
    (plain, *_), llm = answers((), base)
    assert llm.tokenizer is not None
    word = llm.tokenizer.decode(plain.token_ids[4:6]).strip()
    assert word
    ids = bad_word_ids([word], llm.tokenizer.encode)
    found, _ = answers(RUNS[run], msgspec.structs.replace(base, bad_words=(word,)), 8)
    for choice in found:
        assert not any(choice.token_ids[i : i + len(bad)] == bad for bad in ids for i in range(len(choice.token_ids)))
        assert choice.token_ids != plain.token_ids
        assert choice.token_ids == found[0].token_ids


@pytest.mark.parametrize("run", ["overlap", "drafts"])
def test_allowed_token_ids(run: str) -> None:
    allowed = (7, 100, 101, 1500)
    params = SamplingParams(max_tokens=30, temperature=1.0, seed=3, n=2, allowed_token_ids=allowed)
    found, _ = answers(RUNS[run], params)
    assert {token for choice in found for token in choice.token_ids} <= set(allowed)
    assert {choice.finish_reason for choice in found} == {"length"}


def test_rules_and_a_grammar() -> None:
    """A grammar that can only end, ends before ``min_tokens``. Rules that leave nothing of it end that request only."""
    grammar = Grammar("choice", json.dumps(["yes", "no"]))
    with LLM("tutor", overrides=["device=cpu", "num_pages=256"]) as llm:
        params = SamplingParams(max_tokens=40, temperature=0.0, grammar=grammar, min_tokens=20)
        (output,) = llm.chat(USER, params)
        assert (output.choices[0].text in ("yes", "no"), output.choices[0].finish_reason) == (True, "stop")
        forbidden = SamplingParams(max_tokens=40, temperature=0.0, grammar=grammar, allowed_token_ids=(7,))
        rule = SamplingParams(max_tokens=40, temperature=0.0, grammar=Grammar("regex", "[a-z]{3,60}"), min_tokens=20)
        stuck, fine = llm.chat([USER, USER], [forbidden, rule])
        assert stuck.choices[0].finish_reason == "error"
        assert "allowed_token_ids" in stuck.choices[0].error
        assert len(fine.choices[0].token_ids) >= 20
        assert fine.choices[0].text.isalpha()


def test_include_the_stop() -> None:
    with LLM("tutor", overrides=["device=cpu", "num_pages=256"]) as llm:
        base = SamplingParams(max_tokens=40, temperature=0.0, ignore_eos=True)
        (plain,) = llm.chat(USER, base)
        word = plain.choices[0].text[3:8]
        with_word = msgspec.structs.replace(base, stop=(word,), include_stop_str_in_output=True)
        (found,) = llm.chat(USER, with_word)
        assert found.choices[0].text == plain.choices[0].text[: plain.choices[0].text.index(word) + len(word)]
        token = plain.choices[0].token_ids[4]
        stop = msgspec.structs.replace(base, stop_token_ids=(token,))
        (without,) = llm.chat(USER, stop)
        (included,) = llm.chat(USER, msgspec.structs.replace(stop, include_stop_str_in_output=True))
        assert llm.tokenizer is not None
        assert included.choices[0].text == without.choices[0].text + llm.tokenizer.decode([token])


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"min_tokens": -1}, "min_tokens"), ({"min_tokens": 17}, "min_tokens"),
        ({"allowed_token_ids": ()}, "allowed_token_ids"), ({"allowed_token_ids": (320,)}, "allowed_token_ids"),
        ({"allowed_token_ids": (-1,)}, "allowed_token_ids"), ({"allowed_token_ids": (1,) * 20000}, "allowed_token_ids"),
        ({"bad_words": ("",)}, "bad_words"), ({"bad_words": (" ",)}, "bad_words"),
        ({"bad_words": ("x",) * 65}, "bad_words"), ({"bad_words": ("x" * 65,)}, "bad_words"),
    ],
)  # fmt: skip
def test_wrong_rules(fields: dict[str, Any], field: str) -> None:
    with pytest.raises(InvalidRequestError, match=field) as error:
        SamplingParams(**fields).check(320)
    assert error.value.field == field


def test_masks_by_brute_force() -> None:
    """Each bit of each mask is what the rules say, after each of random tokens and drafts."""
    rng = np.random.default_rng(5)
    for vocab_size in (33, 64, 70):
        allowed = tuple(sorted(set(rng.integers(0, vocab_size, 20).tolist()) | {1, 2, 3, 31, 32}))
        words = [[1], [2, 3], [3, 3, 31], [32, 1]]
        params = SamplingParams(max_tokens=50, min_tokens=6, allowed_token_ids=allowed)
        req = Req(1, np.array([5], np.int32), params, 0)
        req.stop_ids = frozenset({3, 32, 99})
        rules, output = TokenRules(req, None, vocab_size, words), []
        while len(output) < 12:
            drafts = rng.choice(allowed, 2).tolist()
            masks = rules.masks(drafts)
            assert masks.shape == (3, -(-vocab_size // 32))
            for k in range(3):
                text = output + drafts[:k]
                bad = {word[-1] for word in words if text[len(text) - len(word) + 1 :] == word[:-1]}
                want = {token for token in allowed if token not in bad}
                if len(text) < 6 and want - req.stop_ids:
                    want -= req.stop_ids
                assert {t for t in range(masks.shape[1] * 32) if masks[k][t // 32] >> t % 32 & 1} == want
            new = rng.choice(allowed, int(rng.integers(1, 3))).tolist()
            rules.advance(new)
            output += new


class Gated(Constraint):
    """A grammar that is not ready before ``ready`` is set."""

    ready = False

    def is_ready(self, seconds: float = 0.0) -> bool:
        return self.ready


def test_rules_around_a_grammar_are_ready_with_it() -> None:
    gate = Gated()
    req = Req(1, np.array([1], np.int32), SamplingParams(min_tokens=2), 0, 0)
    around = [TokenRules(req, gate, 40, []), AfterToken(gate, [4], 40, [0])]
    assert not any(each.is_ready() for each in around)
    gate.ready = True
    assert all(each.is_ready() for each in around)
    assert TokenRules(req, None, 40, []).is_ready()


def test_without_the_plugins(monkeypatch: pytest.MonkeyPatch) -> None:
    """A request that needs a plugin which was deleted is refused by the name of the parameter and of the plugin."""
    load = PluginManager.load_built_in
    monkeypatch.setattr(
        PluginManager, "load_built_in", lambda self, kind, name: kind != "constraint" and load(self, kind, name)
    )
    after = Grammar("regex", "[a-z]+", field="response_format", after="<|im_end|>")
    with LLM("tutor", overrides=["device=cpu", "num_pages=64"]) as llm:
        for params, error in (
            (SamplingParams(min_tokens=2), "min_tokens needs the plugin plugins/constraint/token_rules"),
            (SamplingParams(bad_words=("x",)), "bad_words needs the plugin plugins/constraint/token_rules"),
            (SamplingParams(allowed_token_ids=(7,)), "allowed_token_ids needs the plugin"),
            (SamplingParams(grammar=after), "response_format needs the plugin plugins/constraint/after_token"),
        ):
            with pytest.raises(InvalidRequestError, match=error):
                llm.chat(USER, params)
        assert len(llm.chat(USER, SamplingParams(max_tokens=2, ignore_eos=True))[0].token_ids) == 2
