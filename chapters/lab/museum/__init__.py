"""The museum: famous faults of real engines, each planted in a plugin that a student runs, explains and mends.

A piece is described in ``pieces/NAME.toml``. Its plugin is one of ``bases/`` with a few lines changed, so the base is
the reference mend. The command line is ``python -m minisgl.lab break``.
"""
