"""Processors of logits beside temperature, top-k and top-p: each is a `LogitsProcessor`, which it adds to the sampler.

The engine loads all of them at its start, so that their tables are allocated before the KV pool. Without a file of this
folder, a request with its parameters is refused.
"""
