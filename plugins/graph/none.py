"""`graph=none`: every step runs operation by operation, without graphs. The default on a CPU, and easiest to debug."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from minisgl.hooks import hookimpl

if TYPE_CHECKING:
    from minisgl.attention import AttentionBackend
    from minisgl.config import Config
    from minisgl.engine.engine import TorchEngine
    from minisgl.engine.model_runner import ModelRunner, StepRunner


@dataclass
class NoGraph:
    """No graphs: every step runs eagerly."""

    def build(self) -> NoGraphRunner:
        return NoGraphRunner()


class NoGraphRunner:
    """Graph runner that records nothing."""

    def wrap_attention(self, backend: AttentionBackend, max_tokens: int) -> AttentionBackend:
        """Return ``backend`` itself."""
        return backend

    def wrap(self, runner: ModelRunner) -> StepRunner:
        """Return ``runner`` itself."""
        return runner

    def warm_up(self, engine: TorchEngine, config: Config, *, drafting: bool) -> None:
        """Compute steps of all kinds on a GPU, so that no request waits for a compiler."""
        if engine.device.type != "cpu":
            from minisgl.plugins.graph.replaying.warmup import warm_up

            warm_up(engine, config, drafting=drafting)


@hookimpl
def minisgl_configs() -> Iterable[tuple[str, str, type]]:
    yield "graph", "none", NoGraph
