"""`start`: runs one rank that torchrun started, or refuses options of ``multi_node`` without torchrun."""

from __future__ import annotations

import os
import signal
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING

from minisgl.cluster.multi_node.follower_process import run_follower
from minisgl.cluster.multi_node.handshake import read_secret
from minisgl.cluster.multi_node.remote_ranks import run_rank_0
from minisgl.cluster.multi_node.torchrun import END_STATUS, PARENT_POLL_SECONDS, address_of, fit_config, read_place
from minisgl.cluster.process import when_parent_ends
from minisgl.config import Config
from minisgl.plugin_manager.manager import PluginManager
from minisgl.server.serve import serve
from minisgl.server.worker_pool import SIGNALS

if TYPE_CHECKING:
    from minisgl.plugins.ranks.torchrun_options import MultiNodeConfig


def start(config: Config, manager: PluginManager, words: Sequence[str]) -> int:
    """Run the server (rank 0) or a follower (the other ranks). Return the exit status of the program.

    ``words`` are the arguments of the command line. Raise `ConfigError` for a wrong option.
    """
    place = read_place(os.environ)
    fit_config(config, words, place)
    if place is not None and place.rank > 0:
        return run_follower(config, manager, place)
    if place is None or place.size == 1:
        return serve(config, manager)
    check_multi_node(config.multi_node)
    blocked = signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)  # a thread has the mask of the thread that starts it
    # The server drains, as after SIGTERM, when the parent of this process, torchrun, has ended.
    when_parent_ends(lambda: os.kill(os.getpid(), signal.SIGTERM), PARENT_POLL_SECONDS)
    signal.pthread_sigmask(signal.SIG_SETMASK, blocked)
    return serve(config, manager, [partial(run_rank_0, place=place)]) or END_STATUS


def check_multi_node(options: MultiNodeConfig) -> None:
    """Raise `ConfigError` if the secret can't be read, or if this machine has no such network interface."""
    assert options.secret_file is not None
    assert options.interface is not None
    read_secret(options.secret_file)
    address_of(options.interface)
