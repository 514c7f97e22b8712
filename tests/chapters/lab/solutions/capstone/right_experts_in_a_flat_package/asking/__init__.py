"""The package of the MoE backend `asking`, which is not in a folder src."""
