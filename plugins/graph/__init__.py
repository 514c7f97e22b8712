"""Built-in plugins for the hook of this name, one file each."""
