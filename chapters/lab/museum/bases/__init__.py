"""Plugins without a fault, into which the pieces of the museum plant theirs."""
