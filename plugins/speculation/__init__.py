"""The built-in prefix caches (hook `minisgl_cache`), one file each."""
