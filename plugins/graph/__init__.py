"""Built-in plugins for the hook `minisgl_graph`, one file each."""
