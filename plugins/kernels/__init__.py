"""Kernels that are faster than the core's torch functions, in `minisgl.plugins.kernels.ops`."""
