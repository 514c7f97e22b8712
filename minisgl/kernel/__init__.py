"""Kernels that no library covers, each beside its plain torch twin."""
