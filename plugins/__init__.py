"""The built-in plugins, one folder per kind. Installed as the package `minisgl.plugins`."""
