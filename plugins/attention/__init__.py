"""Built-in plugins for the hook `minisgl_attention`, one file each."""
