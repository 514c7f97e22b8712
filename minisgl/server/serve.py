"""``serve``: from a config to a server that runs until told to end. The launcher is the API server too.

Starts the other processes first, since they take longest, and leaves nothing behind, however it ends.
"""

from __future__ import annotations

import asyncio
import signal
import socket

from minisgl.config import Config, ConfigError
from minisgl.message import Addresses
from minisgl.models.resolve import resolve_model
from minisgl.plugin_manager.manager import PluginManager, encode_config
from minisgl.server.worker_pool import SIGNALS, WorkerPool


def serve(config: Config, host: PluginManager) -> int:
    """Serve until told to end, or until a worker dies; the exit status. Raises `ConfigError` where the options are
    wrong, before anything is started or as soon as a child says so."""
    model = str(resolve_model(config.model))
    encoded = encode_config(config, host)
    listener = _listen(config.server.host, config.server.port)
    addresses = Addresses.make(config.server.tokenizers, config.tp)
    crew = WorkerPool()
    # A signal that comes while children start waits until there is somebody to handle it.
    blocked = signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
    try:
        crew.start(addresses, model, encoded, config.tp)
        from minisgl.server.launcher import Launcher  # HTTP's libraries load while the children do

        return asyncio.run(Launcher(config, host, addresses, crew, listener).run())
    finally:
        crew.kill()
        crew.close()
        addresses.remove()
        listener.close()
        signal.pthread_sigmask(signal.SIG_SETMASK, blocked)


def _listen(host: str, port: int) -> socket.socket:
    """A socket that listens there, before anything else is started. Raises `ConfigError`."""
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
        listener = socket.socket(family, socket.SOCK_STREAM)
    except OSError as error:
        raise ConfigError(f"server.host={host}: {error.strerror or error}. Give a name or an address.") from error
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(2048)
    except OSError as error:
        listener.close()
        raise ConfigError(
            f"server.port={port}: can't listen on {host}:{port}: {error.strerror}. Choose another port, or 0 for any "
            "free one."
        ) from error
    listener.setblocking(False)
    return listener
