"""The built-in plugins, one folder a hook. Installed as `minisgl.plugins`."""
