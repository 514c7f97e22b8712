"""The options of ranks that torchrun starts: `MultiNodeConfig`, the section ``multi_node``."""

from __future__ import annotations

import math
from dataclasses import dataclass

from minisgl.config import checker


@dataclass
class MultiNodeConfig:
    """Options of ranks that torchrun starts, on one node or several. All of them run with the same command line."""

    secret_file: str | None = None
    """A file with a secret of at least 16 bytes that all ranks have. Only its owner may have access to it. With several
    ranks it is needed."""
    interface: str | None = None
    """The network interface that connects the ranks, such as ``eth0``: rank 0 listens at its address, and gloo and NCCL
    use it. Or an address of rank 0's machine to listen at. With several ranks it is needed."""
    listen_port: int = 0
    """The TCP port at which rank 0 listens for the other ranks. With 0, it is any free port."""
    connect_timeout: float = 300.0
    """Seconds that the other ranks may take to connect to rank 0."""

    def check(self) -> None:
        """Raise `ConfigError` if a value is out of range."""
        need = checker(self, "multi_node.")
        need(self.secret_file != "", "secret_file", "a file, or null")
        need(self.interface != "", "interface", "a network interface or an address, or null")
        need(0 <= self.listen_port <= 65535, "listen_port", "between 0 (any free port) and 65535")
        seconds_ok = math.isfinite(self.connect_timeout) and self.connect_timeout > 0.0
        need(seconds_ok, "connect_timeout", "a number of seconds above 0")
