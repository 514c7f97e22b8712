"""Recurrent states, for models of this folder whose layers have some: docs/design/states.md."""

from __future__ import annotations

import logging

import torch
from torch import Tensor

from minisgl.config import Config, ConfigError
from minisgl.layers import Context
from minisgl.plugin_manager.manager import PluginManager

log = logging.getLogger(__name__)


class WithStates:
    """The part of a model that allocates its states. Its base class is a `Decoder`, or another model."""

    ctx: Context

    def state_shapes(self) -> list[tuple[tuple[int, ...], torch.dtype]]:
        """Return shape and dtype of each tensor of one request's state. A layer finds them in `Context.states`."""
        raise NotImplementedError

    def allocate_states(self, config: Config, manager: PluginManager) -> list[Tensor]:
        """Return a tensor for each of `state_shapes`: [request-pool rows, scratch row too, snapshots, *shape].

        Raises `ConfigError` for options that such a model can't have yet.
        """
        speculation = manager.name_of("speculation", config.speculation)
        what = f"{config.model} has layers with a recurrent state"
        if speculation not in ("none", "null"):
            raise ConfigError(
                f"{what}, which excludes speculation={speculation}: a rejected draft can't be taken back out of a "
                "state. Use speculation=none."
            )
        snapshots = getattr(config.cache, "snapshots", 0)
        slots = config.max_running_requests + 1 + snapshots
        shapes = self.state_shapes()
        states = [torch.zeros((slots, *shape), dtype=dtype, device=self.ctx.device) for shape, dtype in shapes]
        gib = sum(state.nbytes for state in states) / 2**30
        log.info("%s: %d slots of %.1f MiB (%.2f GiB)", what, slots, gib * 2**10 / slots, gib)
        if not snapshots:
            log.info("no prefix is reused, because its pages hold no state: see cache=states")
        return states
