"""What a scheduler counts from its start on: `Scheduler.stats` returns it, and the server exports it as metrics."""

from __future__ import annotations

from minisgl.core import Req, Step

NAMES = (
    "steps",
    "prefill_tokens",
    "decode_tokens",
    "cached_tokens",
    "prompt_tokens",
    "cached_prompt_tokens",
    "verification_rows",
    "draft_tokens",
    "accepted_draft_tokens",
    "output_tokens",
    "retractions",
    "finished_stop",
    "finished_length",
    "finished_abort",
    "finished_error",
)


class Counters(dict[str, int]):
    """The counts of one scheduler by name."""

    def __init__(self) -> None:
        super().__init__(dict.fromkeys(NAMES, 0))

    def admitted(self, req: Req, num_cached_tokens: int) -> None:
        """Count an admission. A retracted request is admitted again, but its prompt counts only once."""
        self["cached_tokens"] += num_cached_tokens
        if req.first_admission:
            self["prompt_tokens"] += len(req.prompt_ids)
            self["cached_prompt_tokens"] += num_cached_tokens

    def launched(self, step: Step) -> None:
        """Count a step and its tokens. Drafts count neither as tokens of decoding nor as tokens of prompts."""
        self["steps"] += 1
        self["decode_tokens"] += step.num_continuing
        self["prefill_tokens"] += len(step.input_ids) - step.num_decode
        if step.num_verify:
            self["prefill_tokens"] -= int(step.num_sampled_tokens[step.num_decode : step.num_continuing].sum())
