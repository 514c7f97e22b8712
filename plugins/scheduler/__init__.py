"""The built-in scheduling policies (hook `minisgl_scheduler`), one file each."""
