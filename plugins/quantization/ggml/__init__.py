"""What ``quantization=gguf`` consists of: how ggml's types store numbers, and checkpoints in a GGUF file."""
