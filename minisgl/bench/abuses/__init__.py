"""Abuses of a server, and what other clients notice of them, for ``python -m minisgl.bench abuse``."""
