"""Kernels that no library provides, most with a torch reference: the same function in plain torch.

Most functions of this package run a Triton kernel (`minisgl.plugins.kernels.ops.triton`) on a GPU and a torch reference
on a CPU.
"""
