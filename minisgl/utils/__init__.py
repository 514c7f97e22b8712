"""Small helpers that every part of minisgl may use: lazy imports, free ports, the version."""
