"""What a request may sample, beside its grammar: plugins that implement `minisgl_wrap_constraint`.

Each is loaded for the first request that has one of its parameters. Without it, such a request is refused.
"""
