"""Processors of logits beside the temperature, and log-probabilities.

A processor is a `LogitsProcessor`, which its plugin adds to the sampler.

The engine loads all of them at its start, so that their tables are allocated before the KV pool. Without a file of this
folder, a request with its parameters is refused.
"""
