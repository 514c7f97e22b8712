"""What a person at a terminal uses and the engine does not need: help, completion, the chat, the demo, Ctrl-C of `LLM`.

The folder ``interrupts`` imports torch, and its module is loaded at the first use of ``minisgl.LLM``.
"""
