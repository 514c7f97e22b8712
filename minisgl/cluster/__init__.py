"""Several servers (replicas) behind one router. `minisgl.cluster.routing` is the interface of a routing policy."""
