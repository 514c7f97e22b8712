"""Small helpers that every part of minisgl may use: lazy imports, logging, free ports, the version."""
