"""The outputs of `LLM`: one of each prompt, with its choices, to which each turn of the scheduler adds tokens."""

from __future__ import annotations

from dataclasses import dataclass, field

from minisgl.core import FinishReason, Logprobs, Output, SamplingParams
from minisgl.tokenizer.detokenizer import Detokenizer

__all__ = ["Choice", "Outputs", "RequestOutput"]


@dataclass
class Choice:
    """One continuation of a prompt.

    A stop token is in ``token_ids`` but not in ``text``. A stop string is not in ``text``, but its tokens are in
    ``token_ids``.
    """

    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    """None while the choice is being generated."""
    error: str = ""
    """Why the choice ended, if ``finish_reason`` is "error"."""
    logprobs: list[Logprobs] | None = None
    """One entry for each of ``token_ids``, if the sampling parameters ask for log-probabilities."""


@dataclass
class RequestOutput:
    """The output of one prompt so far: ``choices`` are its ``n`` continuations.

    ``text``, ``token_ids``, ``finish_reason`` and ``logprobs`` are those of the first choice.
    """

    prompt_token_ids: list[int]
    choices: list[Choice]
    cached_tokens: int = 0
    """How many prompt tokens of the first choice had their KV in the prefix cache. 0 until that choice has ended."""
    request_id: int = -1
    """The number that `LLM.add_request` returned."""
    prompt_logprobs: list[Logprobs | None] | None = None
    """One entry for each prompt token so far, if the sampling parameters ask for them.

    None for the first token and for those before ``logprob_start_len``.
    """

    @property
    def finished(self) -> bool:
        """Whether every choice has ended."""
        return all(choice.finish_reason is not None for choice in self.choices)

    @property
    def text(self) -> str:
        return self.choices[0].text

    @property
    def token_ids(self) -> list[int]:
        return self.choices[0].token_ids

    @property
    def finish_reason(self) -> FinishReason | None:
        return self.choices[0].finish_reason

    @property
    def logprobs(self) -> list[Logprobs] | None:
        return self.choices[0].logprobs


class Outputs:
    """The outputs of the requests that the scheduler is computing."""

    def __init__(self, detokenizer: Detokenizer):
        self._detokenizer = detokenizer
        self.open: dict[int, tuple[RequestOutput, int]] = {}  # uid → (output, index of the choice)

    def expect(self, uid: int, output: RequestOutput, choice: int, params: SamplingParams) -> None:
        """Expect the tokens of one choice."""
        self.open[uid] = (output, choice)
        self._detokenizer.add_request(uid, output.prompt_token_ids, params)

    def uids_of(self, request_id: int) -> list[int]:
        """Return the uids of a request's choices that have not ended."""
        return [uid for uid, (output, _) in self.open.items() if output.request_id == request_id]

    def book(self, out: Output) -> tuple[list[RequestOutput], list[int]]:
        """Add a turn's tokens to the outputs.

        Return the outputs that changed, and the uids whose text reached a stop string: the scheduler must abort them.
        """
        for uid, entries in out.prompt_logprobs.items():
            prompt_logprobs = self.open[uid][0].prompt_logprobs
            assert prompt_logprobs is not None
            prompt_logprobs.extend(Logprobs(*entry) for entry in entries)
        logprobs: dict[int, list[Logprobs]] = {}  # by uid, one entry for each of its tokens in this turn
        for index, entry in sorted(out.logprobs.items()):
            logprobs.setdefault(out.uids[index], []).append(Logprobs(*entry))
        changed: dict[int, RequestOutput] = {}
        stopped = []
        for delta in self._detokenizer.feed(out):
            output, k = self.open[delta.uid]
            changed[output.request_id] = output
            choice = output.choices[k]
            choice.text += delta.text
            choice.token_ids += delta.tokens
            if choice.logprobs is not None:  # tokens behind a stop string are not in the delta
                choice.logprobs += logprobs.get(delta.uid, [])[: len(delta.tokens)]
            end = delta.finish
            if end is None:
                if delta.matched_stop is not None:
                    stopped.append(delta.uid)
                continue
            choice.finish_reason, choice.error = end.finish_reason, end.error
            if k == 0:
                output.cached_tokens = end.cached_tokens
            del self.open[delta.uid]
        return list(changed.values()), stopped
