"""Grades one lab file: each gate in a process of its own, then the real server."""
