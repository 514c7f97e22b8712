"""Training and scoring of the embedded model `tutor`. The weights are in `minisgl.models.shipped`."""
