"""Tensor-parallel layers that the models are built from."""
