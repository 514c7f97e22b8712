"""Quantised weights: a checkpoint in another form than numbers of 16 or 32 bits, or conversion to one at load."""
