"""What `quantization=gguf` consists of: the reader of GGUF files, types of numbers, and checkpoints in such files."""
