"""How OpenMP threads wait for each other: passively, so that a busy CPU does not slow the engine down.

If the model runs on the CPU, torch's OpenMP threads spin by default while they wait. Where other programs need the
cores too, a step then takes several times as long: with one of two cores busy, the server wrote 7 tokens per second
instead of 170. Passive waiting has no measurable cost on idle cores. The OpenMP
runtime reads the environment once, when torch is imported, and GNU's has no function that changes the policy later.
"""

from __future__ import annotations

import logging
import os
import sys

log = logging.getLogger(__name__)

POLICY = "OMP_WAIT_POLICY"
_SETTINGS = (POLICY, "GOMP_SPINCOUNT", "KMP_BLOCKTIME")


def _wait_passively() -> bool:
    """Ask for passive waiting, unless the user has set how to wait. Return whether torch may have been too early."""
    if any(name in os.environ for name in _SETTINGS):
        return False
    os.environ[POLICY] = "PASSIVE"  # the processes of the workers inherit it
    return "torch" in sys.modules


THREADS_SPIN = _wait_passively()
"""Whether torch was imported before minisgl, without a setting of how its threads wait: then they spin."""
SPIN_WARNING = (
    "torch was imported before minisgl, so its threads spin while they wait for each other: where other programs use "
    "the CPU too, this LLM can be several times slower. Import minisgl before torch, or set OMP_WAIT_POLICY=PASSIVE in "
    "the environment of Python."
)


def warn_if_threads_spin() -> None:
    """Log a warning if torch's threads spin, although there are several of them."""
    import torch

    if THREADS_SPIN and torch.get_num_threads() > 1:
        log.warning(SPIN_WARNING)
