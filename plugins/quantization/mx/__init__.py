"""Weights in the formats of the OCP Microscaling specification."""
