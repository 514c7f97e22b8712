"""Traces: what a scheduler did, event by event, read back, checked against the promises, and drawn."""
