"""The vocabulary, split over the ranks: token embedding and LM head.

If the number of ranks does not divide the vocabulary size, the vocabulary is padded with rows of zeros, so that each
rank has the same number of rows. The logits are cut back to the true vocabulary size.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch.nn.functional as F
from torch import Tensor, nn

from minisgl.layers.context import Context
from minisgl.layers.weight_shards import WeightShard


class _VocabRows(nn.Module):
    """This rank's rows of a [vocab, hidden] matrix, with the loading of its weights."""

    def __init__(self, vocab_size: int, hidden_size: int, ctx: Context):
        super().__init__()
        self.vocab_size, self.comm = vocab_size, ctx.comm
        rows = -(-vocab_size // ctx.comm.size)
        self.start = ctx.comm.rank * rows
        self.weight = ctx.parameter(rows, hidden_size)

    def after_load(self) -> None:
        """Set the rows of the padding to zeros."""
        self.weight[max(0, self.vocab_size - self.start) :] = 0

    def weight_shards(self, prefix: str, names: frozenset[str] | None) -> Iterator[WeightShard]:
        """Yield this rank's rows without the padding: see `HasWeightShards`."""
        start = min(self.start, self.vocab_size)
        true_rows = min(self.weight.shape[0], self.vocab_size - start)
        shape = (self.vocab_size, self.weight.shape[1])
        yield WeightShard.part(f"{prefix}weight", shape, 0, start, self.weight[:true_rows])


class VocabParallelEmbedding(_VocabRows):
    """The token embedding. A rank returns zeros for the tokens of other ranks, and an all-reduce adds the results."""

    def forward(self, tokens: Tensor) -> Tensor:
        """Look up tokens [n], each in [0, vocab); returns [n, hidden], the same on every rank."""
        if self.comm.size == 1:
            return F.embedding(tokens, self.weight)
        local = tokens - self.start
        not_local = (local < 0) | (local >= self.weight.shape[0])
        rows = F.embedding(local.masked_fill_(not_local, 0), self.weight)
        return self.comm.all_reduce(rows.masked_fill_(not_local.unsqueeze(1), 0))


class ParallelLMHead(_VocabRows):
    """The LM head: each rank computes the logits of its part of the vocabulary, and an all-gather joins them.

    With ``tied`` the head uses the embedding's weight (Press and Wolf, 2017).
    """

    def __init__(self, vocab_size: int, hidden_size: int, ctx: Context, *, tied: VocabParallelEmbedding | None = None):
        if tied is None:
            super().__init__(vocab_size, hidden_size, ctx)
        else:
            nn.Module.__init__(self)
            self.vocab_size, self.comm, self.start, self.weight = vocab_size, ctx.comm, tied.start, tied.weight
        self.tied = tied is not None

    def weight_shards(self, prefix: str, names: frozenset[str] | None) -> Iterator[WeightShard]:
        """Return this rank's rows to load, or nothing if the head is tied to the embedding."""
        return iter(()) if self.tied else super().weight_shards(prefix, names)

    def product(self, hidden: Tensor) -> Tensor:
        """Return the logits [rows, rows of this rank's weight] of hidden [rows, hidden]."""
        return F.linear(hidden, self.weight)

    def forward(self, hidden: Tensor) -> Tensor:
        """Return the logits [rows, vocab] of hidden [rows, hidden], the same on every rank."""
        logits = self.product(hidden)
        if self.comm.size > 1:
            logits = self.comm.all_gather(logits, dim=-1)[:, : self.vocab_size]
        return logits
