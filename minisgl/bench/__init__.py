"""`python -m minisgl.bench`: the benchmarks of the engine, the scheduler and the kernels."""
