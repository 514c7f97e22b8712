"""The load generator behind ``bench online`` and ``bench replay``: workloads, client processes, metrics, reports."""
