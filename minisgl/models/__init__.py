"""Model configuration, weight loading and the decoder that all architectures share. Architectures are plugins.

Start reading with `plain.py`: one decoder layer in plain torch, written as a single function. Then read `decoder.py`,
which computes the same from tensor-parallel layers (`minisgl.layers`) and fused kernels
(`minisgl.plugins.kernels.ops`).
"""
