"""What `quantization=fp8` consists of: layouts of checkpoints, matrices in e4m3, and layers that multiply with them."""
