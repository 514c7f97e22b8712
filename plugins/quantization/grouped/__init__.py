"""Layers whose weights are integers of 4 or 8 bits with a scale for each group of columns, on a CPU."""
