"""Kernels that no library provides, each with a torch reference: the same function in plain torch.

A function of this package runs the Triton kernel (`minisgl.kernel.triton`) on a GPU and the torch reference on a CPU.
"""
