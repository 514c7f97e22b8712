"""What the graph runners share: buckets, static inputs, recordings, and the runner of steps that replays them.

A graph runner derives from `BucketRunner`. Importing this package imports no torch.
"""

from minisgl.plugins.graph.replaying.buckets import BucketRunner, Buckets, StaticInputs, check_sizes

__all__ = ["EARLY", "BucketRunner", "Buckets", "StaticInputs", "check_sizes"]

EARLY = f"{__name__}.compile_workers.early_workers"
"""``early_context`` of the options of a graph runner, whose kernels are compiled ahead: see `minisgl.hooks`."""
