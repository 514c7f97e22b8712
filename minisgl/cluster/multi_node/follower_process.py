"""The process of a rank above 0 that torchrun started: it executes rank 0's steps, and serves no HTTP.

The process connects to rank 0 before it builds its engine, and ends as soon as rank 0 is gone. Its main thread may then
wait in a collective, so a thread of the connection ends the process.
"""

from __future__ import annotations

import faulthandler
import logging
import os
import queue
import signal
import socket
import time

from minisgl.cluster.multi_node.frames import (
    ChannelError,
    EndOfSteps,
    Frame,
    RankFailed,
    RankReady,
    Session,
    StepFrame,
    Welcome,
)
from minisgl.cluster.multi_node.handshake import HANDSHAKE_SECONDS, WrongSecretError, greet, read_secret
from minisgl.cluster.multi_node.link import CAUSE_SECONDS, Link
from minisgl.cluster.multi_node.same_options import check_same_options, check_same_plugins, plugin_hashes
from minisgl.cluster.multi_node.torchrun import END_STATUS, PARENT_POLL_SECONDS, Place, prepare_device, use_interface
from minisgl.cluster.process import when_parent_ends
from minisgl.config import Config, ConfigError
from minisgl.engine.ranks import follow
from minisgl.plugin_manager.encoding import decode_config, encode_config, plugins_of
from minisgl.plugin_manager.failures import described
from minisgl.plugin_manager.manager import PluginManager
from minisgl.server.worker_pool import STACK_DUMP_SIGNAL
from minisgl.utils.log import setup_logging
from minisgl.utils.version import __version__

log = logging.getLogger(__name__)


def run_follower(config: Config, light: PluginManager, place: Place) -> int:
    """Execute rank 0's steps until rank 0 ends. Return the exit status of the program.

    ``light`` has loaded the plugins without torch. Raise `ConfigError` for a wrong option.
    """
    role = f"scheduler-{place.rank}"
    setup_logging(config.log_level, config.log_format, role)
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_DFL)  # a handler in Python would wait for the end of a call of torch
    faulthandler.register(STACK_DUMP_SIGNAL, all_threads=False)
    encoded = encode_config(config, light)
    manager = PluginManager.load(plugins_of(encoded))
    from minisgl.engine.build import build_engine

    prepare_device(config, place.local_rank, place.local_size)
    rank0 = Rank0(connect(config, place))
    try:
        welcome = rank0.wait_for_welcome()
        check_same_options(encoded, welcome.config)
        check_same_plugins(plugin_hashes(manager), welcome.plugins)
        engine = build_engine(
            decode_config(encoded, manager),
            manager,
            place.rank,
            place.size,
            welcome.rendezvous,
            local_rank=place.local_rank,
            local_size=place.local_size,
        )
        rank0.begin()
        follow(engine, rank0.next_step)
    except ConfigError as error:
        rank0.fail(str(error), options=True)
        raise
    except BaseException as error:
        time.sleep(CAUSE_SECONDS)
        rank0.fail(described(error))
        log.critical("%s failed", role, exc_info=True)
        os._exit(1)  # closing the engine could wait for a rank that has ended
    engine.close()
    log.info("rank 0 has sent its last step")
    return END_STATUS


def connect(config: Config, place: Place) -> tuple[socket.socket, Session]:
    """Connect to rank 0 and return the connection with its session.

    Raise `ConfigError` if rank 0 has another secret, or can't be reached in ``multi_node.connect_timeout`` seconds.
    """
    options = config.multi_node
    assert options.secret_file is not None
    assert options.interface is not None
    secret = read_secret(options.secret_file)
    own = use_interface(options.interface)
    source = None if own == options.interface else (own, 0)
    address = rank0_address(place, options.connect_timeout)
    host, _, port = address.rpartition(":")
    try:
        sock = socket.create_connection((host, int(port)), HANDSHAKE_SECONDS, source)
        return sock, greet(sock, secret, __version__, place.rank, place.size)
    except WrongSecretError as error:
        raise ConfigError(f"multi_node.secret_file={options.secret_file}: {error} ({address}).") from error
    except (OSError, ChannelError) as error:
        raise ConfigError(f"multi_node: can't connect to rank 0 at {address}: {error}.") from error


def rank0_address(place: Place, seconds: float) -> str:
    """Return the address (host:port) at which rank 0 listens, from torchrun's store."""
    try:
        from minisgl.cluster.multi_node.store import AddressStore  # imports torch

        store = AddressStore(place.master_addr, place.master_port, False, seconds)
        return store.wait_for_address()
    except (OSError, RuntimeError) as error:  # torch's errors are RuntimeErrors
        raise ConfigError(f"rank 0 has not told its address within {seconds:g} s: {error}") from error


class Rank0:
    """This process's connection to rank 0, and the steps that have arrived through it.

    The process ends at once, with status 1, when rank 0 is gone before its last step.
    """

    def __init__(self, connection: tuple[socket.socket, Session]):
        self._welcome: queue.SimpleQueue[Welcome] = queue.SimpleQueue()
        self._steps: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        self._link = Link(*connection, "rank 0", self._on_message, self._on_dead)
        self._link.start()
        when_parent_ends(self._link.leave, PARENT_POLL_SECONDS)  # torchrun: rank 0 drains its server

    def wait_for_welcome(self) -> Welcome:
        """Wait until all ranks have connected to rank 0."""
        return self._welcome.get()

    def begin(self) -> None:
        """Tell rank 0 that this rank is ready. From now on SIGTERM and SIGHUP ask rank 0 to drain its server."""
        for number in (signal.SIGTERM, signal.SIGHUP):
            if signal.getsignal(number) != signal.SIG_IGN:  # nohup ignores SIGHUP
                signal.signal(number, lambda number, frame: self._link.leave())
        self._link.send(RankReady())
        log.info("ready")

    def next_step(self) -> bytes | None:
        """Wait for the next step and return it encoded. Return None after the last one."""
        return self._steps.get()

    def fail(self, text: str, options: bool = False) -> None:
        """Tell rank 0 why this rank ends, if the connection still works. ``options``: an option must be changed."""
        self._link.close(RankFailed(text, options))

    def _on_message(self, message: Frame) -> None:
        match message:
            case StepFrame(data=data):
                self._steps.put(data)
            case Welcome():
                self._welcome.put(message)
            case EndOfSteps():
                self._link.close()
                self._steps.put(None)
            case _:
                raise ChannelError(f"it sent a {type(message).__name__}")

    def _on_dead(self, reason: str) -> None:
        log.critical("this rank ends: %s", reason)
        os._exit(1)  # the main thread may wait in a collective, which has no other end
