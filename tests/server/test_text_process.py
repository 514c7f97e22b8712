"""What a tokenizer and the detokenizer say to the others, message by message, without processes."""

from __future__ import annotations

from pathlib import Path

import pytest

from minisgl.core import Finished, Output, SamplingParams
from minisgl.message import (
    Abort,
    Accepted,
    ChatPrompt,
    Count,
    DetokenizeRequest,
    IdsPrompt,
    Limits,
    Message,
    Opened,
    Outputs,
    Replies,
    Schedule,
    Stop,
    Submit,
    TextPrompt,
    TextReply,
    TokensReply,
    pack_ids,
    unpack_ids,
)
from minisgl.server.text_process import TextWorker
from minisgl.tokenizer import Tokenizer


class Post:
    """A worker, and what it sent."""

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
def post(tokenizer: Tokenizer) -> Post:
    return Post(tokenizer)


def test_a_prompt_of_each_kind_is_scheduled(post: Post, tokenizer: Tokenizer) -> None:
    turns = [{"role": "user", "content": "Hi"}]
    want = {1: tokenizer.encode("Hello"), 2: [4, 5], 3: tokenizer.chat(turns)}
    for uid, prompt in ((1, TextPrompt("Hello")), (2, IdsPrompt(pack_ids([4, 5]))), (3, ChatPrompt(turns))):
        post.worker.handle(Submit([uid], prompt, SamplingParams()))
    got = {m.uid: unpack_ids(m.prompt).tolist() for m in post.scheduler if isinstance(m, Schedule)}
    assert got == want
    assert post.api == []


def test_each_of_n_choices_has_a_seed_of_its_own(post: Post) -> None:
    post.worker.handle(Submit([1, 2, 3], TextPrompt("x"), SamplingParams(n=3, seed=2**63 - 2)))
    assert [m.params.seed for m in post.scheduler if isinstance(m, Schedule)] == [2**63 - 2, 2**63 - 1, -(2**63)]
    post.worker.handle(Submit([4, 5], TextPrompt("x"), SamplingParams(n=2)))
    assert [m.params.seed for m in post.scheduler[3:] if isinstance(m, Schedule)] == [None, None]


def test_without_a_limit_the_rest_of_the_context_is_meant(post: Post, tokenizer: Tokenizer) -> None:
    post.worker.handle(Submit([1], IdsPrompt(pack_ids([5] * 60)), SamplingParams(), max_tokens_from_context=True))
    (message,) = post.scheduler
    assert isinstance(message, Schedule)
    assert message.params.max_tokens == 4
    post.worker.handle(Submit([2], IdsPrompt(pack_ids([5] * 64)), SamplingParams(), max_tokens_from_context=True))
    (end,) = post.ends()
    assert (end.uid, end.status, end.field, end.code) == (2, 400, "prompt", "context_length_exceeded")


@pytest.mark.parametrize("prompt", [TextPrompt(""), IdsPrompt(b""), ChatPrompt([{"role": "user"}], True, {"x": 1})])
def test_promises_1_and_2_a_refused_prompt_ends_each_of_its_requests_once(
    post: Post, prompt: TextPrompt | IdsPrompt | ChatPrompt
) -> None:
    post.worker.handle(Submit([7, 8], prompt, SamplingParams(n=2)))
    assert [(end.uid, end.finish_reason, end.status) for end in post.ends()] == [(7, "error", 400), (8, "error", 400)]
    assert post.scheduler == []
    post.worker.handle(Submit([9], TextPrompt("fine"), SamplingParams()))
    assert len(post.scheduler) == 1


def test_promise_1_a_tokenizer_that_breaks_ends_the_request_and_goes_on(
    post: Post, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(Tokenizer, "encode", lambda *_: 1 / 0)
        post.worker.handle(Submit([1], TextPrompt("x"), SamplingParams()))
    (end,) = post.ends()
    assert (end.finish_reason, end.status) == ("error", 500)
    assert "ZeroDivisionError" in end.error
    assert "ZeroDivisionError" in capsys.readouterr().err
    post.worker.handle(Submit([2], TextPrompt("x"), SamplingParams()))
    assert len(post.scheduler) == 1


def test_promise_2_a_text_that_cannot_fit_is_refused_unread(
    post: Post, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    longest = max(len(tokenizer.decode([i], False)) for i in range(tokenizer.vocab_size))
    assert tokenizer.longest >= longest
    text = "a" * (tokenizer.longest * 64)
    post.worker.handle(Submit([1], TextPrompt(text), SamplingParams()))
    assert len(post.scheduler) == 1  # the scheduler counts its tokens
    monkeypatch.setattr(Tokenizer, "encode", lambda *_: 1 / 0)
    post.worker.handle(Submit([2], TextPrompt(text + "a"), SamplingParams()))
    post.worker.handle(Submit([3], ChatPrompt([{"role": "user", "content": text}]), SamplingParams()))
    assert [(end.uid, end.status, end.code) for end in post.ends()] == [
        (uid, 400, "context_length_exceeded") for uid in (2, 3)
    ]


def test_an_abort_follows_its_request(post: Post) -> None:
    post.worker.handle(Submit([1], TextPrompt("x"), SamplingParams()))
    post.worker.handle(Abort([1]))
    assert [type(message) for message in post.scheduler] == [Schedule, Abort]


def test_a_stop_string_aborts_at_the_scheduler_and_its_word_ends_the_request(post: Post, tokenizer: Tokenizer) -> None:
    params = SamplingParams(stop=("b",))
    a, b, c = (tokenizer.encode(letter, special=False)[0] for letter in "abc")
    post.worker.handle(Outputs([Opened(1, [c], params)], Output([1], [a])))
    post.worker.handle(Outputs([], Output([1], [b])))
    post.worker.handle(Outputs([], Output([1], [c])))
    assert post.scheduler == [Abort([1])]
    post.worker.handle(Outputs([], Output([], [], [Finished(1, "abort", 1, 0, 3)])))
    assert post.scheduler == [Abort([1])]
    deltas = [delta for message in post.api if isinstance(message, Replies) for delta in message.deltas]
    assert "".join(delta.text for delta in deltas) == "a"
    (end,) = post.ends()
    assert (end.finish_reason, end.prompt_tokens, end.output_tokens) == ("stop", 1, 2)


def test_questions_are_answered(post: Post, tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("Hello")
    post.worker.handle(Count(1, TextPrompt("Hello"), strings=True))
    post.worker.handle(Count(2, TextPrompt("", special=False)))
    post.worker.handle(DetokenizeRequest(3, pack_ids(ids)))
    strings = [tokenizer.token_text(token) for token in ids]
    assert post.api[:2] == [TokensReply(1, pack_ids(ids), strings), TokensReply(2, b"")]
    assert post.api[2] == TextReply(3, "<|bos|>Hello")
    post.worker.handle(DetokenizeRequest(4, pack_ids([320])))
    last = post.api[-1]
    assert isinstance(last, TextReply)
    assert last.error is not None
    assert (last.uid, last.error.status, last.error.field) == (4, 400, "tokens")


def test_without_a_tokenizer_ids_pass_and_text_is_refused() -> None:
    post = Post(None)
    post.worker.handle(Submit([1], IdsPrompt(pack_ids([5])), SamplingParams()))
    assert len(post.scheduler) == 1
    for uid, prompt in ((2, TextPrompt("x")), (3, ChatPrompt([{"role": "user", "content": "x"}]))):
        post.worker.handle(Submit([uid], prompt, SamplingParams()))
    post.worker.handle(Submit([4], IdsPrompt(pack_ids([5])), SamplingParams(stop=("x",))))
    assert [(end.uid, end.field) for end in post.ends()] == [(2, "prompt"), (3, "messages"), (4, "stop")]
    assert len(post.scheduler) == 1


def test_it_ends_when_told_and_not_by_what_is_not_for_it(post: Post) -> None:
    assert post.worker.handle(Abort([1]))
    assert not post.worker.handle(Stop())
    with pytest.raises(TypeError):
        post.worker.handle(Accepted([1]))
