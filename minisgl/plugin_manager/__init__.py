"""The plugin manager: it finds, checks and loads plugins, and calls their hooks."""
