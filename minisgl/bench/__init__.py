"""`python -m minisgl.bench`: measure the engine."""
