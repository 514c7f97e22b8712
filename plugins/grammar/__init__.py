"""Structured output: answers that a JSON schema, a regular expression or a grammar allows. One file for each plugin.

A grammar says which texts an answer may be. Before a token is sampled, a mask forbids all tokens after which no such
text is possible: Willard and Louf, Efficient Guided Generation for Large Language Models, 2023. `base` has what the
plugins share. Without this folder, a request with a grammar is refused.
"""
