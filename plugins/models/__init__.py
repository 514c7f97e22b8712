"""The built-in plugins of the hook ``minisgl_models``, one file per plugin."""
