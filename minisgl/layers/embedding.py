"""The vocabulary, cut over the ranks: token embedding and the head that scores every token.

A vocabulary that the ranks don't divide is padded: each rank has the same number of rows, the last ones of zeros, and
the logits are cut to the true vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from minisgl.kernel.linear import Packed, linear, pack
from minisgl.layers.context import Context
from minisgl.layers.weight_shards import WeightShard


class _VocabRows(nn.Module):
    """This rank's rows of a [vocab, hidden] matrix."""

    def __init__(self, vocab_size: int, hidden_size: int, ctx: Context):
        super().__init__()
        self.vocab_size, self.comm = vocab_size, ctx.comm
        rows = -(-vocab_size // ctx.comm.size)
        self.start = ctx.comm.rank * rows
        weight = torch.zeros(rows, hidden_size, dtype=ctx.dtype, device=ctx.device)
        self.weight = nn.Parameter(weight, requires_grad=False)

    def weight_shards(self, prefix: str, names: frozenset[str] | None) -> Iterator[WeightShard]:
        start = min(self.start, self.vocab_size)
        true_rows = min(self.weight.shape[0], self.vocab_size - start)
        shape = (self.vocab_size, self.weight.shape[1])
        yield WeightShard.part(f"{prefix}weight", shape, 0, start, self.weight[:true_rows])


class VocabParallelEmbedding(_VocabRows):
    """Looks tokens up; each rank has some of the rows, and the sum over ranks has them all."""

    def forward(self, tokens: Tensor) -> Tensor:
        """tokens [n] in [0, vocab) → [n, hidden] on every rank."""
        if self.comm.size == 1:
            return F.embedding(tokens, self.weight)
        local = tokens - self.start
        elsewhere = (local < 0) | (local >= self.weight.shape[0])
        rows = F.embedding(local.masked_fill_(elsewhere, 0), self.weight)
        return self.comm.all_reduce(rows.masked_fill_(elsewhere.unsqueeze(1), 0))


class ParallelLMHead(_VocabRows):
    """Scores the vocabulary; each rank its rows. ``tied`` shares the embedding's weight (Press and Wolf, 2017)."""

    def __init__(self, vocab_size: int, hidden_size: int, ctx: Context, *, tied: VocabParallelEmbedding | None = None):
        if tied is None:
            super().__init__(vocab_size, hidden_size, ctx)
        else:
            nn.Module.__init__(self)
            self.vocab_size, self.comm, self.start, self.weight = vocab_size, ctx.comm, tied.start, tied.weight
        self.tied = tied is not None
        self.packed: Packed | None = None

    def weight_shards(self, prefix: str, names: frozenset[str] | None) -> Iterator[WeightShard]:
        return iter(()) if self.tied else super().weight_shards(prefix, names)

    def after_load(self) -> None:
        self.packed = pack(self.weight)

    def forward(self, hidden: Tensor) -> Tensor:
        """hidden [rows, hidden] → logits [rows, vocab], the same on every rank."""
        logits = linear(hidden, self.weight, packed=self.packed)
        if self.comm.size > 1:
            logits = self.comm.all_gather(logits, dim=-1)[:, : self.vocab_size]
        return logits
