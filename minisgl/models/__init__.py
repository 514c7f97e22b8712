"""Model configuration, weight loading and the decoder that all architectures share. Architectures are plugins.

Start reading with `decoder.py`. Its layers (`minisgl.layers`) are plain torch; `converter.py` says how plugins replace
them by faster ones.
"""
