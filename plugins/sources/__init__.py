"""Where models come from, beside directories of safetensors files: the plugins that implement `minisgl_find_model`."""
