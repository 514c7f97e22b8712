"""The command line of a cluster: ``python -m minisgl.cluster``."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from minisgl.cluster.cluster import run_cluster
from minisgl.cluster.options import ClusterConfig
from minisgl.options.compose import plain_errors, run_cli
from minisgl.server.extension import load_extensions
from minisgl.utils.log import setup_logging

PROGRAM = "minisgl.cluster"
USAGE = """\
usage: python -m minisgl.cluster [option=value ...]

Runs several servers of one model (replicas) and a router in front of them, which listens at server.port.

  python -m minisgl.cluster replicas=2 model=tutor
  python -m minisgl.cluster replicas=4 tp=2 model=Qwen/Qwen3-0.6B router=exact

  --help                        this text; with plugins=… the options of your plugins too
  --cfg job                     print the composed options and exit

"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run a cluster with the options of the command line until it ends. Return the exit status of the program.

    ``argv`` are the command line's arguments without the program's name, by default those of ``sys.argv``.
    """
    words = list(sys.argv[1:] if argv is None else argv)
    config, manager = run_cli(words, ClusterConfig, PROGRAM, USAGE)
    setup_logging(config.log_level, config.log_format, "cluster")
    with plain_errors(PROGRAM):
        load_extensions(
            config, names=["tls"] if getattr(config.server, "tls_cert", None) else []
        )  # a wrong file is an error now
        return run_cluster(config, manager, words)
