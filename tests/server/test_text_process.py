"""`TextWorker`: the messages that it sends for each message that it gets, tested without processes."""

from __future__ import annotations

import gc
import json
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from minisgl.core import Finished, Output, SamplingParams
from minisgl.message import (
    Abort,
    Accepted,
    Call,
    ChatPrompt,
    Limits,
    Message,
    NewRequest,
    Outputs,
    Replies,
    Schedule,
    Stop,
    Submit,
    TextPrompt,
    TokensPrompt,
    pack_ids,
    unpack_ids,
)
from minisgl.plugins.http.apis.logprobs import PromptLogprob
from minisgl.plugins.observer.json_lines import JsonFormatter
from minisgl.plugins.tokenizer.exact.tokenizer import BEGIN_CHARS_PER_TOKEN, MAX_CHARS_PER_TOKEN, ExactTokenizer
from minisgl.plugins.tokenizer.warm_up import warm_up
from minisgl.server.text_process import TextWorker, with_read_variables
from minisgl.tokenizer import Tokenizer
from minisgl.tokenizer.chat import ChatTemplate

QUERIES = "minisgl.plugins.http.apis.queries"


class Harness:
    """A `TextWorker`, and the messages that it sent to the API server and to the scheduler."""

    def __init__(self, tokenizer: Tokenizer | None):
        self.api: list[Message] = []
        self.scheduler: list[Message] = []
        self.worker = TextWorker(tokenizer, self.api.append, self.scheduler.append)
        self.worker.handle(Limits(64, 320))

    def ends(self) -> list[Finished]:
        deltas = [delta for message in self.api if isinstance(message, Replies) for delta in message.deltas]
        return [delta.finish for delta in deltas if delta.finish is not None]


@pytest.fixture(scope="module")
def tokenizer(tiny: Path) -> Tokenizer:
    made = Tokenizer.from_dir(tiny)
    assert made is not None
    return made


@pytest.fixture
def harness(tokenizer: Tokenizer) -> Harness:
    return Harness(tokenizer)


def test_prompt_types_are_scheduled(harness: Harness, tokenizer: Tokenizer) -> None:
    messages = [{"role": "user", "content": "Hi"}]
    want = {1: tokenizer.encode("Hello"), 2: [4, 5], 3: tokenizer.chat(messages)}
    for uid, prompt in ((1, TextPrompt("Hello")), (2, TokensPrompt(pack_ids([4, 5]))), (3, ChatPrompt(messages))):
        harness.worker.handle(Submit([uid], prompt, SamplingParams()))
    got = {m.uids[0]: unpack_ids(m.prompt_ids).tolist() for m in harness.scheduler if isinstance(m, Schedule)}
    assert got == want
    assert harness.api == []


def test_a_long_chat_is_not_rendered(harness: Harness, monkeypatch: pytest.MonkeyPatch) -> None:
    """More text than this server tokenizes for 64 tokens."""
    monkeypatch.setattr(Tokenizer, "render", None)
    messages: list[dict[str, Any]] = [{"role": role, "content": "x" * 600} for role in ("user", "assistant")]
    harness.worker.handle(Submit([1], ChatPrompt(messages), SamplingParams()))
    (end,) = harness.ends()
    assert (end.status, end.field, end.code) == (400, "messages", "context_length_exceeded")
    assert "64 tokens" in end.error


def test_seed_of_each_choice() -> None:
    """Choice i samples with seed + i, and the sum wraps around at 64 bits."""
    params = SamplingParams(n=3, seed=2**63 - 2)
    assert [params.of_choice(i).seed for i in range(3)] == [2**63 - 2, 2**63 - 1, -(2**63)]
    assert [SamplingParams(n=2).of_choice(i).seed for i in range(2)] == [None, None]


def test_max_tokens_from_context(harness: Harness, tokenizer: Tokenizer) -> None:
    """``max_tokens_from_context`` lowers ``max_tokens`` to the rest of the context, and refuses a full context."""
    prompt = TokensPrompt(pack_ids([5] * 60))
    for limit in (16, 3):
        harness.worker.handle(Submit([1], prompt, SamplingParams(max_tokens=limit), max_tokens_from_context=True))
    assert [message.params.max_tokens for message in harness.scheduler if isinstance(message, Schedule)] == [4, 3]
    harness.worker.handle(Submit([2], TokensPrompt(pack_ids([5] * 64)), SamplingParams(), max_tokens_from_context=True))
    (end,) = harness.ends()
    assert (end.uid, end.status, end.field, end.code) == (2, 400, "prompt", "context_length_exceeded")


@pytest.mark.parametrize("prompt", [TextPrompt(""), TokensPrompt(b""), ChatPrompt([{"role": "user", "content": 3}])])
def test_promises_1_and_2_refused_prompt(harness: Harness, prompt: TextPrompt | TokensPrompt | ChatPrompt) -> None:
    """A refused prompt ends each of its requests exactly once, and the next prompt is served."""
    harness.worker.handle(Submit([7, 8], prompt, SamplingParams(n=2)))
    assert [(end.uid, end.finish_reason, end.status) for end in harness.ends()] == [
        (7, "error", 400),
        (8, "error", 400),
    ]
    assert harness.scheduler == []
    harness.worker.handle(Submit([9], TextPrompt("fine"), SamplingParams()))
    assert len(harness.scheduler) == 1


def test_promise_1_tokenizer_exception(
    harness: Harness, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """An exception in the tokenizer ends the request with status 500, and the next prompt is served.

    The log names the HTTP request.
    """
    with monkeypatch.context() as patch:
        patch.setattr(Tokenizer, "encode", lambda *_: 1 / 0)
        harness.worker.handle(Submit([1], TextPrompt("x"), SamplingParams(), request_id="abc"))
    (end,) = harness.ends()
    assert (end.finish_reason, end.status) == ("error", 500)
    assert "ZeroDivisionError" in end.error
    (line,) = [json.loads(JsonFormatter("tokenizer-0").format(record)) for record in caplog.records]
    assert (line["message"], line["request_id"], line["uid"]) == ("a request failed", "abc", 1)
    assert "ZeroDivisionError" in line["exception"]
    harness.worker.handle(Submit([2], TextPrompt("x"), SamplingParams()))
    assert len(harness.scheduler) == 1


def test_promise_2_too_long_text_is_not_tokenized(
    harness: Harness, tokenizer: ExactTokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A text that has too many characters for the context is refused without tokenizing it."""
    most = min(tokenizer.max_token_chars, MAX_CHARS_PER_TOKEN)
    text = "a" * (most * 64)  # one word: its beginning does not show how many tokens it has
    harness.worker.handle(Submit([1], TextPrompt(text), SamplingParams()))
    assert len(harness.scheduler) == 1  # the text may fit: the scheduler checks the number of its tokens
    monkeypatch.setattr(Tokenizer, "encode", lambda *_: 1 / 0)
    harness.worker.handle(Submit([2], TextPrompt(text + "a"), SamplingParams()))
    harness.worker.handle(Submit([3], ChatPrompt([{"role": "user", "content": text}]), SamplingParams()))
    assert [(end.uid, end.status, end.code) for end in harness.ends()] == [
        (uid, 400, "context_length_exceeded") for uid in (2, 3)
    ]


@pytest.mark.parametrize("chat", [False, True])
def test_promise_2_beginning_of_a_long_text(
    harness: Harness, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch, chat: bool
) -> None:
    """Of a long text, only a beginning is tokenized if that has too many tokens already."""
    tokenizer.chat([{"role": "user", "content": "Hello"}])  # the first chat prepares the template
    raw, sizes = tokenizer.raw, []

    class Counted:
        def encode(self, text: str, **options: Any) -> Any:
            sizes.append(len(text))
            return raw.encode(text, **options)

    monkeypatch.setattr(tokenizer, "raw", Counted())
    monkeypatch.setitem(tokenizer.__dict__, "max_token_chars", MAX_CHARS_PER_TOKEN)
    text = "a b " * (BEGIN_CHARS_PER_TOKEN * 64 // 4 + 5)
    harness.worker.handle(Submit([1], ask(text, chat), SamplingParams()))
    (end,) = harness.ends()
    assert (end.status, end.field, end.code) == (400, "prompt", "context_length_exceeded")
    assert sizes == [BEGIN_CHARS_PER_TOKEN * 64]


def ask(text: str, chat: bool) -> TextPrompt | ChatPrompt:
    return ChatPrompt([{"role": "user", "content": text}]) if chat else TextPrompt(text)


@settings(max_examples=200, deadline=None)
@given(st.text(st.sampled_from("ab <>|end\n"), max_size=60), st.integers(0, 60))
def test_min_num_tokens(tokenizer: ExactTokenizer, text: str, cut: int) -> None:
    """No text has fewer tokens than its beginning promises."""
    assert tokenizer.min_num_tokens("x" + text[:cut]) <= len(tokenizer.encode("x" + text, False))


def test_choices_share_one_message(harness: Harness) -> None:
    """A prompt with 128 choices is sent to the scheduler once: its size does not depend on ``n``."""
    prompt = TokensPrompt(pack_ids([5] * 60))
    harness.worker.handle(Submit(list(range(128)), prompt, SamplingParams(n=128, max_tokens=1)))
    (message,) = harness.scheduler
    assert isinstance(message, Schedule)
    assert message.uids == list(range(128))
    assert len(message.encode()) < 4 * 60 + 128 * 5 + 200


def test_abort_follows_its_request(harness: Harness) -> None:
    harness.worker.handle(Submit([1], TextPrompt("x"), SamplingParams()))
    harness.worker.handle(Abort([1]))
    assert [type(message) for message in harness.scheduler] == [Schedule, Abort]


def test_stop_string_aborts_the_request(harness: Harness, tokenizer: Tokenizer) -> None:
    """A stop string sends one `Abort` to the scheduler. The scheduler's reply to it ends the request with "stop"."""
    params = SamplingParams(stop=("b",))
    a, b, c = (tokenizer.encode(letter, add_special_tokens=False)[0] for letter in "abc")
    harness.worker.handle(Outputs([NewRequest(1, [c], params)], Output([1], [a])))
    harness.worker.handle(Outputs([], Output([1], [b])))
    harness.worker.handle(Outputs([], Output([1], [c])))
    assert harness.scheduler == [Abort([1])]
    harness.worker.handle(Outputs([], Output([], [], [Finished(1, "abort", 1, 0, 3)])))
    assert harness.scheduler == [Abort([1])]
    deltas = [delta for message in harness.api if isinstance(message, Replies) for delta in message.deltas]
    assert "".join(delta.text for delta in deltas) == "a"
    (end,) = harness.ends()
    assert (end.finish_reason, end.prompt_tokens, end.output_tokens) == ("stop", 1, 2)


def test_several_tokens_of_a_request_in_one_output(harness: Harness, tokenizer: Tokenizer) -> None:
    """A request's run of tokens is one delta. Tokens behind a stop string in the run are not counted or reported."""
    w, x, y, z = (tokenizer.encode(letter, add_special_tokens=False)[0] for letter in "wxyz")
    new = [NewRequest(uid, [], SamplingParams(stop=("y",), logprobs=0)) for uid in (5, 6)] + [
        NewRequest(7, [], SamplingParams())
    ]
    entries = {i: (-float(i), (), ()) for i in range(6)}
    harness.worker.handle(Outputs(new, Output([5, 5, 5, 5, 6, 6, 7], [w, x, y, z, w, x, z], [], entries)))
    (message,) = harness.api
    assert isinstance(message, Replies)
    assert [(delta.uid, delta.text, delta.tokens, delta.matched_stop) for delta in message.deltas] == [
        (5, "wx", [w, x, y], "y"),
        (6, "wx", [w, x], None),
        (7, "z", [z], None),
    ]
    assert [[entry.logprob for entry in delta.logprobs] for delta in message.deltas] == [[0, -1, -2], [-4, -5], []]
    assert harness.scheduler == [Abort([5])]
    ends = [Finished(5, "abort", 1, 0, 6), Finished(6, "length", 1, 0, 4), Finished(7, "stop", 1, 0, 3, stop_id=y)]
    harness.worker.handle(Outputs([], Output([5, 5, 6, 6, 7, 7], [w, w, y, z, w, y], ends)))
    assert harness.scheduler == [Abort([5])]  # request 6 has ended: there is nothing to abort
    last = harness.api[-1]
    assert isinstance(last, Replies)
    assert [(delta.uid, delta.text, delta.tokens) for delta in last.deltas] == [
        (6, "", [y]),
        (7, "w", [w, y]),
        (5, "", []),
    ]
    counts = {end.uid: (end.finish_reason, end.output_tokens) for end in harness.ends()}
    assert counts == {5: ("stop", 3), 6: ("stop", 3), 7: ("stop", 3)}


def test_logprobs_have_token_bytes(tokenizer: Tokenizer) -> None:
    harness, ids = Harness(tokenizer), tokenizer.encode("🙂", add_special_tokens=False)
    new = [NewRequest(1, [], SamplingParams(logprobs=1))]
    raw = b""
    for token in ids:
        harness.worker.handle(Outputs(new, Output([1], [token], [], {0: (-0.25, (token, ids[0]), (-0.25, -1.5))})))
        message, new = harness.api[-1], []
        assert isinstance(message, Replies)
        (logprob,) = message.deltas[0].logprobs
        assert (logprob.logprob, [top.logprob for top in logprob.top]) == (-0.25, [-0.25, -1.5])
        assert logprob.text == logprob.raw.decode(errors="replace")
        raw += logprob.raw
    assert raw.strip() == "🙂".encode()


def test_stops_have_no_logprobs(harness: Harness, tokenizer: Tokenizer) -> None:
    """Neither a stop string that is one special token nor a stop token, unless the client wants to see it."""
    eos = tokenizer.raw.token_to_id("<|eos|>")
    ids = [*tokenizer.encode("Hello", add_special_tokens=False), eos]
    shown = SamplingParams(logprobs=0, include_stop_str_in_output=True)
    new = [
        NewRequest(uid, [], params) for uid, params in ((1, SamplingParams(stop=("<|eos|>",), logprobs=0)), (3, shown))
    ]
    new.append(NewRequest(2, [], SamplingParams(logprobs=0)))
    ends = [Finished(uid, "stop", 1, 0, len(ids), stop_id=eos) for uid in (2, 3)]
    uids = [uid for uid in (1, 2, 3) for _ in ids]
    entries = dict.fromkeys(range(len(uids)), (0.0, (), ()))
    harness.worker.handle(Outputs(new, Output(uids, ids * 3, ends, entries)))
    (message,) = harness.api
    assert isinstance(message, Replies)
    assert [delta.tokens for delta in message.deltas] == [ids] * 3
    assert [len(delta.logprobs) for delta in message.deltas] == [len(ids) - 1, len(ids) - 1, len(ids)]


def test_logprobs_without_their_plugin(harness: Harness, monkeypatch: pytest.MonkeyPatch) -> None:
    """They are refused by name. Other requests are not."""
    monkeypatch.setattr("minisgl.server.text_process.exists", lambda name: False)
    for uid, params in ((1, SamplingParams(logprobs=0)), (2, SamplingParams(prompt_logprobs=0)), (3, SamplingParams())):
        harness.worker.handle(Submit([uid], TextPrompt("x"), params))
    assert [(end.uid, end.field) for end in harness.ends()] == [(1, "logprobs"), (2, "logprobs")]
    assert len(harness.scheduler) == 1


def test_prompt_logprobs(harness: Harness, tokenizer: Tokenizer) -> None:
    """The positions of a prompt arrive over several outputs. Only the first of ``n`` choices reports them."""
    params = SamplingParams(prompt_logprobs=2, n=2, seed=1)
    prompt = tokenizer.encode("wxyz", add_special_tokens=False)
    harness.worker.handle(Submit([5, 6], TokensPrompt(pack_ids(prompt)), params))
    (message,) = harness.scheduler
    assert isinstance(message, Schedule)
    scheduled = [message.params.of_choice(i) for i in range(2)]
    assert [p.prompt_logprobs for p in scheduled] == [2, None]
    new = [NewRequest(5, prompt, scheduled[0]), NewRequest(6, prompt, scheduled[1])]
    w, x, y, z = prompt
    first = {5: [(-3.0, (w, z), (-0.5, -1.0)), (-0.25, (y, w), (-0.25, -2.0))]}
    harness.worker.handle(Outputs(new, Output(prompt_logprobs=first)))
    last = {5: [(-2.0, (w, z), (-0.5, -2.0))]}
    harness.worker.handle(
        Outputs([], Output([5, 6], [w, x], [Finished(5, "length", 4), Finished(6, "length", 4)], {}, last))
    )
    deltas = [delta for message in harness.api if isinstance(message, Replies) for delta in message.deltas]
    positions = [position for delta in deltas if delta.uid == 5 for position in delta.prompt_logprobs]
    assert positions == [
        None,
        [
            PromptLogprob(x, "x", -3.0, None, b"x"),
            PromptLogprob(w, "w", -0.5, 1, b"w"),
            PromptLogprob(z, "z", -1.0, 2, b"z"),
        ],
        [PromptLogprob(y, "y", -0.25, 1, b"y"), PromptLogprob(w, "w", -2.0, 2, b"w")],
        [PromptLogprob(z, "z", -2.0, 2, b"z"), PromptLogprob(w, "w", -0.5, 1, b"w")],
    ]
    assert [delta.prompt_logprobs for delta in deltas if delta.uid == 6] == [[]]


@pytest.mark.parametrize(("length", "start"), [(1, 0), (3, 5), (3, 3)])
def test_a_prompt_without_logprobs(harness: Harness, length: int, start: int) -> None:
    """If no prompt token is scored, the reply has an entry for each of them, which is None."""
    params = SamplingParams(prompt_logprobs=0, logprob_start_len=start)
    end = Output([5], [9], [Finished(5, "length", length)])
    harness.worker.handle(Outputs([NewRequest(5, [4] * length, params)], end))
    (message,) = harness.api
    assert isinstance(message, Replies)
    assert message.deltas[0].prompt_logprobs == [None] * length


def test_tokenize_and_detokenize(harness: Harness, tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("Hello")
    text = {"type": "text", "text": "Hello"}
    strings = [tokenizer.token_bytes(token).decode(errors="replace") for token in ids]
    assert answered(harness, "tokenize", text, True) == ((ids, strings), None)
    assert answered(harness, "tokenize", {**text, "text": "", "add_special_tokens": False}, False) == (([], None), None)
    assert answered(harness, "detokenize", pack_ids(ids)) == ("<|bos|>Hello", None)
    _, error = answered(harness, "detokenize", pack_ids([320]))
    assert (error.status, error.field) == (400, "tokens")


def answered(harness: Harness, function: str, *arguments: Any) -> Any:
    """Return the value of a question, and its error."""
    harness.worker.handle(Call(f"{QUERIES}:answer", [7, f"{QUERIES}:{function}", list(arguments)]))
    last = harness.api[-1]
    assert isinstance(last, Call)
    assert (last.function, last.arguments[0]) == (f"{QUERIES}:receive", 7)
    return tuple(last.arguments[1:])


def test_a_query_that_fails_ends_only_itself(harness: Harness) -> None:
    """A function that does not exist, or that raises an error, is an error of the query."""
    for function in ("nothing", "count"):
        _, error = answered(harness, function)
        assert (error.status, error.error.partition(":")[0]) == (500, "The request failed")


def test_no_tokenizer() -> None:
    """Without a tokenizer, prompts of token ids are scheduled, and text, chats and stop strings are refused."""
    harness = Harness(None)
    harness.worker.handle(Submit([1], TokensPrompt(pack_ids([5])), SamplingParams()))
    assert len(harness.scheduler) == 1
    for uid, prompt in ((2, TextPrompt("x")), (3, ChatPrompt([{"role": "user", "content": "x"}]))):
        harness.worker.handle(Submit([uid], prompt, SamplingParams()))
    harness.worker.handle(Submit([4], TokensPrompt(pack_ids([5])), SamplingParams(stop=("x",))))
    assert [(end.uid, end.field) for end in harness.ends()] == [(2, "prompt"), (3, "messages"), (4, "stop")]
    assert len(harness.scheduler) == 1


def test_stop_and_unexpected_message(harness: Harness) -> None:
    """`handle` returns False for `Stop`, and raises TypeError for a message that a text process never gets."""
    assert harness.worker.handle(Abort([1]))
    assert not harness.worker.handle(Stop())
    with pytest.raises(TypeError):
        harness.worker.handle(Accepted([1], [3]))


def count_calls(harness: Harness, *messages: Message) -> Counter[str]:
    """Return how often each function is called, in Python or in C, while the worker handles the messages.

    The garbage collector is off, because it would call finalizers of other tests' objects.
    """
    calls: Counter[str] = Counter()

    def called(frame: Any, event: str, argument: Any) -> None:
        if event == "call":
            calls[f"{frame.f_code.co_filename}:{frame.f_code.co_qualname}"] += 1
        elif event == "c_call":
            calls[argument.__qualname__] += 1

    gc.collect()
    gc.disable()
    sys.setprofile(called)
    try:
        for message in messages:
            harness.worker.handle(message)
    finally:
        sys.setprofile(None)
        gc.enable()
    return calls


@pytest.mark.parametrize("warm", [True, False])
def test_the_first_request_does_no_more_work_than_the_next(tiny: Path, warm: bool) -> None:
    """After a warm-up, the first request calls as many functions as the second. Without one it calls more."""
    tokenizer = Tokenizer.from_dir(tiny)
    assert tokenizer is not None
    if warm:
        warm_up(tokenizer)
    modules = set(sys.modules)
    harness = Harness(tokenizer)
    prompts = [TextPrompt("A prompt"), ChatPrompt([{"role": "user", "content": "A question"}])]
    params = SamplingParams(stop=("end",), logprobs=1)
    submits = [Submit([uid], prompt, params) for uid, prompt in enumerate(prompts)]
    first = count_calls(harness, *submits)
    second = count_calls(harness, *submits)
    assert sum(second.values()) > 50
    more = first - second
    assert (not more) == warm, more
    assert len(harness.scheduler) == 4
    if warm:
        assert "max_token_chars" in vars(tokenizer)
        assert set(sys.modules) == modules


def test_a_warm_up_without_tokenizer_or_template(tokenizer: Tokenizer) -> None:
    warm_up(None)
    warm_up(Tokenizer(tokenizer.raw))


def test_variables_that_only_some_templates_read(tokenizer: Tokenizer) -> None:
    """``reasoning_effort`` is a variable of a template that reads it, and without effect for any other."""
    prompt = ChatPrompt([], optional_kwargs={"reasoning_effort": "high", "mood": "good"}, chat_template_kwargs={"x": 1})
    assert with_read_variables(prompt, tokenizer).chat_template_kwargs == {"x": 1}
    tokenizer = Tokenizer(tokenizer.raw, ChatTemplate("Effort: {{ reasoning_effort }}"))
    read = with_read_variables(prompt, tokenizer).chat_template_kwargs
    assert read == {"x": 1, "reasoning_effort": "high"}
    given = msgspec.structs.replace(prompt, chat_template_kwargs={"reasoning_effort": "low"})
    assert with_read_variables(given, tokenizer).chat_template_kwargs == {"reasoning_effort": "low"}
    assert tokenizer.render([], True, read).text == "Effort: high"
