"""The built-in plugins of the hook ``minisgl_moe``, one file per plugin."""
