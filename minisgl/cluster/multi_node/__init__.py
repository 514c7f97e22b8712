"""The ranks of one model on several nodes, which torchrun starts: handshake, frames, link and remote ranks."""
