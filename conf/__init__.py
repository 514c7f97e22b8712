"""Configuration files of minisgl, read by Hydra. Installed as the package `minisgl.conf`."""
