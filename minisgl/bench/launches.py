"""How many things the host launches for one decode step, with and without graphs.

On a CPU a recording graph runner knows: it has each operation of the model on its tape. On a GPU the profiler does: it
sees every call that launches a kernel or a graph.
"""

from __future__ import annotations

from typing import Any

from minisgl.config import Config
from minisgl.core import SamplingParams, Step, StepResult
from minisgl.plugin_manager.manager import PluginManager
from minisgl.scheduler.build import build_scheduler

LAUNCHES = ("cudaLaunchKernel", "cuLaunchKernel", "cudaGraphLaunch")
"""What the names of such calls begin with (CUDA's runtime and driver)."""
STEPS = 6


def launches_of(engine: Any, config: Config, manager: PluginManager) -> tuple[int | None, int | None]:
    """Launches of a decode step (operation by operation, replayed), each None where this engine can't tell.

    An engine does one of the two on a GPU. On a CPU its tapes tell both.
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
    """An engine that profiles the launch of the fourth step, in which one row decodes."""

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

    def result(self) -> StepResult:
        result: StepResult = self._engine.result()
        return result

    def close(self) -> None:
        """The engine belongs to the caller."""
