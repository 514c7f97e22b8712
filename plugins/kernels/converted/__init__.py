"""The modules that replace the core's when a model is converted to kernels."""
