"""A decoder layer for a few decode rows: torch references of `minisgl.plugins.kernels.ops.triton.decode_layer`.

For 1 to 8 rows, a layer is limited by the time between launches as much as by the bytes of its weights. So a
GPU computes it with few launches: norm + QKV projection; QK-norm + RoPE + KV store + attention; the merge of the
attention's splits; output projection + residual; norm + gate and up + activation; down + residual. A layer with experts
has the router's logits, the experts' gate and up, and the experts' down instead of the last two. The residual stream is
complete after each projection: the next norm has nothing to add.
"""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from minisgl.plugins.kernels.ops.activation import Act, act_and_mul
from minisgl.plugins.kernels.ops.routing import softmax_topk_torch


def projection_torch(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    norm_weight: Tensor | None = None,
    eps: float = 0.0,
    residual: Tensor | None = None,
    act: Act | None = None,
) -> Tensor:
    """Return act(norm(x)·weightᵀ + bias) + residual for x [rows, in] and weight [out, in]; [rows, out].

    Without ``norm_weight`` [in], ``bias`` [out], ``residual`` [rows, out] or ``act`` that part is left out. With
    ``act``, the weight and bias hold gate and up one after the other, and the result is act(gate)·up.
    """
    if norm_weight is not None:
        x = F.rms_norm(x, norm_weight.shape, norm_weight, eps)
    y = F.linear(x, weight, bias)
    if act is not None:
        y = act_and_mul(y, act)
    return y if residual is None else residual + y


def experts_torch(
    x: Tensor,
    norm_weight: Tensor,
    eps: float,
    logits: Tensor,
    gate_up: Tensor,
    down: Tensor,
    top_k: int,
    renormalize: bool,
    act: Act,
) -> Tensor:
    """Return x + the weighted sum of the experts that ``logits`` [rows, experts] choose for norm(x); [rows, hidden].

    x is the residual stream [rows, hidden]; gate_up [experts, 2·inner, hidden]; down [experts, hidden, inner].
    """
    normed = F.rms_norm(x, norm_weight.shape, norm_weight, eps)
    ids, weights = softmax_topk_torch(logits.float(), top_k, renormalize)
    out = x.clone()
    for row in range(len(x)):
        for expert, weight in zip(ids[row].tolist(), weights[row], strict=True):
            inner = act_and_mul(F.linear(normed[row], gate_up[expert]), act)
            out[row] += weight.to(x.dtype) * F.linear(inner, down[expert])
    return out
