"""The place of this process among the ranks that torchrun started on one or more nodes.

torchrun tells each process its place in environment variables. This module reads them, and fits the config to them.
"""

from __future__ import annotations

import fcntl
import ipaddress
import os
import signal
import socket
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from minisgl.config import Config, ConfigError

END_STATUS = 128 + signal.SIGTERM
"""The exit status of each rank after a clean end. With 0, torchrun would wait up to five minutes for the same status of
the other nodes' ranks, also where a node's torchrun has ended."""
PARENT_POLL_SECONDS = 0.5
"""Seconds between two checks that torchrun still runs."""
_SIOCGIFADDR = 0x8915
"""Linux's request for the IPv4 address of a network interface."""


@dataclass(frozen=True)
class Place:
    """The place of one process: rank ``rank`` of ``size``, and number ``local_rank`` of ``local_size`` on its node.

    The store of torchrun, through which rank 0 tells its address, is at ``master_addr``:``master_port``. If
    ``agent_store`` is true, torchrun itself runs it, else rank 0 does.
    """

    rank: int
    size: int
    local_rank: int
    local_size: int
    master_addr: str
    master_port: int
    agent_store: bool = True


def read_place(environment: Mapping[str, str]) -> Place | None:
    """Return the place of this process, or None if torchrun did not start it.

    Raise `ConfigError` if torchrun would start the ranks again after a failure, or if a variable is missing.
    """
    if "TORCHELASTIC_RUN_ID" not in environment:
        return None

    def number(name: str) -> int:
        value = environment.get(name, "")
        if not value.isdigit():
            raise ConfigError(f"{name}={value}: torchrun sets this environment variable to a whole number.")
        return int(value)

    if restarts := number("TORCHELASTIC_MAX_RESTARTS"):
        raise ConfigError(
            f"--max-restarts={restarts}: minisgl can't be restarted inside torchrun. Leave the option out, and restart "
            "torchrun on all nodes."
        )
    return Place(
        rank=number("RANK"),
        size=number("WORLD_SIZE"),
        local_rank=number("LOCAL_RANK"),
        local_size=number("LOCAL_WORLD_SIZE"),
        master_addr=environment.get("MASTER_ADDR", ""),
        master_port=number("MASTER_PORT"),
        agent_store=environment.get("TORCHELASTIC_USE_AGENT_STORE") == "True",
    )


def fit_config(config: Config, words: Sequence[str], place: Place | None) -> None:
    """Set ``config.tp`` to the number of ranks that torchrun started, and check the options of ``multi_node``.

    ``words`` are the arguments of the command line. Raise `ConfigError` if they set another ``tp``, if an option that
    several ranks need is missing, or if an option of ``multi_node`` is set without torchrun.
    """
    config.multi_node.check()
    if place is None:
        if config.multi_node != Config().multi_node:
            raise ConfigError("The options of multi_node are for ranks that torchrun starts: leave them out.")
        return
    if any(word.lstrip("+").startswith("tp=") for word in words) and config.tp != place.size:
        raise ConfigError(
            f"tp={config.tp}, but torchrun starts {place.size} ranks (WORLD_SIZE={place.size}): leave tp out."
        )
    config.tp = place.size
    if place.size > 1:
        if config.multi_node.secret_file is None:
            raise ConfigError("multi_node.secret_file: name a file with a secret that all ranks have.")
        if config.multi_node.interface is None:
            raise ConfigError(
                f"multi_node.interface: name the network interface that connects the ranks. Here: {_interfaces()}."
            )


def address_of(interface: str) -> str:
    """Return the IPv4 address of a network interface. An address is returned as it is.

    Raise `ConfigError` if this machine has no such interface, or if the interface has no IPv4 address.
    """
    try:
        return str(ipaddress.ip_address(interface))
    except ValueError:
        pass
    given = f"multi_node.interface={interface}"
    if interface not in (name for _, name in socket.if_nameindex()):
        raise ConfigError(f"{given}: this machine has no such network interface. It has: {_interfaces()}.")
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            reply = fcntl.ioctl(probe, _SIOCGIFADDR, struct.pack("256s", interface.encode()))
    except OSError as error:
        raise ConfigError(f"{given}: its IPv4 address can't be read ({error.strerror}): give an address.") from error
    return socket.inet_ntoa(reply[20:24])


def use_interface(interface: str) -> str:
    """Have gloo and NCCL use a network interface, and return its address.

    ``GLOO_SOCKET_IFNAME`` and ``NCCL_SOCKET_IFNAME`` stay as they are if they are set, and if ``interface`` is an
    address. Raise `ConfigError` as `address_of` does.
    """
    address = address_of(interface)
    if address != interface:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)
        os.environ.setdefault("NCCL_SOCKET_IFNAME", f"={interface}")
    return address


def _interfaces() -> str:
    return ", ".join(name for _, name in socket.if_nameindex())


def prepare_device(config: Config, local_rank: int, local_size: int) -> None:
    """Check that this machine has the device of the rank, and initialise CUDA if it is a GPU.

    This can take seconds in which no other thread of this process runs. A rank calls it before it is ready.
    Raises `ConfigError` if this machine has too few GPUs.
    """
    import torch

    from minisgl.engine.setup import resolve_device

    if resolve_device(config, local_rank, local_size).type == "cuda":
        torch.cuda.init()
