"""Routers: each file is one choice of ``router=``."""
