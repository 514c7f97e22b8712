"""Counts what the host launches for one decode step, with and without graphs.

On a CPU, a graph runner that records the operations of the model knows their number. On a GPU, the profiler counts the
calls that launch a kernel or a graph.
"""

from __future__ import annotations

from typing import Any

from minisgl.config import Config
from minisgl.core import SamplingParams, Step, StepResult, TokenMasks
from minisgl.plugin_manager.manager import PluginManager
from minisgl.scheduler.build import build_scheduler

LAUNCHES = ("cudaLaunchKernel", "cuLaunchKernel", "cudaGraphLaunch")
"""Prefixes of the names of launching calls, of CUDA's runtime and driver."""
STEPS = 6


def launches_of(engine: Any, config: Config, manager: PluginManager) -> tuple[int | None, int | None]:
    """Return the launches of a decode step, as (without graphs, with graphs).

    A number is None if this engine cannot give it. On a GPU, the engine runs the step either with or without graphs, so
    one of the two numbers is None. On a CPU, a recording graph runner gives both numbers.
    """
    if engine.device.type != "cuda":
        recorded = getattr(getattr(engine, "graph", None), "operations", {})
        return (max(recorded.values()), 1) if recorded else (None, None)
    probe = _Probe(engine)
    scheduler = build_scheduler(config, manager, probe)
    params = SamplingParams(max_tokens=STEPS, temperature=0.0, ignore_eos=True)
    scheduler.add_request(0, list(range(1, 9)), params)
    while scheduler.has_work:
        scheduler.step()
    return (None, probe.launches) if probe.graphs else (probe.launches, None)


class _Probe:
    """An engine that wraps another and profiles the launch of the fourth step, in which one row decodes."""

    def __init__(self, engine: Any):
        self._engine, self.spec = engine, engine.spec
        self.eos_ids: frozenset[int] = engine.eos_ids
        self.launches = self.graphs = 0

    def launch(self, step: Step) -> None:
        if step.id != 3:
            self._engine.launch(step)
            return
        from torch.profiler import ProfilerActivity, profile

        with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiled:
            self._engine.launch(step)
        calls = {e.key: e.count for e in profiled.key_averages() if e.key.startswith(LAUNCHES)}
        self.launches = sum(calls.values())
        self.graphs = sum(n for name, n in calls.items() if "Graph" in name)

    def sample(self, masks: TokenMasks) -> None:
        self._engine.sample(masks)

    def result(self) -> StepResult:
        result: StepResult = self._engine.result()
        return result

    def close(self) -> None:
        """Do nothing: the wrapped engine belongs to the caller."""
