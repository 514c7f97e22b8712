"""Speculation with a chosen acceptance, for benchmarks: arbitrary drafts, each accepted by an independent coin.

How many drafts are accepted depends on the text, which random weights and random prompts don't have. Here a coin
decides instead, and the accepted drafts become the output: their keys and values are already in the KV pool. So the
text is wrong on purpose, and everything else is as in a run with real drafts. vLLM calls this synthetic acceptance,
SGLang simulated acceptance. Only benchmarks use this module: a server has no option for it.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence

import torch
from torch import Tensor

from minisgl.config import ConfigError
from minisgl.core import EngineSpec, Req, TokenMasks
from minisgl.engine.engine import TorchEngine
from minisgl.engine.inputs import SamplingInputs
from minisgl.engine.sampler import Sampler
from minisgl.plugins.speculation import DraftProposer
from minisgl.plugins.speculation.verification import DraftVerification

__all__ = ["SyntheticProposer", "SyntheticSampler", "add_arguments", "check_arguments", "force_acceptance"]

DEFAULT_DRAFTS = 4


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments ``--acceptance``, ``--drafts`` and ``--fixed-drafts``."""
    parser.add_argument(
        "--acceptance",
        type=float,
        metavar="P",
        help="verify arbitrary drafts, each accepted with probability P; the output is then wrong on purpose",
    )
    parser.add_argument(
        "--drafts",
        type=int,
        default=DEFAULT_DRAFTS,
        metavar="N",
        help=f"with --acceptance: largest number of drafts of a request in one step (default {DEFAULT_DRAFTS})",
    )
    parser.add_argument(
        "--fixed-drafts", action="store_true", help="always verify as many drafts as possible, whether it pays or not"
    )


def check_arguments(args: argparse.Namespace) -> None:
    """Raise `ConfigError` if a value is out of range."""
    if args.acceptance is not None and not 0.0 <= args.acceptance <= 1.0:
        raise ConfigError(f"--acceptance {args.acceptance}: must be between 0 and 1.")
    if args.drafts < 1:
        raise ConfigError(f"--drafts {args.drafts}: must be at least 1.")


class SyntheticProposer(DraftProposer):
    """Proposes as many arbitrary tokens as it may: a function of the request's uid and the position."""

    def __init__(self, spec: EngineSpec, max_drafts: int):
        self.max_drafts, self._vocab_size = max_drafts, spec.vocab_size

    def propose(self, reqs: Sequence[Req], positions: Sequence[int], limits: Sequence[int]) -> Sequence[Sequence[int]]:
        """Return ``limits[i]`` tokens for each request."""
        size = self._vocab_size
        return [
            [(req.uid * 7919 + position * 104_729) % size for position in range(first, first + limit)]
            for req, first, limit in zip(reqs, positions, limits, strict=True)
        ]


class SyntheticSampler(Sampler):
    """A sampler whose tokens equal each draft with probability ``acceptance``, independently of the logits.

    A sampled token that decides on a draft is replaced by the draft, or by another token. All other tokens are those of
    `Sampler`. Log-probabilities are those of these tokens. With ``acceptance`` None there is no coin.
    """

    def __init__(self, spec: EngineSpec, device: torch.device, acceptance: float | None, seed: int = 0):
        super().__init__(spec.max_running_requests, spec.vocab_size, device)
        self.acceptance = acceptance
        self._generator = torch.Generator(device).manual_seed(seed)

    def sample(self, logits: Tensor, inputs: SamplingInputs, masks: TokenMasks | None = None) -> Tensor:
        """Choose tokens as `Sampler.sample` does, and then let the coin decide on the drafts."""
        tokens = super().sample(logits, inputs, masks)
        if not isinstance(inputs.verification, DraftVerification) or self.acceptance is None:
            return tokens
        return self._decide(tokens, inputs.verification, self.acceptance)

    def _decide(self, tokens: Tensor, verification: DraftVerification, acceptance: float) -> Tensor:
        """Return the tokens int64 [positions], changed at each position that is followed by a draft."""
        drafts = verification.drafts[verification.row.long(), verification.offset.long()].long()
        accepted = torch.rand(len(tokens), generator=self._generator, device=self.device) < acceptance
        rejected = torch.where(tokens == drafts, (drafts + 1) % self.vocab_size, tokens)
        return torch.where(accepted & (drafts >= 0), drafts, rejected)


def force_acceptance(engine: TorchEngine, acceptance: float | None, seed: int = 0) -> None:
    """Let ``engine`` accept each draft with probability ``acceptance`` from now on. No request may be running.

    With None, a draft is accepted if it equals the sampled token, as usual.

    The other ranks continue with the tokens of rank 0, so its sampler decides for all.
    """
    sampler = SyntheticSampler(engine.spec, engine.device, acceptance, seed)
    for processor in engine.model_runner.sampler.processors.values():
        sampler.add(processor)
    engine.kernels.convert_sampler(sampler)  # as `build_engine` converts the sampler that this one replaces
    engine.model_runner.sampler = sampler
