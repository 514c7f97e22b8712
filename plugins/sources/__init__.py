"""Models with a short name that are installed as packages of their own: plugins that implement `minisgl_find_model`."""
