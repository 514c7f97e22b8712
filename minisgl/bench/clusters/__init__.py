"""`bench cluster`: requests with shared prefixes, replicas in simulation or behind HTTP, their results and the plot."""
