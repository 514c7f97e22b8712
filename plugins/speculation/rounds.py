"""Verification in rounds (option ``verification_rounds``): wraps each rank's runner of steps in a `RoundsRunner`.

`minisgl.plugins.speculation.adaptive` decides which steps have several rounds.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

from minisgl.config import Config
from minisgl.hooks import hookimpl

if TYPE_CHECKING:
    import torch


@hookimpl
def minisgl_wrap_runner(config: Config, max_seq_len: int, device: torch.device) -> Any:
    if config.verification_rounds == 1:
        return None
    from minisgl.plugins.speculation.repeat import RoundsRunner, new_history

    return partial(RoundsRunner, new_history(config.max_running_requests, max_seq_len, device))
