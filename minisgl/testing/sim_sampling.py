"""What the simulated engine checks of a step's sampling: masks of grammars and scores of prompts."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from minisgl.core import I32, Bools, Logprobs, Step
from minisgl.testing.sim_records import Launched, Row
from minisgl.testing.truth import allowed_tokens, extend_hash, pack_mask, score
from minisgl.testing.violation import SimViolation

__all__ = ["check_masks", "score_prompts"]


def check_masks(launched: Launched, rows: Sequence[Row], vocab_size: int) -> dict[int, Bools]:
    """Check the masks of a step, and return the allowed tokens of each masked position.

    A position after a rejected draft is not checked: no token of it counts.
    """
    step, masks = launched.step, launched.masks
    given: dict[int, I32] = {}
    if masks is not None:
        given = dict(zip(masks.positions.tolist(), masks.bits, strict=True))
        if len(given) < len(masks.positions):
            raise SimViolation("mask", "two masks are for the same position", step=step.id)
    allowed: dict[int, Bools] = {}
    for row in rows:
        grammar, ended = row.stream.grammar, row.admitted.ended_by
        prefix = int(row.stream.hashes[row.end - max(row.num_sampled - 1, 0)])
        right = True  # whether all drafts so far will be accepted
        for k in range(row.num_sampled):
            mask = given.pop(row.first_sampled + k, None)
            if k:
                right = right and int(row.tokens[k]) == row.stream.sampled_after(prefix)
                prefix = extend_hash(prefix, int(row.tokens[k]))
            location = row.at(step.id, position=row.end - row.num_sampled + k)
            if grammar is None:
                if mask is not None:
                    raise SimViolation("mask", "the request has no grammar, but the position has a mask", **location)
                continue
            expected = allowed_tokens(prefix, grammar, vocab_size)
            if 0 <= ended < launched.sampled:  # the token is discarded
                continue
            if not expected.any():  # the request ends here
                right = False
                if mask is not None:
                    raise SimViolation("mask", "the grammar allows no token, but the position has a mask", **location)
            if not right and mask is None:  # no token of the position counts
                continue
            if mask is None:
                raise SimViolation("mask", "the request has a grammar, but the position has no mask", **location)
            if right and not np.array_equal(mask, pack_mask(expected)):
                text = "the mask is not that of the tokens that the grammar allows after the request's tokens"
                raise SimViolation("mask", text, **location)
            allowed[row.first_sampled + k] = expected
    if given:
        text = f"masks are for the sampled positions {sorted(given)}, which the step does not have"
        raise SimViolation("mask", text, step=step.id)
    return allowed


def score_prompts(step: Step, rows: Sequence[Row]) -> tuple[tuple[Logprobs, ...], ...]:
    """Check the prompt ranges of a step, and return the log-probabilities of their tokens."""
    results = []
    for index, first, targets, _ in step.prompt_logprobs:
        row = rows[index]
        expected = row.stream.tokens[first + 1 : first + 1 + len(targets)]
        if first + len(targets) >= row.stream.num_prompt_tokens or not np.array_equal(expected, targets):
            text = f"the targets from position {first} on are {targets.tolist()}, expected {expected.tolist()}"
            raise SimViolation("prompt-logprobs", text, **row.at(step.id))
        prefixes = row.stream.hashes[first + 1 : first + 1 + len(targets)].tolist()
        results.append(tuple(Logprobs(score(*pair)) for pair in zip(prefixes, targets.tolist(), strict=True)))
    return tuple(results)
