"""Ctrl-C of an `LLM` waits for the end of a turn: the interrupted call is cancelled, and the next call works."""
