"""The training text with tools, and the fine-tuning on it."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer

pytest.importorskip("transformers")

from safetensors.torch import load_file

from minisgl.chapters.tutor import corpus, packing, tools, tune
from minisgl.chapters.tutor.tokenizer import CHAT_TEMPLATE
from minisgl.chapters.tutor.words import held_out
from minisgl.models.shipped import weights_dir
from minisgl.plugins.http.apis.full_answer import message
from minisgl.plugins.tokenizer.exact.template import CheckedTemplate
from minisgl.plugins.tool_parser.hermes import HermesParser, matches

TEMPLATE = CheckedTemplate(CHAT_TEMPLATE)
FAMILIES = {name for names in corpus._FAMILIES.values() for name in names} | {"lookup", "absent"}


@pytest.fixture(scope="module")
def conversations() -> list[corpus.Conversation]:
    """Generate 250 training conversations with tools."""
    rng = random.Random(4)
    return [tools.conversation(rng, 1500) for _ in range(250)]


def turns_of(talks: list[corpus.Conversation], *families: str) -> list[corpus.Turn]:
    """Return the turns of some families."""
    return [turn for talk in talks for turn in talk.turns if turn.family in families]


def call_of(answer: str) -> tuple[str, dict[str, Any]]:
    """Return the name and the arguments of the call that an answer is."""
    call = json.loads(answer.removeprefix("<tool_call>\n").removesuffix("\n</tool_call>"))
    return call["name"], call["arguments"]


def test_template_form() -> None:
    """The chat template writes calls in the form of Hermes."""
    assert matches(CHAT_TEMPLATE)


def test_template_without_tools() -> None:
    """Without tools, the chat template writes each message between its marks, and nothing else."""
    parts = [{"type": "text", "text": "Hel"}, {"type": "text", "text": "lo"}]
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": parts}]
    assert TEMPLATE.render_once(messages, True, {}) == (
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHello<|im_end|>\n<|im_start|>assistant\n"
    )


def test_conversation_follows_template() -> None:
    """A conversation has the text that the chat template writes for a client's messages, calls and results."""
    rng = random.Random(6)
    for system in (None, "Be brief."):
        offered = tools.tool_list(rng, 1)
        tool = next(tool for tool in offered if tool["function"]["name"] in tools._NAMES)
        turns = tools.calculation(rng, "train", tool)
        talk = corpus.Conversation(turns, tools.with_tools(system, offered))
        name, arguments = call_of(turns[0].answer)
        result = turns[1].user.removeprefix("<tool_response>\n").removesuffix("\n</tool_response>")
        call = {"id": "1", "type": "function", "function": {"name": name, "arguments": json.dumps(arguments)}}
        messages: list[dict[str, Any]] = [{"role": "system", "content": system}] if system else []
        messages += [
            {"role": "user", "content": turns[0].user},
            {"role": "assistant", "content": None, "tool_calls": [call]},
            {"role": "tool", "tool_call_id": "1", "content": result},
            {"role": "assistant", "content": turns[1].answer},
        ]
        text = "".join(text for text, _ in packing.segments(talk))
        assert TEMPLATE.render(messages, False, {}, offered) == text + "\n"


def test_several_results() -> None:
    """The results of calls in one message are one user message."""
    calls = [{"type": "function", "function": {"name": "f", "arguments": {"x": x}}} for x in (1, 2)]
    messages = [
        {"role": "user", "content": "Go."},
        {"role": "assistant", "content": "Yes.", "tool_calls": calls},
        *({"role": "tool", "content": text} for text in ("one", "two")),
    ]
    text = TEMPLATE.render(messages, True)
    assert text.partition("assistant\n")[2] == (
        'Yes.\n<tool_call>\n{"name": "f", "arguments": {"x": 1}}\n</tool_call>\n'
        '<tool_call>\n{"name": "f", "arguments": {"x": 2}}\n</tool_call><|im_end|>\n'
        "<|im_start|>user\n<tool_response>\none\n</tool_response>\n<tool_response>\ntwo\n</tool_response><|im_end|>\n"
        "<|im_start|>assistant\n"
    )


def test_calls(conversations: list[corpus.Conversation]) -> None:
    """The server's parser reads each call, and the system message presents the tool that it calls."""
    calls = 0
    for talk in conversations:
        assert talk.system is not None
        offered = [
            json.loads(line) for line in talk.system.partition("<tools>\n")[2].split("\n</tools>")[0].split("\n")
        ]
        for turn in talk.turns:
            if turn.family != "call":
                assert "<tool_call>" not in turn.answer
                continue
            calls += 1
            name, arguments = call_of(turn.answer)
            (tool,) = (tool for tool in offered if tool["name"] == name)
            assert list(arguments) == tool["parameters"]["required"]
            reader = HermesParser().reader([name], None, False)
            (call,) = message(reader.feed(turn.answer) + reader.finish())["tool_calls"]
            assert (call["function"]["name"], json.loads(call["function"]["arguments"])) == (name, arguments)
    assert calls > 150


def test_when_to_call(conversations: list[corpus.Conversation]) -> None:
    """Half of the conversations have calls. In the others, a calculator changes no answer: none has a sum to add."""
    calling = [talk for talk in conversations if turns_of([talk], "call")]
    assert 0.35 < len(calling) / len(conversations) < 0.65
    assert {turn.family for turn in turns_of(conversations, *FAMILIES)} >= {
        "lookup",
        "count",
        "glossary",
        "talk",
        "sum",
    }
    for talk in conversations:
        assert talk.system is not None
        if any(f'"name": "{name}"' in talk.system for name in tools._NAMES):
            assert not any(map(tools._calculates, talk.turns))


def test_results_are_used(conversations: list[corpus.Conversation]) -> None:
    """The answer after a result contains the result's number, or the message of its error."""
    results = turns_of(conversations, "result")
    failed = [turn for turn in results if turn.answer.startswith("The calculator failed: ")]
    assert 0.05 < len(failed) / len(results) < 0.25
    for turn in results:
        value = turn.answer.rpartition("failed: " if turn in failed else " = ")[2].removesuffix(".")
        assert value in turn.user


def test_held_out_expressions(conversations: list[corpus.Conversation]) -> None:
    """Training text calculates no held-out expression; the exam only held-out ones."""
    for turn in turns_of(conversations, "call"):
        assert not held_out(f"calculator {next(iter(call_of(turn.answer)[1].values()))}")
    for question in tools.exam("call", 30):
        assert held_out(f"calculator {next(iter(call_of(question.answer)[1].values()))}")


@pytest.mark.parametrize("family", tools.EXAMS)
def test_exam(family: str) -> None:
    """The same seed gives the same questions, which the chat template renders with their tools."""
    questions = tools.exam(family, 5)
    assert questions == tools.exam(family, 5) != tools.exam(family, 5, seed=1)
    for question in questions:
        assert "<tools>" in TEMPLATE.render(question.messages, True, {}, question.tools)


def test_rows() -> None:
    """Every third row has tools; the others have the domains of the first training by their shares."""
    names = [packing.ToolPacker.domain_of(row) for row in range(30)]
    assert names[::3] == ["tools"] * 10
    assert [name for name in names if name != "tools"] == list(packing.DOMAIN_CYCLE)
    names = [packing.FewToolsPacker.domain_of(row) for row in range(24)]
    assert names[::6] == ["tools"] * 4
    assert [name for name in names if name != "tools"] == list(packing.DOMAIN_CYCLE)
    books = [packing.HandbookPacker.domain_of(row) for row in range(48)]
    assert (books[::2], books[1::2]) == (names, ["handbook"] * 24)
    packer = packing.ToolPacker(weights_dir() / "tokenizer.json", seed=3, length=512)
    rows = packer.rows(0, 2)
    tokenizer = Tokenizer.from_file(str(weights_dir() / "tokenizer.json"))
    assert ["<tools>" in tokenizer.decode(row.tolist()) for row in rows.tokens] == [True, False]


def test_tune(tmp_path: Path) -> None:
    """Tuning begins with the shipped weights, from which replayed rows do not differ, and writes a template."""
    small = ["--rows", "3", "--length", "128", "--workers", "0", "--device", "cpu", "--steps", "1"]
    tuner = tune.Tuner(tune.options_of(["--out", str(tmp_path / "out"), *small]))
    rows = packing.Rows(
        *map(torch.from_numpy, tuner.options.packer(weights_dir() / "tokenizer.json", 0, 128).rows(0, 3))
    )
    mask = tune.models.document_mask(rows.documents)
    losses, weights = tuner.batch_losses(rows, mask)
    assert losses.shape == weights.shape == (3, 127)
    assert losses[0].mean() > 0.1
    assert losses[1:].abs().max() < 1e-4
    tuner.run()
    settings = json.loads((tmp_path / "out" / "tokenizer_config.json").read_text())
    assert settings["chat_template"] == CHAT_TEMPLATE
    before, after = (load_file(path / "model.safetensors") for path in (weights_dir(), tmp_path / "out"))
    assert before.keys() == after.keys()
    assert all(after[name].dtype == torch.bfloat16 for name in after)
