"""The options of ``python -m minisgl.cluster``: its own, and all options of a server.

`ClusterConfig` is a `Config` with further options. `replica_words` are the arguments of one server. `shares` divides
the machine's GPUs or cores among the servers.
"""

from __future__ import annotations

import math
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import ClassVar

import psutil

from minisgl.config import ROUTER_GROUPS, Config, ConfigError
from minisgl.utils.process import is_loopback

ROUTER_ONLY = ("server.host", "server.port", "server.tls_cert", "server.tls_key", "server.max_connections", "trace")
"""Options of a server that the router takes, or that are different for each replica."""


@dataclass
class ClusterConfig(Config):
    """All options of a cluster: those of its servers, and these."""

    defaults_file: ClassVar[str] = "cluster.yaml"

    replicas: int = 2
    """Number of servers (replicas). Each has ``tp`` GPUs of its own or, on a CPU, its share of the cores."""
    restart_limit: int = 5
    """How often in a row a replica may die before it has run for a minute. Then it is not started again, and the
    cluster goes on with the others. It ends when none is left."""
    start_timeout: float = 1800.0
    """Seconds that a replica may take to start. Then it counts as dead."""
    health_timeout: float = 60.0
    """Seconds after which a replica that answers no health check counts as dead. After 5 s it gets no new requests. It
    should be longer than a server's longest step."""
    status_port: int = 0
    """With ``router=smg``, the port at 127.0.0.1 for ``/health``, ``/ready``, ``/replicas`` and ``/metrics`` of the
    cluster; 0 is any free port, which is printed. Another router answers them at ``server.port``."""

    def check(self) -> None:
        """Raise `ConfigError` if a value is out of range, or can't be used with several servers."""
        super().check()
        for name, least in (("replicas", 1), ("restart_limit", 1)):
            if getattr(self, name) < least:
                raise ConfigError(f"{name}={getattr(self, name)}: {name} must be at least {least}.")
        for name in ("start_timeout", "health_timeout"):
            seconds = getattr(self, name)
            if not (math.isfinite(seconds) and seconds > 0.0):
                raise ConfigError(f"{name}={seconds}: {name} must be a number of seconds above 0.")
        if not 0 <= self.status_port <= 65535:
            raise ConfigError(f"status_port={self.status_port}: status_port must be between 0 (any free) and 65535.")
        for name in ("endpoint", "replay_endpoint"):
            if (given := getattr(self.kv_events, name, None)) is not None:
                raise ConfigError(f"kv_events.{name}={given}: the replicas can't share an address. Leave it out.")


OWN_OPTIONS = tuple(field.name for field in fields(ClusterConfig) if field.name not in Config.__annotations__)


def replica_words(words: Sequence[str], config: ClusterConfig, index: int) -> list[str]:
    """Return the arguments of the server of replica ``index``: those of the cluster without the router's.

    ``words`` are the arguments of the cluster's command line.
    """
    dropped = {*OWN_OPTIONS, *ROUTER_GROUPS, *ROUTER_ONLY}
    keys = [word.partition("=")[0].lstrip("+") for word in words]
    kept = [
        word
        for key, word in zip(keys, words, strict=True)
        if key not in dropped and not key.startswith(tuple(f"{group}." for group in ROUTER_GROUPS))
    ]
    if config.trace:
        path = Path(config.trace)
        kept.append(f"trace={path.with_name(f'{path.stem}-{index}{path.suffix}')}")
    if config.server.api_key is None and not is_loopback(config.server.host):
        # The replica gets the Host of the router, which need not check it, because it does not listen at loopback.
        kept = [word for word in kept if not word.lstrip("+").startswith("server.allowed_hosts=")]
        kept.append("server.allowed_hosts=[*]")
    return [*kept, "server.host=127.0.0.1", "server.port=0"]


@dataclass(frozen=True)
class Share:
    """The part of the machine that a replica has. ``gpus`` are names for ``CUDA_VISIBLE_DEVICES``; None on a CPU."""

    cores: tuple[int, ...]
    gpus: tuple[str, ...] | None = None

    @property
    def text(self) -> str:
        if self.gpus is not None:
            return "GPU " + ",".join(self.gpus)
        return "cores " + ",".join(map(str, self.cores))

    def environment(self) -> dict[str, str]:
        """Return the environment variables of the replica's processes."""
        if self.gpus is not None:
            return {"CUDA_VISIBLE_DEVICES": ",".join(self.gpus)}
        return {} if "OMP_NUM_THREADS" in os.environ else {"OMP_NUM_THREADS": str(len(self.cores))}


def shares(config: ClusterConfig) -> list[Share]:
    """Divide the GPUs, or the cores, among the replicas. Raise `ConfigError` if there are too few GPUs."""
    cores = _cores()
    parts = [_part(cores, index, config.replicas) for index in range(config.replicas)]
    gpus = [] if config.device == "cpu" else visible_gpus()
    if not gpus and config.device != "cuda":
        return [Share(part) for part in parts]
    needed = config.replicas * config.tp
    if len(gpus) < needed:
        raise ConfigError(
            f"replicas={config.replicas} tp={config.tp}: they need {needed} GPUs, and torch finds {len(gpus)}. Choose "
            "fewer replicas, or device=cpu."
        )
    return [Share(part, tuple(gpus[index * config.tp : (index + 1) * config.tp])) for index, part in enumerate(parts)]


def _part(cores: Sequence[int], index: int, count: int) -> tuple[int, ...]:
    """Return part ``index`` of ``count`` parts: consecutive cores. With fewer cores than parts, some share a core."""
    if len(cores) < count:
        return (cores[index % len(cores)],)
    return tuple(cores[index * len(cores) // count : (index + 1) * len(cores) // count])


def _cores() -> list[int]:
    """Return the numbers of the cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return sorted(os.sched_getaffinity(0))
    return list(range(psutil.cpu_count() or 1))


def visible_gpus() -> list[str]:
    """Return the GPUs that torch finds, as names for ``CUDA_VISIBLE_DEVICES``.

    Another process asks torch: this one needs neither torch nor a CUDA context.
    """
    code = "import torch; print(torch.cuda.device_count())"
    answer = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    count = int(answer.stdout) if answer.returncode == 0 else 0
    given = os.environ.get("CUDA_VISIBLE_DEVICES")
    names = [name.strip() for name in given.split(",")] if given else [str(index) for index in range(count)]
    return names[:count]
