"""A sampler with all processors of `plugins/sampling`, as an engine has it, for tests without an engine."""

from __future__ import annotations

import torch

from minisgl.engine.sampler import Sampler
from minisgl.plugins.sampling.logit_bias import LogitBias
from minisgl.plugins.sampling.logprobs import SampledLogprobs
from minisgl.plugins.sampling.min_p import MinP
from minisgl.plugins.sampling.penalties import Penalties
from minisgl.plugins.sampling.top_k_p import add_top_k_p

__all__ = ["add_processors", "full_sampler"]


def add_processors(sampler: Sampler, max_running_requests: int) -> Sampler:
    """Add a new object of each shipped processor to ``sampler``, and return it."""
    sampler.add(SampledLogprobs(max_running_requests, sampler.log_sum_exp))
    sampler.add(LogitBias(max_running_requests, sampler.device))
    sampler.add(Penalties(max_running_requests, sampler.vocab_size, sampler.device))
    add_top_k_p(sampler, max_running_requests)
    sampler.add(MinP(max_running_requests, sampler.device))
    return sampler


def full_sampler(max_running_requests: int, vocab_size: int, device: torch.device) -> Sampler:
    """Return a new sampler with all processors."""
    return add_processors(Sampler(max_running_requests, vocab_size, device), max_running_requests)
