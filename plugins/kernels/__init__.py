"""Kernels that are faster than torch: `ops` has the functions, `converted` the layers that call them."""
