"""Checkpoints whose weights are stored in FP8: the layouts that minisgl reads, and the numbers that they mean.

``quantization_config`` of config.json names the layout. It does not decide which tensors are in FP8: the dtypes in the
files do. So ``modules_to_not_convert``, ``ignored_layers`` and ``ignore``, which list the modules in 16 bits, are not
needed. What an element means is its e4m3 number times its scale. A weight has one scale, or one for each row, or one
for each block.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from minisgl.config import ConfigError
from minisgl.plugins.kernels.ops.fp8 import BLOCK

__all__ = ["SCALES", "UNUSED", "StoredFp8", "dequantize_slice", "stored_fp8"]

SCALES = ("_scale_inv", "_scale")
"""What follows the name of a weight in the name of its scales. Both are the factor from e4m3 back to the weight."""

UNUSED = tuple(
    f".{name}_scale"
    for name in ("input", "activation", "output", "q", "k", "v", "kv", "k_proj.output", "v_proj.output")
)
"""Name suffixes of tensors that are not read: scales of activations and of a KV pool in FP8. minisgl computes the
scales of activations when it multiplies them, and its KV pool has 16 bits."""


@dataclass(frozen=True)
class StoredFp8:
    """The layout of a checkpoint in FP8.

    ``block`` is the size of a weight's block, (rows, columns), where scales are blocks. ``dequantized`` is the reason
    why the weights are converted to the model's dtype while they are loaded, or "" if the linear layers multiply them
    in FP8 (`minisgl.plugins.quantization.e4m3.layers`).
    """

    block: tuple[int, int] | None
    dequantized: str = ""


def stored_fp8(config: Any) -> StoredFp8 | None:
    """Return the layout that ``config``, the ``quantization_config`` of config.json, describes, or None without one.

    Raises `ConfigError` for a quantisation other than FP8, and for layouts that minisgl can't read.
    """
    if not config:
        return None
    if not isinstance(config, Mapping):
        raise ConfigError(f"quantization_config must be a JSON object, got {config!r}.")
    method = config.get("quant_method")
    if method == "fp8":
        layout = _fine_grained(config)
    elif method == "compressed-tensors":
        layout = _compressed_tensors(config)
    elif method == "fbgemm_fp8" or (method == "modelopt" and config.get("quant_algo") == "FP8"):
        layout = StoredFp8(None, "a weight does not have one scale for each block of 128 × 128")
    else:
        algorithm = f", quant_algo={config['quant_algo']!r}" if method == "modelopt" and "quant_algo" in config else ""
        raise ConfigError(
            f"quantization_config has quant_method={method!r}{algorithm}, but only 'fp8' is supported, and, with "
            "weights in FP8, 'compressed-tensors', 'fbgemm_fp8' and 'modelopt': use the checkpoint in bfloat16."
        )
    return layout


def _fine_grained(config: Mapping[str, Any]) -> StoredFp8:
    """Return the layout of ``quant_method=fp8``: Qwen3-FP8, DeepSeek-V3, and vLLM's own with a scale per tensor."""
    valid = {
        "fmt": ("e4m3", "float8_e4m3fn"),
        "activation_scheme": ("dynamic", "static"),
        "scale_fmt": ("float", "ue8m0"),
        "expert_dtype": ("fp8",),
    }
    given = {key: _lower(config.get(key)) or values[0] for key, values in valid.items()}
    for key, values in valid.items():
        if given[key] not in values:
            supported = " or ".join(map(repr, values))
            raise ConfigError(f"quantization_config has {key}={config.get(key)!r}, but only {supported} is supported.")
    block = _block(config.get("weight_block_size"))
    if block != (BLOCK, BLOCK):
        return StoredFp8(block, "a weight does not have one scale for each block of 128 × 128")
    if given["activation_scheme"] == "static":
        return StoredFp8(block, "the scales of activations are static")
    if given["scale_fmt"] != "float":
        return StoredFp8(block, f"scale_fmt is {given['scale_fmt']}")
    return StoredFp8(block)


def _compressed_tensors(config: Mapping[str, Any]) -> StoredFp8:
    """Return the layout of ``quant_method=compressed-tensors``, of LLM Compressor."""
    blocks = set()
    groups = config.get("config_groups")
    for name, group in (groups if isinstance(groups, Mapping) else {}).items():
        weights = group.get("weights") or {}
        given = (weights.get("type"), weights.get("num_bits"), weights.get("strategy"), weights.get("symmetric", True))
        if given[:2] != ("float", 8) or given[2] not in ("tensor", "channel", "block") or given[3] is not True:
            raise ConfigError(
                f"quantization_config has {name} with weights of type={given[0]!r}, num_bits={given[1]!r}, "
                f"strategy={given[2]!r}, symmetric={given[3]!r}, but only symmetric 8-bit floats with one scale for "
                "each tensor, channel or block are supported: use the checkpoint in bfloat16."
            )
        blocks.add(_block(weights.get("block_structure")) if given[2] == "block" else None)
    sparsity = config.get("sparsity_config") or {}
    if not blocks or len(blocks - {None}) > 1 or config.get("transform_config"):
        raise ConfigError("quantization_config has transforms, no config_groups, or blocks of several sizes.")
    if sparsity.get("format", "dense") != "dense":
        raise ConfigError(f"quantization_config has sparsity_config.format={sparsity['format']!r}, not 'dense'.")
    return StoredFp8(max(blocks, key=bool), "the layout is that of compressed-tensors")


def _lower(value: Any) -> Any:
    return value.lower() if isinstance(value, str) else value


def _block(value: Any) -> tuple[int, int] | None:
    """Return the size of blocks, or None if there is none. Raises `ConfigError` if it is not two positive integers."""
    if value is None:
        return None
    if isinstance(value, Sequence) and len(value) == 2 and all(type(n) is int and n > 0 for n in value):
        return value[0], value[1]
    raise ConfigError(f"quantization_config has weight_block_size={value!r}, which is not two positive integers.")


def dequantize_slice(
    values: Tensor, scale: Tensor, shape: Sequence[int], index: Sequence[slice], block: tuple[int, int] | None
) -> Tensor:
    """Return what the slice ``values`` of a weight means, in float32.

    ``values`` is the weight of ``shape`` [..., out, in] at ``index``, in e4m3. ``scale`` is the whole tensor of scales:
    one number; one for each row, [..., out] or [..., out, 1]; or one for each ``block`` of rows × columns,
    [..., ⌈out/rows⌉, ⌈in/columns⌉]. Raises ValueError for another shape of ``scale``.
    """
    if scale.numel() == 1:
        scale = scale.reshape([1] * len(shape))
    elif list(scale.shape) == list(shape[:-1]):
        scale = scale.unsqueeze(-1)
    sizes = [1] * (len(shape) - 2) + list(block or (1, 1))
    if scale.dim() != len(shape):
        raise ValueError(f"scales of shape {list(scale.shape)} do not fit a weight of shape {list(shape)}")
    factors = scale.float()
    for dim, (total, cut, size) in enumerate(zip(shape, index, sizes, strict=True)):
        if scale.shape[dim] == 1:
            continue
        if scale.shape[dim] not in (-(-total // size), total):
            raise ValueError(
                f"scales of shape {list(scale.shape)} do not fit a weight of shape {list(shape)} with blocks of "
                f"{list(block or ())}"
            )
        per_scale = size if scale.shape[dim] == -(-total // size) else 1
        at = torch.arange(cut.start, cut.stop, device=scale.device) // per_scale
        factors = factors.index_select(dim, at)
    return values.float().mul_(factors)
