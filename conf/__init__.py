"""Configuration files. Installed as `minisgl.conf`."""
