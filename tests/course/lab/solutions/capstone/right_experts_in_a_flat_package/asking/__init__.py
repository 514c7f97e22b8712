"""Experts that ask who chose them."""
