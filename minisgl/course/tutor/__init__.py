"""Trains and scores the embedded model `tutor`. The weights are in `minisgl.models.shipped`."""
