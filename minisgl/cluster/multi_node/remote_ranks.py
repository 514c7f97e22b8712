"""Rank 0's connections to the ranks that torchrun started, on this node and others.

Rank 0 listens at one address, and each other rank connects to it and proves that it knows the secret. Then steps go to
all of them, in order. The death of any of them ends rank 0's process: its server then ends with an error (promise 10).
"""

from __future__ import annotations

import logging
import os
import socket
import threading
import time
from collections.abc import Callable
from functools import partial

import zmq

from minisgl.cluster.multi_node.frames import (
    ChannelError,
    EndOfSteps,
    Frame,
    Leaving,
    RankFailed,
    RankReady,
    StepFrame,
    Welcome,
)
from minisgl.cluster.multi_node.handshake import answer, read_secret
from minisgl.cluster.multi_node.link import CAUSE_SECONDS, Link
from minisgl.cluster.multi_node.same_options import plugin_hashes
from minisgl.cluster.multi_node.torchrun import Place, prepare_device, use_interface
from minisgl.cluster.process import free_port
from minisgl.config import Config, ConfigError
from minisgl.engine.ranks import Peers
from minisgl.message.queue import Addresses
from minisgl.plugin_manager.encoding import decode_config, plugins_of
from minisgl.plugin_manager.manager import PluginManager
from minisgl.server.rank_process import run_leader
from minisgl.server.worker_pool import DrainRequest, Failed, Report
from minisgl.utils.version import __version__

log = logging.getLogger(__name__)

MAX_HANDSHAKES = 32
"""Largest number of connections at one time that have not proved that they know the secret."""
_ACCEPT_SECONDS = 0.05


class RemoteRanks(Peers):
    """The ranks 1 to ``size - 1``. ``secret`` is the secret that all ranks have.

    ``on_dead`` gets the reason when a rank is gone, and whether an option must be changed. ``on_leaving`` is called
    when a rank's process was asked to end. Threads of the links call both.
    """

    def __init__(
        self,
        size: int,
        secret: bytes,
        on_dead: Callable[[str, bool], None],
        on_leaving: Callable[[], None],
    ):
        self._size, self._secret = size, secret
        self._on_dead, self._on_leaving = on_dead, on_leaving
        self._links: dict[int, Link] = {}
        self._ready: set[int] = set()
        self._changed = threading.Condition()  # held while `_links` or `_ready` changes
        self._handshakes = threading.Semaphore(MAX_HANDSHAKES)

    def listen(self, host: str, port: int) -> str:
        """Listen at ``host``:``port`` and return the address (host:port). Raise `ConfigError` if it can't be used."""
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._listener = socket.socket(family, socket.SOCK_STREAM)
        try:
            self._listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            self._listener.bind((host, port))
            self._listener.listen(MAX_HANDSHAKES)
        except OSError as error:
            self._listener.close()
            raise ConfigError(
                f"multi_node.interface, multi_node.listen_port: can't listen on {host}:{port}: {error.strerror}."
            ) from error
        self.address = f"{host}:{self._listener.getsockname()[1]}"
        return self.address

    def connect(self, seconds: float, welcome: Welcome) -> None:
        """Wait until all ranks have connected, send ``welcome`` to them, and stop listening.

        Raise TimeoutError if a rank has not connected after ``seconds``. A connection of someone who does not know the
        secret is closed, and logged.
        """
        deadline = time.monotonic() + seconds
        with self._listener:
            self._listener.settimeout(_ACCEPT_SECONDS)
            while missing := [str(rank) for rank in range(1, self._size) if rank not in self._links]:
                if time.monotonic() > deadline:
                    raise TimeoutError(
                        f"no connection of rank {', '.join(missing)} to {self.address} within {seconds:g} s "
                        "(multi_node.connect_timeout)"
                    )
                self._accept()
        for link in self._links.values():
            link.send(welcome)

    def _accept(self) -> None:
        """Wait a short time for a connection. Start a thread that runs its handshake."""
        try:
            sock, peer = self._listener.accept()
        except TimeoutError:
            return
        except OSError as error:  # such as too many open files
            log.warning("can't accept a connection: %s", error)
            time.sleep(_ACCEPT_SECONDS)
            return
        if self._handshakes.acquire(blocking=False):
            threading.Thread(target=self._shake_hands, args=(sock, peer[0]), daemon=True).start()
        else:
            sock.close()

    def _shake_hands(self, sock: socket.socket, host: str) -> None:
        """Run the handshake with a new connection. Add the rank that has connected."""
        try:
            rank, session = answer(sock, self._secret, __version__, self._size)
            peer = f"rank {rank} ({host})"
            link = Link(
                sock, session, peer, partial(self._on_message, rank, peer), lambda reason: self._on_dead(reason, False)
            )
            with self._changed:
                if rank in self._links:
                    raise ChannelError(f"rank {rank} is connected already")
                self._links[rank] = link
        except ChannelError as error:
            log.warning("refused a connection from %s: %s", host, error)
            sock.close()
        else:
            log.info("%s has connected", peer)
            link.start()
        finally:
            self._handshakes.release()

    def _on_message(self, rank: int, peer: str, message: Frame) -> None:
        match message:
            case RankReady():
                with self._changed:
                    self._ready.add(rank)
                    self._changed.notify_all()
            case RankFailed(text=text, options=options):
                self._on_dead(f"{peer}: {text}", options)
            case Leaving():
                log.info("%s was asked to end", peer)
                self._on_leaving()
            case _:
                raise ChannelError(f"it sent a {type(message).__name__}")

    def wait_until_ready(self) -> None:
        """Wait until the engines of all ranks are ready. The wait has no limit, but the death of a rank ends it."""
        with self._changed:
            self._changed.wait_for(lambda: len(self._ready) == self._size - 1)

    def send(self, data: bytes) -> None:
        """Send an encoded step to all ranks. Raise `ChannelError` if a connection is broken."""
        for link in self._links.values():
            link.send(StepFrame(data))

    def end(self) -> None:
        """Tell all ranks that no step follows, and close the connections."""
        for link in self._links.values():
            link.close(EndOfSteps())


def run_rank_0(report: Report, addresses: Addresses, encoded: bytes, place: Place) -> None:
    """Run rank 0 of ranks that torchrun started, until the server ends. It is the ``body`` of `worker_main`.

    ``encoded`` is the config, encoded by `encode_config`. The other ranks connect before the engine is built, so that
    the death of a rank is noticed while others wait for it.
    """
    manager = PluginManager.load(plugins_of(encoded))
    config = decode_config(encoded, manager)
    context = zmq.Context()

    def end(reason: str, options: bool) -> None:
        report.send(Failed(reason, options))
        os._exit(1)  # the main thread may wait in a collective, which has no other end

    from minisgl.engine.build import build_engine

    prepare_device(config, place.local_rank, place.local_size)
    ranks, rendezvous = _connect(config, manager, encoded, place, end, lambda: report.send(DrainRequest()))
    try:
        engine = build_engine(
            config, manager, 0, place.size, rendezvous, local_rank=place.local_rank, local_size=place.local_size
        )
        ranks.wait_until_ready()
        engine.peers = ranks
        run_leader(report, addresses, context, config, manager, engine)
    except Exception:
        time.sleep(CAUSE_SECONDS)
        raise
    engine.close()  # not after an error: see `run_rank`
    context.destroy(linger=500)


def _connect(
    config: Config,
    manager: PluginManager,
    encoded: bytes,
    place: Place,
    on_dead: Callable[[str, bool], None],
    on_leaving: Callable[[], None],
) -> tuple[RemoteRanks, str]:
    """Wait for the other ranks. Return the connections, and the address (host:port) for the communicators."""
    from minisgl.cluster.multi_node.store import AddressStore  # imports torch

    options = config.multi_node
    assert options.secret_file is not None
    assert options.interface is not None
    ranks = RemoteRanks(place.size, read_secret(options.secret_file), on_dead, on_leaving)
    host = use_interface(options.interface)
    address = ranks.listen(host, options.listen_port)
    store = AddressStore(place.master_addr, place.master_port, not place.agent_store, options.connect_timeout)
    store.publish(address)
    log.info("waiting for %d ranks at %s", place.size - 1, address)
    rendezvous = f"{host}:{free_port(host)}"
    ranks.connect(options.connect_timeout, Welcome(rendezvous, encoded, plugin_hashes(manager)))
    return ranks, rendezvous
