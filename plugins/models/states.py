"""Recurrent states, for models of this folder whose layers have some: docs/design/states.md."""

from __future__ import annotations

import logging

import torch
from torch import Tensor

from minisgl.config import Config, ConfigError
from minisgl.layers import Context
from minisgl.plugin_manager.manager import PluginManager

log = logging.getLogger(__name__)

PROPOSERS = ("ngram", "suffix", "lookup")
"""Proposers whose option ``max_drafts`` is the most drafts of a row."""


class WithStates:
    """The part of a model that allocates its states. Its base class is a `Decoder`, or another model."""

    ctx: Context

    def state_shapes(self) -> list[tuple[tuple[int, ...], torch.dtype]]:
        """Return shape and dtype of each tensor of one request's state. A layer finds them in `Context.states`."""
        raise NotImplementedError

    def keep_tokens(self, number: int) -> None:
        """Let the layers take back up to ``number`` of a row's last tokens. Then `state_shapes` has room for them."""
        raise NotImplementedError

    def allocate_states(self, config: Config, manager: PluginManager) -> list[Tensor]:
        """Return a tensor for each of `state_shapes`: [request-pool rows, scratch row too, snapshots, *shape].

        Raises `ConfigError` for options that such a model can't have yet.
        """
        what = f"{config.model} has layers with a recurrent state"
        if drafts := self._most_drafts(config, manager, what):
            self.keep_tokens(1 + drafts)
        snapshots = getattr(config.cache, "snapshots", 0)
        slots = config.max_running_requests + 1 + snapshots
        shapes = self.state_shapes()
        states = [torch.zeros((slots, *shape), dtype=dtype, device=self.ctx.device) for shape, dtype in shapes]
        gib = sum(state.nbytes for state in states) / 2**30
        log.info("%s: %d slots of %.1f MiB (%.2f GiB)", what, slots, gib * 2**10 / slots, gib)
        if not snapshots:
            log.info("no prefix is reused, because its pages hold no state: see cache=states")
        return states

    def _most_drafts(self, config: Config, manager: PluginManager, what: str) -> int:
        """Return how many drafts a row may have. Raises `ConfigError` if they can't be taken back out of a state."""
        speculation, graph = (manager.name_of(group, getattr(config, group)) for group in ("speculation", "graph"))
        if speculation in ("none", "null"):
            return 0
        why = ""
        if speculation not in PROPOSERS:
            why = f"which excludes speculation={speculation}: use speculation=none, or one of {', '.join(PROPOSERS)}."
        elif graph not in ("none", "null") and (graph, self.ctx.device.type) != ("auto", "cpu"):
            why = f"which excludes graph={graph} with speculation={speculation}: use graph=none, or speculation=none."
        elif config.verification_rounds > 1:
            why = "which excludes several rounds of verification: use verification_rounds=1, or speculation=none."
        if why:
            raise ConfigError(f"{what}, {why}")
        return int(config.speculation.max_drafts)
