"""`serve`: starts the worker processes and runs the launcher, which is the API server too, until the server ends.

The workers are started before the HTTP libraries are imported, because the workers take longest. However the server
ends, it leaves no process, socket or file behind: the workers of a launcher that was killed remove the folder of the
socket files. If they were killed together with the launcher, the next server of the same user removes the folder.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import socket
from collections.abc import Callable, Iterator, Sequence
from functools import partial

from minisgl.config import Config, ConfigError
from minisgl.message.queue import Addresses
from minisgl.models.generation_config import default_sampling_params
from minisgl.models.resolve import resolve_model, warn_of_same_name
from minisgl.plugin_manager.discovery import exists, import_module
from minisgl.plugin_manager.encoding import encode_config
from minisgl.plugin_manager.manager import PluginManager
from minisgl.server.rank_process import run_rank
from minisgl.server.text_process import run_text_process
from minisgl.server.worker_pool import WorkerPool, heeded_signals
from minisgl.utils.log import setup_logging

log = logging.getLogger(__name__)

LOCAL_RANKS = "minisgl.plugins.ranks.local"
"""The plugin with the bodies of several ranks, which a server runs on this machine."""


def serve(config: Config, manager: PluginManager, ranks: Sequence[Callable[..., None]] = ()) -> int:
    """Run the server until a signal ends it or a worker dies. Return the exit status of the program.

    ``ranks`` are the bodies of the ranks' processes that are started here (`worker_main`), by default of all ranks.
    Raise `ConfigError` for a wrong option, before a process is started or as soon as a worker reports the option.
    """
    setup_logging(config.log_level, config.log_format, "api")
    path = resolve_model(config.model)
    warn_of_same_name(config.model)
    sampling_defaults = default_sampling_params(config, path)  # raises `ConfigError` for a wrong value
    model = str(path)
    encoded = encode_config(config, manager)
    ranks = ranks or all_ranks(config.tp)
    listener = listen(config.server.host, config.server.port)
    worker_pool = WorkerPool((config.log_level, config.log_format))
    with _pending_signals() as pending, contextlib.closing(worker_pool), listener, asyncio.Runner() as runner:
        addresses = Addresses.make(config.server.tokenizers, len(ranks))
        workers = {f"scheduler-{rank}": body for rank, body in enumerate(ranks)} | text_workers(addresses, model)
        try:
            log.info("starting %s with tp=%d and %d tokenizer processes", model, config.tp, config.server.tokenizers)
            worker_pool.start(addresses, encoded, workers)
            from minisgl.server.launcher import Launcher  # imports the HTTP libraries while the workers start

            launcher = Launcher(config, manager, addresses, worker_pool, listener, sampling_defaults)
            return runner.run(launcher.run(pending))
        finally:  # before the event loop is closed, because a second Ctrl-C would then interrupt this
            worker_pool.kill()
            addresses.remove()


@contextlib.contextmanager
def _pending_signals() -> Iterator[list[int]]:
    """Collect the signals that arrive while the workers start: the launcher handles them when its event loop runs.

    Blocking the signals would not do: another thread, such as one of a numerical library, would receive them.
    """
    pending: list[int] = []
    previous = {number: signal.signal(number, lambda number, _: pending.append(number)) for number in heeded_signals()}
    try:
        yield pending
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


def all_ranks(tp: int) -> list[Callable[..., None]]:
    """Return the bodies of the processes of ``tp`` ranks. Raise `ConfigError` if the plugin for several is missing."""
    if tp == 1:
        return [run_rank]
    if not exists(LOCAL_RANKS):
        raise ConfigError(f"tp={tp} needs the plugin plugins/ranks/local, which is missing.")
    bodies: list[Callable[..., None]] = import_module(LOCAL_RANKS, LOCAL_RANKS).bodies(tp)
    return bodies


def text_workers(addresses: Addresses, model: str) -> dict[str, Callable[..., None]]:
    """Return the bodies of the tokenizers' and the detokenizer's processes, by name. ``model`` is its directory."""
    inboxes = {f"tokenizer-{i}": inbox for i, inbox in enumerate(addresses.tokenizers)}
    inboxes = {"detokenizer": addresses.detokenizer} | {
        role: inbox for role, inbox in inboxes.items() if inbox != addresses.detokenizer
    }
    return {role: partial(run_text_process, inbox=inbox, model=model) for role, inbox in inboxes.items()}


def listen(host: str, port: int) -> socket.socket:
    """Return a socket that listens on ``host`` and ``port``. Raise `ConfigError` if the address can't be used.

    The socket names its protocol, because asyncio sets TCP_NODELAY only on the connections of sockets that do. Without
    TCP_NODELAY, the first token of a response on a reused connection waits until the client has acknowledged the
    response's headers, which it may delay by 40 ms.
    """
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
        listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    except OSError as error:
        raise ConfigError(f"server.host={host}: {error.strerror or error}. Give a name or an address.") from error
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen()
    except OSError as error:
        listener.close()
        raise ConfigError(
            f"server.port={port}: can't listen on {host}:{port}: {error.strerror}. Choose another port, or 0 for any "
            "free one."
        ) from error
    listener.setblocking(False)
    return listener
