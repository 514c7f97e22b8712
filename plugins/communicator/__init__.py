"""The built-in plugins of the hook ``minisgl_communicator``, one file per plugin."""
