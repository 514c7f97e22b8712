"""Finds, checks and loads plugins, and calls their hooks."""
