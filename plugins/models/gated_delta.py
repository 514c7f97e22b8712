"""Linear attention with the gated delta rule: a state of fixed size that absorbs token after token. For Qwen3-Next.

The state of a request is in the slot of its request-pool row: docs/design/states.md. Yang et al., Gated Delta Networks,
2024. The rule is computed in plain torch, chunk by chunk: Yang et al., Parallelizing Linear Transformers with the Delta
Rule, 2024.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, ClassVar, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from minisgl.attention import AttnBatch
from minisgl.config import ConfigError
from minisgl.core import I32
from minisgl.layers import Context, RMSNorm
from minisgl.layers.linear import LinearColParallelMerged, LinearRowParallel, Merged
from minisgl.layers.weight_shards import WeightShard, split_rows, weight_shards_of
from minisgl.models.config import ModelConfig

CHUNK = 64
"""Tokens of a prompt whose values are computed together."""


class GatedNorm(RMSNorm):
    """RMSNorm of each head, whose result is multiplied with silu(gate)."""

    def forward(self, x: Tensor, gate: Tensor) -> Tensor:  # type: ignore[override]
        """Normalise x [..., head_dim] in float32 and multiply it with silu(gate), which has the same shape."""
        normed = self.weight * F.rms_norm(x.float(), self.weight.shape, eps=self.eps).to(x.dtype)
        return (normed * F.silu(gate.float())).to(x.dtype)


class GatedDeltaNet(nn.Module):
    """Linear attention with the gated delta rule; heads are split over the ranks, by whole key heads.

    ``number`` counts the layers of this kind, which share ``pieces``. The output is a partial sum.
    """

    gated_delta_rule: ClassVar[bool] = True
    """Kernels may replace `mix` of this class: `minisgl.plugins.kernels.converted.gated_delta.FastGatedDelta`."""

    def __init__(self, number: int, pieces: Pieces, c: ModelConfig, ctx: Context):
        super().__init__()
        self.number, self.pieces, self.ctx = number, pieces, ctx
        self.kept = 0  # the most tokens of a row that may be taken back: the row's token and its drafts
        self.all_k_heads, self.dk, self.dv = (
            c.need(f"linear_{size}") for size in ("num_key_heads", "key_head_dim", "value_head_dim")
        )
        v_heads, self.kernel = c.need("linear_num_value_heads"), c.need("linear_conv_kernel_dim")
        if v_heads % self.all_k_heads:
            raise ConfigError(f"linear_num_value_heads ({v_heads}) must be a multiple of {self.all_k_heads} key heads.")
        self.k_heads = split_rows(self.all_k_heads, ctx.comm.size, "key heads of linear attention")
        self.ratio = v_heads // self.all_k_heads  # value heads of a key head
        self.v_heads = self.k_heads * self.ratio
        self.features = [self.k_heads * self.dk, self.k_heads * self.dk, self.v_heads * self.dv]  # of q, k and v
        self.in_proj: Merged = self.input_projection(c.hidden_size)
        self.conv = ctx.parameter(sum(self.features), 1, self.kernel)
        self.dt_bias, self.A_log = ctx.parameter(self.v_heads), ctx.parameter(self.v_heads)
        self.norm = GatedNorm(self.dv, c.rms_norm_eps, ctx)
        self.out_proj = LinearRowParallel(v_heads * self.dv, c.hidden_size, ctx, reduce=False)

    def input_projection(self, hidden_size: int) -> Merged:
        """Build the projection. Of a key head, it has one after another: query, key, its values, their gates.

        A second matrix has betas and decays of the key head's value heads.
        """
        rows = [self.all_k_heads * size for size in (2 * self.dk + 2 * self.ratio * self.dv, 2 * self.ratio)]
        return LinearColParallelMerged(hidden_size, rows, ("in_proj_qkvz", "in_proj_ba"), self.ctx)

    def project(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return queries, keys and values of x [n, hidden], one after another, their gates, betas and decays."""
        values = self.ratio * self.dv
        projected, ba = self.in_proj(x).split([here for *_, here in self.in_proj.parts], dim=-1)
        by_head = projected.view(len(x), self.k_heads, -1).split([self.dk, self.dk, values, values], dim=-1)
        q, k, v, gate = (part.flatten(1) for part in by_head)
        beta, decay = (part.flatten(1) for part in ba.view(len(x), self.k_heads, -1).chunk(2, dim=-1))
        return torch.cat((q, k, v), dim=-1), gate, beta, decay

    def weight_shards(self, prefix: str, names: frozenset[str] | None) -> Iterator[WeightShard]:
        """Yield the shards of the projections, and this rank's heads of the other tensors."""
        for name in ("in_proj", "norm", "out_proj"):
            yield from weight_shards_of(getattr(self, name), f"{prefix}{name}.", names)
        rank, size, begin, base = self.ctx.comm.rank, self.ctx.comm.size, 0, 0
        shape = (size * sum(self.features), 1, self.kernel)
        for here in self.features:
            yield WeightShard.part(
                f"{prefix}conv1d.weight", shape, 0, base + rank * here, self.conv[begin : begin + here]
            )
            begin, base = begin + here, base + size * here
        for name in ("dt_bias", "A_log"):
            start = rank * self.v_heads
            yield WeightShard.part(f"{prefix}{name}", (size * self.v_heads,), 0, start, getattr(self, name))

    def state_shapes(self) -> list[tuple[tuple[int, ...], torch.dtype]]:
        """Return the sizes of one request's state: the last inputs of the convolution, and a matrix for each head.

        With drafts, there are also the row's last tokens, which the state has not absorbed, and the position of the
        first: their inputs of the convolution, and their betas and decays.
        """
        features, number = sum(self.features), self.kept
        state = [((features, self.kernel - 1), self.ctx.dtype), ((self.v_heads, self.dk, self.dv), torch.float32)]
        tokens = [((features, number), self.ctx.dtype), ((2, number, self.v_heads), torch.float32), ((), torch.int32)]
        return state + tokens if number else state

    def forward(self, x: Tensor) -> Tensor:
        """Compute the layer of x [tokens, hidden], row by row of the step; decode rows are one batch.

        Each row goes on with the state in its slot, or with zeros if it begins at position 0, and leaves its new state.
        """
        mixed, gate, beta, decay = self.project(x)
        out = torch.empty((len(x), self.v_heads * self.dv), dtype=x.dtype, device=x.device)
        tensors = 5 if self.kept else 2
        states = self.ctx.states[tensors * self.number : tensors * (self.number + 1)]
        self.mix(states, self.pieces.of_step(self.ctx), mixed, gate, beta, decay, out)
        result: Tensor = self.out_proj(out)
        return result

    def mix(
        self, states: list[Tensor], pieces: list[_Piece], mixed: Tensor, gate: Tensor, beta: Tensor, decay: Tensor,
        out: Tensor,
    ) -> None:  # fmt: skip
        """Absorb the tokens of ``pieces``, all from the first one's on, into ``states``, those of this layer.

        The other tensors are [tokens, features] of all tokens of the step. What is read after each token, normed and
        gated, is written to ``out``.
        """
        rest = slice(pieces[0].tokens.start, None)
        log_decay = -self.A_log.float().exp() * F.softplus(decay.float() + self.dt_bias)
        beta = beta.sigmoid().float()
        read = torch.empty_like(out)
        for piece in pieces:
            slots = piece.slots.long()
            parts = [part[piece.tokens].unflatten(0, (len(slots), -1)) for part in (mixed, beta, log_decay)]
            absorb = self._absorb_later if self.kept else self._absorb
            read[piece.tokens] = absorb(states, piece, slots, *parts).flatten(0, 1)
            if piece.save is not None:
                for state in states:
                    state[piece.save] = state[slots[0]]
        normed = self.norm(*(part[rest].unflatten(-1, (self.v_heads, self.dv)) for part in (read, gate)))
        out[rest] = normed.flatten(1)

    def _absorb(
        self, states: list[Tensor], piece: _Piece, slots: Tensor, mixed: Tensor, beta: Tensor, log_decay: Tensor
    ) -> Tensor:
        """Absorb equally many tokens of some rows, [rows, tokens, features], into the states in their ``slots``.

        Returns what is read after each token.
        """
        inputs, matrices = states
        begins = (piece.starts == 0).view(-1, 1, 1)
        window = torch.cat((inputs[slots].masked_fill(begins, 0.0), mixed.transpose(1, 2)), dim=-1)
        inputs[slots] = window[..., mixed.shape[1] :]
        state = matrices[slots].masked_fill(begins[..., None], 0.0)
        read, matrices[slots] = self._run(window, beta, log_decay, state)
        return read

    def _absorb_later(
        self, states: list[Tensor], piece: _Piece, slots: Tensor, mixed: Tensor, beta: Tensor, log_decay: Tensor
    ) -> Tensor:
        """Compute `_absorb`, but keep the tokens of a row beside its state if there are at most ``kept``.

        A row whose drafts were rejected goes on within the tokens that it kept, so that its state absorbs those before.
        """
        inputs, matrices, tokens, scalars, first = states
        at_start = piece.starts == 0
        begins = at_start.view(-1, 1, 1)
        count = torch.where(at_start, 0, piece.starts - first[slots])[:, None]  # of the tokens kept, [rows, 1]
        real = (torch.arange(self.kept, device=count.device) < count)[..., None]
        window = torch.cat((inputs[slots].masked_fill(begins, 0.0), tokens[slots]), dim=-1)
        state = matrices[slots].masked_fill(begins[..., None], 0.0)
        # A token with a beta and a log decay of 0 leaves a state as it is.
        betas, decays = scalars[slots].masked_fill(~real[:, None], 0.0).unbind(1)
        _, state = self._run(window, betas, decays, state)
        last = count + torch.arange(self.kernel - 1, device=count.device)
        earlier = window.gather(2, last.long()[:, None].expand(-1, len(self.conv), -1))
        window = torch.cat((earlier, mixed.transpose(1, 2)), dim=-1)
        read, after = self._run(window, beta, log_decay, state)
        if (number := mixed.shape[1]) > self.kept or piece.save is not None:
            earlier, state = window[..., number:], after
            first[slots] = piece.starts + number
        else:
            tokens[slots, :, :number] = mixed.transpose(1, 2)
            scalars[slots, :, :number] = torch.stack((beta, log_decay), dim=1)
            first[slots] = piece.starts
        inputs[slots], matrices[slots] = earlier, state
        return read

    def _run(self, window: Tensor, beta: Tensor, log_decay: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        """Return what each token reads, [rows, tokens, features], and the states after the tokens.

        ``window`` [rows, features, kernel - 1 + tokens] has the inputs of the convolution, ``beta`` and ``log_decay``
        are [rows, tokens, heads].
        """
        features = F.silu(F.conv1d(window, self.conv, groups=len(self.conv))).transpose(1, 2)
        q, k, v = (
            part.unflatten(-1, (-1, dim)).transpose(1, 2).float()  # [rows, heads, tokens, dim]
            for part, dim in zip(features.split(self.features, dim=-1), (self.dk, self.dk, self.dv), strict=True)
        )
        q, k = _unit(q).repeat_interleave(self.ratio, 1) * self.dk**-0.5, _unit(k).repeat_interleave(self.ratio, 1)
        scalars, read = (beta.transpose(1, 2), log_decay.transpose(1, 2)), []
        for start in range(0, features.shape[1], CHUNK):
            chunk = slice(start, start + CHUNK)
            *parts, betas, decays = (part[:, :, chunk] for part in (q, k, v, *scalars))
            values, state = delta_rule(parts[0], parts[1], parts[2], betas, decays, state)
            read.append(values)
        return torch.cat(read, dim=2).transpose(1, 2).flatten(2).to(window.dtype), state


class _Piece(NamedTuple):
    """Tokens of a step that are absorbed at once: equally many of some rows."""

    slots: Tensor  # [rows] int32: the slots of their states
    tokens: slice
    starts: Tensor  # [rows] int32: the position of each row's first token here
    save: int | None = None  # the slot in which the state after these tokens is saved


class Pieces:
    """The pieces of the step that runs. They are the same for all layers, so the first one computes them.

    ``plan`` is what kernels in place of `GatedDeltaNet.mix` compute of the step, also once.
    """

    def __init__(self) -> None:
        self.plan: Any = None
        self._made: tuple[AttnBatch, tuple[I32, I32, I32] | None, list[_Piece]] | None = None

    def of_step(self, ctx: Context) -> list[_Piece]:
        """Return the pieces in which the tokens of the batch of ``ctx`` are absorbed."""
        batch, saves = ctx.batch, ctx.state_saves
        assert batch is not None
        if batch.graph_key is not None:  # a recording: its tensors must not outlive the forward pass
            return list(_pieces(batch, saves))
        if self._made is None or self._made[0] is not batch or self._made[1] is not saves:
            self._made, self.plan = (batch, saves, list(_pieces(batch, saves))), None
        return self._made[2]


def _pieces(batch: AttnBatch, saves: tuple[I32, I32, I32] | None) -> Iterator[_Piece]:
    """Yield the tokens of all decode rows, and then those of the other rows, up to each position that is saved.

    Neighbouring rows without such a position that have equally many tokens are absorbed together.
    """
    if batch.num_decode:
        rows = slice(0, batch.num_decode)
        yield _Piece(batch.req_pool_indices[rows], rows, batch.seq_lens[rows] - 1)
    stops: dict[int, list[tuple[int, int | None]]] = {}
    for row, position, slot in zip(*(column.tolist() for column in saves or ()), strict=True):
        stops.setdefault(row, []).append((position, slot))
    borders, lengths = batch.cu_seqlens_q_cpu.tolist(), batch.seq_lens_cpu.tolist()
    row, last = batch.num_decode, len(borders) - 1
    while row < last:
        token, count = borders[row], borders[row + 1] - borders[row]
        end = row + 1
        while row not in stops and end < last and end not in stops and borders[end + 1] - borders[end] == count:
            end += 1
        slots, starts = batch.req_pool_indices[row:end], batch.seq_lens[row:end] - count
        for position, slot in [*stops.get(row, ()), (lengths[row], None)]:
            stop = borders[end] - lengths[row] + position
            if stop > token:
                yield _Piece(slots, slice(token, stop), starts, slot)
                token, starts = stop, starts + (stop - token)
        row = end


def _unit(x: Tensor) -> Tensor:
    """Return x [..., dim] with length 1."""
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + 1e-6)


def delta_rule(
    q: Tensor, k: Tensor, v: Tensor, beta: Tensor, log_decay: Tensor, state: Tensor
) -> tuple[Tensor, Tensor]:
    """Absorb a chunk of tokens into ``state`` and read it after each token. Return what is read, and the new state.

    q and k are [..., tokens, dk], v is [..., tokens, dv], ``beta`` and ``log_decay`` [..., tokens], ``state`` [..., dk,
    dv]. Token i makes of the state S first S' = exp(log_decay_i)·S. Then it adds k_i·u_i, where
    u_i = beta_i·(v_i - k_i·S') corrects what S' holds for k_i, and q_i reads the sum. All u_i of the chunk are the
    solution of one triangular system.
    """
    total = log_decay.cumsum(-1)
    past = (total[..., :, None] - total[..., None, :]).tril().exp().tril()  # decay from token j up to token i ≥ j
    from_state = total.exp()[..., None]
    system = (k @ k.mT) * past * beta[..., None]
    target = beta[..., None] * (v - from_state * (k @ state))
    u = target  # the solution for a single token
    if q.shape[-2] > 1:
        u = torch.linalg.solve_triangular(system, target, upper=False, unitriangular=True)
    read = from_state * (q @ state) + ((q @ k.mT) * past) @ u
    to_end = (total[..., -1:] - total).exp()[..., None]
    return read, state * from_state[..., -1:, :] + (k * to_end).mT @ u
