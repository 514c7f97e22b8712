"""The core's layers in a fixed order of sums on a GPU: what ``kernels=exact`` builds there.

The order is that of `minisgl.plugins.kernels.ops.triton.exact_linear` for products, of one program for each row for
norms, and of one program for each row of logits for log-probabilities and top-p. Nothing waits for the device, so steps
can be recorded in CUDA graphs. `minisgl.plugins.kernels.converted.exact` is the same on a CPU.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING

from torch import Tensor, nn

from minisgl.config import ConfigError
from minisgl.layers.attention import AttentionLayer, RMSNorm, RMSNormFused
from minisgl.layers.embedding import ParallelLMHead, VocabParallelEmbedding
from minisgl.layers.linear import GatedMLP, LinearColParallelMerged, LinearQKVMerged, LinearRowParallel
from minisgl.models.converter import Kernels, convert
from minisgl.plugins.kernels.exact import refuse_quantized

if TYPE_CHECKING:
    from minisgl.engine.sampler import Sampler

__all__ = ["FixedOrderTritonKernels"]


class ExactColParallelMerged(LinearColParallelMerged):
    """`LinearColParallelMerged` in a fixed order."""

    def forward(self, x: Tensor) -> Tensor:
        """Multiply x [tokens, in] with all parts: see `LinearColParallelMerged`."""
        from minisgl.plugins.kernels.ops.triton import exact_linear

        return exact_linear.linear(x, self.weight, self.bias)


class ExactQKVMerged(LinearQKVMerged):
    """`LinearQKVMerged` in a fixed order."""

    def forward(self, x: Tensor) -> Tensor:
        """Multiply x [tokens, in] with all parts: see `LinearQKVMerged`."""
        from minisgl.plugins.kernels.ops.triton import exact_linear

        return exact_linear.linear(x, self.weight, self.bias)


class ExactRowParallel(LinearRowParallel):
    """`LinearRowParallel` as the sum of two halves, of which each of two ranks computes one."""

    def forward(self, x: Tensor) -> Tensor:
        """Multiply x [tokens, in / size]: see `LinearRowParallel`."""
        from minisgl.plugins.kernels.ops.triton import exact_linear

        bias = self.bias if self.comm.rank == 0 else None
        y = exact_linear.linear(x, self.weight, bias, halves=2 // self.comm.size)
        return self.comm.all_reduce(y) if self.reduce else y


class ExactLMHead(ParallelLMHead):
    """`ParallelLMHead` in a fixed order."""

    def product(self, hidden: Tensor) -> Tensor:
        """Return the logits [rows, rows of this rank]."""
        from minisgl.plugins.kernels.ops.triton import exact_linear

        return exact_linear.linear(hidden, self.weight)


class ExactNorm(RMSNorm):
    """`RMSNorm`, one program for each row."""

    def forward(self, x: Tensor) -> Tensor:
        """Normalise x [..., dim]."""
        from minisgl.plugins.kernels.ops.triton import norm

        return norm.rms_norm(x, self.weight, self.eps)


class ExactNormFused(RMSNormFused):
    """`RMSNormFused`, one program for each row."""

    def forward(  # type: ignore[override]
        self, x: Tensor, residual: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Return ``(norm(x + residual), x + residual)``: see `RMSNormFused`."""
        from minisgl.plugins.kernels.ops.triton import norm

        if residual is None:
            return norm.rms_norm(x, self.weight, self.eps), x
        if self.comm is not None:
            x = self.comm.all_reduce(x)
        return norm.add_rms_norm(x, residual, self.weight, self.eps)


class ExactMLP(GatedMLP):
    """`GatedMLP` in a fixed order."""

    def forward(self, x: Tensor) -> Tensor:
        """Compute the MLP of x [tokens, hidden]; returns a partial sum [tokens, hidden]."""
        from minisgl.plugins.kernels.ops.triton import activation

        out: Tensor = self.down_proj(activation.silu_and_mul(self.gate_up_proj(x)))
        return out


CLASSES: Mapping[type, type] = MappingProxyType(
    {
        LinearColParallelMerged: ExactColParallelMerged,
        LinearQKVMerged: ExactQKVMerged,
        LinearRowParallel: ExactRowParallel,
        ParallelLMHead: ExactLMHead,
        RMSNorm: ExactNorm,
        RMSNormFused: ExactNormFused,
        GatedMLP: ExactMLP,
    }
)
"""Plain class → the class of a converted module."""
KNOWN = (*CLASSES.values(), VocabParallelEmbedding, AttentionLayer)


class FixedOrderTritonKernels(Kernels):
    """Converts all layers and the sampler. Refuses a model with layers that are not the core's, such as experts."""

    def after_loading(self, model: nn.Module) -> None:
        """Convert the layers. Raises `ConfigError` for a layer whose order of sums is not known."""
        refuse_quantized(model)
        convert(model, CLASSES)
        for name, module in model.named_modules():
            kind = type(module)
            if kind not in KNOWN and (
                isinstance(module, KNOWN) or next(module.parameters(recurse=False), None) is not None
            ):
                raise ConfigError(f"exact=true does not know the order of sums of {kind.__name__} ({name}) on a GPU.")
            if isinstance(module, ExactRowParallel) and module.comm.size > 2:
                size = module.comm.size
                raise ConfigError(
                    f"exact=true needs tp=1 or tp=2: with tp={size}, sums over the ranks have another order."
                )
            if isinstance(module, ExactRowParallel) and module.weight.shape[1] * module.comm.size % 2:
                raise ConfigError(f"exact=true can't halve {module.weight.shape[1]} inputs ({name}).")
            if isinstance(module, ExactMLP) and module.act_name != "silu":
                raise ConfigError(f"exact=true computes the activation silu, not {module.act_name} ({name}).")

    def convert_sampler(self, sampler: Sampler) -> None:
        """Choose tokens with Triton kernels, and compute sums over the vocabulary in a fixed order."""
        from minisgl.plugins.kernels.ops.triton import exact_sums, sampling

        sampler.draw, sampler.argmax = sampling.gumbel_argmax, sampling.gumbel_argmax
        sampler.mask_tokens = sampling.mask_tokens
        sampler.log_sum_exp, sampler.sums = exact_sums.log_sum_exp, exact_sums
