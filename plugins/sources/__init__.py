"""Models from other places than a directory: plugins that implement `minisgl_find_model`."""
