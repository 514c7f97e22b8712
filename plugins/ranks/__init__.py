"""How the ranks of an `LLM` run, if there are several."""
