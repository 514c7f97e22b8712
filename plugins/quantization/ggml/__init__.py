"""What ``quantization=gguf`` consists of: the reader of GGUF files, ggml's types of numbers, and checkpoints in them."""
